"""LV-ViT (All Tokens Matter, NeurIPS 2021), written from its published facts: timm's VisionTransformer with a convolutional
stem, residuals divided by a constant, and a second head on the patches. Keys are those of the official checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .embedding import Embedding
from .registry import build, config

WIDTH = 64  # channels of the stem
HEADS = ("cls", "cls+aux")  # the class head alone, or with the head on the patches


class Stem(Embedding):
    """Three convolutions at half the resolution, then patches of 8 × 8."""

    def __init__(self, img_size: int | tuple[int, int], in_chans: int, embed_dim: int, **options: Any) -> None:
        super().__init__(img_size)
        self.conv1 = nn.Conv2d(in_chans, WIDTH, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTH)
        self.conv2 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(WIDTH)
        self.conv3 = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(WIDTH)
        self.relu = nn.ReLU(inplace=True)
        self.proj = nn.Conv2d(WIDTH, embed_dim, 8, stride=8)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in ((self.conv1, self.bn1), (self.conv2, self.bn2), (self.conv3, self.bn3)):
            x = self.relu(norm(conv(x)))
        return self.proj(x).flatten(2).transpose(1, 2)


class Scale(nn.Module):
    """A constant before the residual is added; it stands where timm's blocks have LayerScale, and has no weight."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def extra_repr(self) -> str:
        return f"{self.factor:g}"


class LVViT(VisionTransformer):
    """With the class head alone, as the ATM paper uses it: the head on the patches is there, but not read."""

    def __init__(self, *, skip_lam: float, num_classes: int = 1000, **options: Any) -> None:
        options = {"patch_size": 16, "mlp_ratio": 3.0, "qkv_bias": False, "embed_layer": Stem} | options
        super().__init__(num_classes=num_classes, norm_layer=partial(nn.LayerNorm, eps=1e-5), **options)
        for block in self.blocks:
            block.ls1, block.ls2 = Scale(1 / skip_lam), Scale(1 / skip_lam)
        self.aux_head = nn.Linear(self.embed_dim, num_classes) if num_classes else nn.Identity()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        super().reset_classifier(num_classes, global_pool)
        self.aux_head = nn.Linear(self.embed_dim, num_classes) if num_classes else nn.Identity()


class LVViTWithAux(LVViT):
    """With both heads, as the official evaluation has it: class logits + ½ · the largest logits over the patches."""

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        logits: Tensor = super().forward_head(x, pre_logits)
        if pre_logits or not self.num_classes:
            return logits
        return logits + 0.5 * self.aux_head(x[:, self.num_prefix_tokens :]).amax(1)


def _build(name: str, pretrained: bool, head: Literal["cls", "cls+aux"], crop: float, **options: Any) -> LVViT:
    if head not in HEADS:
        raise ValueError(f"{name}: head must be {' or '.join(map(repr, HEADS))}, not {head!r}")
    cfg = config(crop, "patch_embed.conv1", "apache-2.0", "https://github.com/zihangJiang/TokenLabeling")
    return build(LVViT if head == "cls" else LVViTWithAux, name, pretrained, cfg, **options)


@register_model
def lvvit_t(pretrained: bool = False, head: Literal["cls", "cls+aux"] = "cls+aux", **options: Any) -> LVViT:
    """8.5 M parameters."""
    shape = {"embed_dim": 240, "depth": 12, "num_heads": 4, "skip_lam": 1.0}
    return _build("lvvit_t", pretrained, head, 0.9, **(shape | options))


@register_model
def lvvit_s(pretrained: bool = False, head: Literal["cls", "cls+aux"] = "cls+aux", **options: Any) -> LVViT:
    """26.2 M parameters."""
    shape = {"embed_dim": 384, "depth": 16, "num_heads": 6, "skip_lam": 2.0}
    return _build("lvvit_s", pretrained, head, 0.9, **(shape | options))


@register_model
def lvvit_m(pretrained: bool = False, head: Literal["cls", "cls+aux"] = "cls+aux", **options: Any) -> LVViT:
    """55.8 M parameters."""
    shape = {"embed_dim": 512, "depth": 20, "num_heads": 8, "skip_lam": 2.0}
    return _build("lvvit_m", pretrained, head, 1.0, **(shape | options))
