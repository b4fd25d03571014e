"""open_clip's VisionTransformer, and the models around it: CLIP, CustomTextCLIP, CoCa, and towers that are timm models.

Its transformer hands `attn_mask` to every block unchanged, so this argument carries the state of the call. To the
transformer it travels with the images (relay.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..core.attention import AttentionConfig, partial_qkv
from ..utils.optional import require_package
from .base import Backbone, BlockCost, Call, CannotLoad, ModelAdapter, Preprocessing, UnknownModel, Unsupported, register
from .helpers import Passthrough, called_alone, check_blocks, linear_macs, norm_width, require_version, split_heads
from .relay import Carried

PREFIX = "open_clip:"


class OpenClipModel:
    """Put before the model's class: the call travels with the images."""

    def forward(self, x: Tensor) -> Any:
        model: Any = self
        return super().forward(Carried(x, model._tokenmerge.open(model, x)))  # type: ignore[misc]

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        model: Any = self
        call = model._tokenmerge.open(model, x, entry="forward_features", restore_each=True, grid=True)
        return super().forward_intermediates(Carried(x, call), *args, **kwargs)  # type: ignore[misc]

    def _embeds(self, x: Any) -> Any:
        if not isinstance(x, Carried):
            return super()._embeds(x)  # type: ignore[misc]
        return Carried(super()._embeds(x.x), x.call)  # type: ignore[misc]


class OpenClipTransformer:
    """Put before the class of the module that runs the blocks."""

    def forward(self, x: Any, attn_mask: object = None) -> Tensor:
        x, call = x if isinstance(x, Carried) else (x, attn_mask)
        return super().forward(x, attn_mask=call)  # type: ignore[misc]

    def forward_intermediates(self, x: Any, attn_mask: object = None, **options: Any) -> Any:
        x, call = x if isinstance(x, Carried) else (x, attn_mask)
        return super().forward_intermediates(x, attn_mask=call, **options)  # type: ignore[misc]


class OpenClipBlock:
    """Put before a block's class: hands the input to the call that came as `attn_mask`."""

    _tokenmerge: int  # layer, from 1

    def forward(self, x: Tensor, *others: object, attn_mask: object = None) -> Tensor:
        call = next((given for given in (*others, attn_mask) if isinstance(given, Call)), None)
        if call is None:
            raise called_alone(self._tokenmerge)
        block: Any = self
        if getattr(block.attn, "batch_first", True):
            return call.step(block, self._tokenmerge, x)
        return call.step(block, self._tokenmerge, x.transpose(0, 1)).transpose(0, 1)


def _library(model: nn.Module, module: str, *names: str) -> bool:
    """Whether the model is of one of these classes of open_clip, which is not imported for that."""
    known: Any = sys.modules.get(f"open_clip.{module}")
    return known is not None and isinstance(model, tuple(getattr(known, name) for name in names))


class OpenClip(ModelAdapter):
    """What all models of open_clip have in common."""

    name_prefix = PREFIX
    name_form = ""  # loaded by OpenClipViT

    def classifier(self, model: nn.Module) -> nn.Module | None:
        return None

    def output(self, out: Any) -> Tensor:
        pooled: Tensor = out[0] if isinstance(out, tuple) else out  # (pooled, tokens), where tokens are asked for
        return pooled

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        require_package("open_clip", "models of open_clip")
        import open_clip

        short, _, tag = name.partition("/")
        if ":" not in short and short not in open_clip.list_models():
            raise UnknownModel(f"unknown model {PREFIX}{name}; open_clip has {', '.join(open_clip.list_models()[:5])}, …")
        known = open_clip.list_pretrained_tags_by_model(short) if ":" not in short else []
        if pretrained and known and tag not in known:
            raise CannotLoad(
                f"{PREFIX}{name}: which weights? {PREFIX}{short}/TAG, with TAG one of {', '.join(known)}; or give local "
                "ones with --weights"
            )
        model: nn.Module = open_clip.create_model(name if ":" in short else short, tag if pretrained else None, **options)
        return model

    def preprocessing(self, model: Any, crop: float | None, size: int | None) -> Preprocessing:
        from open_clip.model import get_model_preprocess_cfg
        from open_clip.transform import PreprocessCfg, image_transform_v2

        if crop is not None:
            raise ValueError("open_clip's transforms have no crop; leave crop out, or give a transform")
        if not hasattr(getattr(model, "visual", model), "preprocess_cfg"):
            raise ValueError(
                f"no preprocess_cfg was found on this {type(model).__name__}; give load_images the transform that "
                "create_model_and_transforms returned, or make the model with open_clip.create_model"
            )
        given = dict(get_model_preprocess_cfg(model))
        config = PreprocessCfg(**(given if size is None else given | {"size": size}))
        transform = image_transform_v2(config, is_train=False)
        return Preprocessing(transform, config.mean, config.std, size=config.input_size, description=repr(transform))

    def input_size(self, model: Any) -> tuple[int, ...]:
        size = getattr(model, "visual", model).image_size
        height, width = size if isinstance(size, tuple) else (size, size)
        return 3, height, width

    def num_classes(self, model: Any) -> int:
        return 0

    def class_names(self, model: nn.Module) -> Sequence[str] | None:
        return None


