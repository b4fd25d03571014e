"""The paper's models: their names there, their official weights, and how the paper runs and counts them."""

from __future__ import annotations

from dataclasses import dataclass

from ..engine.cost import Convention


@dataclass(frozen=True)
class Published:
    """A model of the paper: its name there, and the official weights."""

    label: str
    file: str  # of the official weights; a file is found by its beginning, up to the first dash or dot
    origin: str  # the project that publishes it
    megabytes: int  # float32 weights
    params: float | None = None  # million, as Tables 1 and 2 print them
    crop: float | None = None  # None: as the model's config says
    convention: Convention = "paper"  # of its GMACs
    batch_size: int = 1024
    prop_attn: bool = True
    cls_only: bool = True  # whether ATM keeps only the CLS token in the last layer
    layout: str = "timm's keys, under `model`"


_DEIT, _LV, _T2T = "facebookresearch/deit", "zihangJiang/TokenLabeling", "yitu-opensource/T2T-ViT"
_LV_LAYOUT = "its own stem and `aux_head`, read by `tokenmerge.models`"
_T2T_LAYOUT = "its own `tokens_to_token`, under `state_dict_ema`, read by `tokenmerge.models`"
PUBLISHED = {
    "deit_tiny_patch16_224": Published("DeiT-T", "deit_tiny_patch16_224-a1311bcf.pth", _DEIT, 23, 5, crop=0.875),
    "deit_small_patch16_224": Published("DeiT-S", "deit_small_patch16_224-cd65a155.pth", _DEIT, 88, 22, crop=0.875),
    "deit_base_patch16_224": Published("DeiT-B", "deit_base_patch16_224-b5f2ef4d.pth", _DEIT, 346, 86, crop=0.875),
    "lvvit_t": Published("LV-ViT-T", "lvvit_t", _LV, 34, 8.5, convention="lvvit", layout=_LV_LAYOUT),
    "lvvit_s": Published("LV-ViT-S", "lvvit_s-26M-224-83.3.pth.tar", _LV, 105, 26.2, convention="lvvit", layout=_LV_LAYOUT),
    "lvvit_m": Published("LV-ViT-M", "lvvit_m-56M-224-84.0.pth.tar", _LV, 223, convention="lvvit", layout=_LV_LAYOUT),
    "t2t_vit_t_14": Published("T2T-ViT-14", "81.7_T2T_ViTt_14.pth.tar", _T2T, 86, 21.5, batch_size=100, layout=_T2T_LAYOUT),
    "t2t_vit_t_19": Published("T2T-ViT-19", "82.4_T2T_ViTt_19.pth.tar", _T2T, 157, 39.2, batch_size=100, layout=_T2T_LAYOUT),
    "mae_vit_base_patch16": Published(
        "MAE", "mae_finetuned_vit_base.pth", "facebookresearch/mae", 346, 86, prop_attn=False, cls_only=False
    ),
}