@register
class OpenClipModels(OpenClip):
    """Models with a vision and a text tower."""

    name = "open_clip models"

    def matches(self, model: nn.Module) -> bool:
        return _library(model, "model", "CLIP", "CustomTextCLIP") or _library(model, "coca_model", "CoCa")

    def tower(self, model: Any) -> nn.Module:
        return model.visual

    def run(self, model: Any, images: Tensor) -> Tensor:
        return model.encode_image(images)


@register
class OpenClipTimm(OpenClip):
    """A timm model as a vision tower."""

    name = "open_clip's timm models"

    def matches(self, model: nn.Module) -> bool:
        return _library(model, "timm_model", "TimmModel")

    def tower(self, model: Any) -> nn.Module:
        return model.trunk


@register
class OpenClipViT(OpenClip, Backbone):
    """Blocks x + attn(ln_1 x), x + mlp(ln_2 x), with nn.MultiheadAttention or open_clip's own attention."""

    name = "open_clip VisionTransformer"
    name_form = "open_clip:ViT-B-32/TAG"
    model_mixin = OpenClipModel
    block_mixin = OpenClipBlock

    def matches(self, model: nn.Module) -> bool:
        return _library(model, "transformer", "VisionTransformer")

    def check(self, model: Any) -> None:
        from open_clip.transformer import (
            Attention,
            CustomResidualAttentionBlock,
            CustomTransformer,
            ResidualAttentionBlock,
            Transformer,
            VisionTransformer,
        )

        require_version("open_clip_torch", "3.0")
        classes = (ResidualAttentionBlock, CustomResidualAttentionBlock)
        check_blocks(self, model, classes, (nn.MultiheadAttention, Attention))
        name = type(model).__name__
        if type(model)._embeds is not VisionTransformer._embeds or type(model.transformer) not in (
            Transformer,
            CustomTransformer,
        ):
            raise Unsupported(f"{name} has embeddings or a transformer of its own; supported are open_clip's")
        for i, block in enumerate(self.blocks(model)):
            if getattr(block.attn, "logit_scale", None) is not None:
                raise Unsupported(
                    f"{name}: block {i} scales cosines (scaled_cosine); supported is attention by scaled dot products"
                )

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.transformer.resblocks

    def relays(self, model: Any) -> Mapping[nn.Module, type]:
        return {model.transformer: OpenClipTransformer}

    def attention(self, block: Any) -> nn.Module:
        return block.attn

    def prefix(self, model: Any) -> int:
        return 1

    def has_cls_token(self, model: Any) -> bool:
        return True

    def head_reads_prefix_only(self, model: Any) -> bool:
        from open_clip.transformer import VisionTransformer

        own = getattr(type(model), "_tokenmerge_base", type(model))
        known = all(
            getattr(own, name) is getattr(VisionTransformer, name) and name not in model.__dict__
            for name in ("forward", "_pool", "_global_pool")
        )
        return known and model.pool_type == "tok" and model.attn_pool is None and not model.output_tokens

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        attn = block.attn
        made = partial_qkv(attn.in_proj_weight, attn.in_proj_bias, block.ln_1(x), parts)
        norms = {"q": getattr(attn, "ln_q", None), "k": getattr(attn, "ln_k", None)}
        heads = {part: split_heads(made[part], attn.num_heads) for part in parts}
        return tuple(heads[part] if (norm := norms.get(part)) is None else norm(heads[part]) for part in parts)

    def attention_config(self, block: Any) -> AttentionConfig:
        attn = block.attn
        dropout = attn.dropout if isinstance(attn, nn.MultiheadAttention) else attn.attn_drop.p
        return AttentionConfig(None, dropout if attn.training else 0.0)

    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        attn = block.attn
        if isinstance(attn, nn.MultiheadAttention):
            return x + block.ls_1(attn.out_proj(out.transpose(1, 2).flatten(2)))
        if attn.head_scale is not None:
            out = out * attn.head_scale
        out = attn.out_drop(attn.out_proj(attn.ln_inner(out.transpose(1, 2).flatten(2))))
        return x + block.ls_1(block.ln_attn(out))

    def add_mlp(self, block: Any, x: Tensor) -> Tensor:
        return x + block.ls_2(block.mlp(block.ln_2(x)))

    def cost(self, block: Any) -> BlockCost:
        attn = block.attn
        width = attn.out_proj.in_features
        norms = (getattr(attn, "ln_inner", None), getattr(block, "ln_attn", None))
        return BlockCost(
            macs_q=width * width,
            macs_k=width * width,
            macs_v=width * width,
            macs_out=linear_macs(attn.out_proj),
            macs_mlp=linear_macs(block.mlp),
            width=width,
            attn_width=width,
            head_dim=attn.head_dim,
            norm_in=norm_width(block.ln_1),
            norm_q=width if norm_width(getattr(attn, "ln_q", None)) else 0,
            norm_k=width if norm_width(getattr(attn, "ln_k", None)) else 0,
            norm_attn=sum(norm_width(norm) for norm in norms),
            norm_out=norm_width(block.ln_2) + norm_width(getattr(block.mlp, "ln", None)),
        )

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        model.transformer.batch_first = True
        model.transformer.resblocks = nn.ModuleList([Passthrough(exit_tokens)])

    def enable_checkpointing(self, model: Any) -> None:
        model.set_grad_checkpointing()
