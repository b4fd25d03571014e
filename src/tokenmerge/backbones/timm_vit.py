"""timm's VisionTransformer with plain blocks: DeiT, DeiT-III, AugReg, DINOv2, CLIP, SigLIP, MAE and similar models.

timm hands `attn_mask` from `forward` down to every block unchanged. A merged model takes no mask of its own, so this
argument carries the state of the call: nothing is kept on the model, no loop of timm is copied, hooks fire as usual.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ..core.attention import AttentionConfig, fused_projection
from .base import Backbone, BlockCost, Call, Preprocessing, UnknownModel, Unsupported, register
from .helpers import (
    Passthrough,
    called_alone,
    check_blocks,
    linear_macs,
    norm_width,
    require_version,
    timm_preprocessing,
)


class TimmModel:
    """Put before the model's class: opens a call wherever timm's methods can be entered from outside."""

    def forward(self, x: Tensor, attn_mask: object = None, is_causal: bool = False) -> Any:
        return super().forward(x, attn_mask=_open(self, x, attn_mask, is_causal))  # type: ignore[misc]

    def forward_features(self, x: Tensor, attn_mask: object = None, is_causal: bool = False) -> Any:
        call = _open(self, x, attn_mask, is_causal, entry="forward_features")
        return super().forward_features(x, attn_mask=call)  # type: ignore[misc]

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.pop("attn_mask", None)
        causal = kwargs.pop("is_causal", False)
        call = _open(self, x, mask, causal, entry="forward_features", restore_each=True, grid=True)
        return super().forward_intermediates(x, *args, attn_mask=call, **kwargs)  # type: ignore[misc]


class TimmBlock:
    """Put before a block's class: hands the input to the call that came as `attn_mask`."""

    _tokenmerge: int  # layer, from 1

    def forward(self, x: Tensor, rope: Any = None, attn_mask: object = None, is_causal: bool = False) -> Tensor:
        if not isinstance(attn_mask, Call):
            raise called_alone(self._tokenmerge)
        block: Any = self
        return attn_mask.step(block, self._tokenmerge, x, rope, super().forward)  # type: ignore[misc]


def _open(model: Any, x: Tensor, mask: object, causal: bool, **options: Any) -> Call:
    if isinstance(mask, Call):
        return mask
    refuse_mask(mask, causal)
    return model._tokenmerge.open(model, x, **options)


def refuse_mask(mask: object, causal: bool) -> None:
    if mask is not None or causal:
        raise ValueError(
            f"a merged model takes no {'attn_mask' if mask is not None else 'is_causal'}: a mask would have to merge with "
            "the tokens. Call it without, or tokenmerge.remove(model) first"
        )


@register
class TimmViT(Backbone):
    """Blocks x + attn(norm1 x), x + mlp(norm2 x), with LayerScale, query-key norm, gate and inner norms where present."""

    name = "timm VisionTransformer"
    name_form = "a timm name"
    drop_path_names = ("drop_path1", "drop_path2")
    layer_scale = "ls1"  # blocks without it are post-norm
    model_mixin: ClassVar[type] = TimmModel
    block_mixin: ClassVar[type] = TimmBlock

    def matches(self, model: nn.Module) -> bool:
        from timm.models.vision_transformer import VisionTransformer

        return isinstance(model, VisionTransformer)

    def check(self, model: nn.Module) -> None:
        from timm.layers import Attention
        from timm.models.vision_transformer import Block, ResPostBlock

        check_timm(self, model, (Block, ResPostBlock), (Attention,))

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def attention(self, block: Any) -> nn.Module:
        return block.attn

    def prefix(self, model: Any) -> int:
        return int(model.num_prefix_tokens)

    def has_cls_token(self, model: Any) -> bool:
        return model.cls_token is not None

    def head_reads_prefix_only(self, model: Any) -> bool:
        from timm.models.deit import VisionTransformerDistilled
        from timm.models.vision_transformer import VisionTransformer

        return pools_prefix_only(model, (VisionTransformerDistilled, VisionTransformer))

    def head_reads_cls_only(self, model: Any) -> bool:
        return super().head_reads_cls_only(model) and not hasattr(model, "head_dist")

    def classifier(self, model: Any) -> nn.Module | None:
        found: Any = model.get_classifier()
        return found[0] if isinstance(found, tuple) else found

    def sequence(self, model: Any, images: Tensor, layer: int | None) -> Tensor:
        if layer is not None:
            raise ValueError("of a timm model, reduced tokens are those after the last layer; leave layer out")
        out: Tensor = model.forward_features(images)
        return out

    def final_norm(self, model: Any) -> nn.Module:
        norm: nn.Module = model.fc_norm if isinstance(model.norm, nn.Identity) else model.norm
        return norm

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        attn = block.attn
        x = self._attention_input(block, x)
        if parts == "qkv":
            b, n, _ = x.shape
            qkv = attn.qkv(x)
            head_dim = qkv.shape[2] // (3 * attn.num_heads)
            q, k, v = qkv.reshape(b, n, 3, attn.num_heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            return attn.q_norm(q), attn.k_norm(k), v
        made = fused_projection(attn.qkv, x, parts)
        return split_and_norm(attn, {part: made[part] for part in parts}, attn.num_heads)

    def attention_config(self, block: Any) -> AttentionConfig:
        attn = block.attn
        return AttentionConfig(None, attn.attn_drop.p if attn.training else 0.0)

    def _attention_input(self, block: Any, x: Tensor) -> Tensor:
        """What the projections and the gate read."""
        out: Tensor = x if self._post_norm(block) else block.norm1(x)
        return out

    def _post_norm(self, block: Any) -> bool:
        """Whether norms come after attention and MLP: x + norm1(attn(x)), x + norm2(mlp(x))."""
        return not hasattr(block, self.layer_scale)

    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        out = project_out(block.attn, partial(self._attention_input, block, x), out)
        return x + block.drop_path1(block.norm1(out) if self._post_norm(block) else block.ls1(out))

    def add_mlp(self, block: Any, x: Tensor) -> Tensor:
        if self._post_norm(block):
            return x + block.drop_path2(block.norm2(block.mlp(x)))
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))

    def cost(self, block: Any) -> BlockCost:
        width = block.attn.attn_dim
        return timm_block_cost(block, width, width, self._post_norm(block))

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        model.blocks = nn.Sequential(Passthrough(exit_tokens))

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        import timm

        if not timm.is_model(name):
            near = timm.list_models(f"*{name.partition('.')[0]}*")[:5]
            raise UnknownModel(f"unknown model {name!r}" + (f"; similar names: {', '.join(near)}" if near else ""))
        return timm.create_model(name, pretrained=pretrained, **options)

    def preprocessing(self, model: nn.Module, crop: float | None, size: int | None) -> Preprocessing:
        return timm_preprocessing(model, crop, size)

    def resize(self, model: Any, size: int) -> None:
        model.set_input_size(img_size=size)

    def class_names(self, model: Any) -> Sequence[str] | None:
        return (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or super().class_names(model)

    def checkpoints_blocks(self, model: Any) -> bool:
        return bool(getattr(model, "grad_checkpointing", False))

    def enable_checkpointing(self, model: Any) -> None:
        model.set_grad_checkpointing()


def check_timm(
    backbone: Backbone, model: nn.Module, block_classes: Sequence[type], attention_classes: Sequence[type]
) -> None:
    """Refuse what is not understood: other blocks, other attentions, overridden loops, hooks that would not fire."""
    require_version("timm", "1.0.26")
    check_blocks(backbone, model, block_classes, attention_classes)
    for method in ("forward", "forward_features"):
        if "attn_mask" not in inspect.signature(getattr(type(model), method)).parameters:
            raise Unsupported(
                f"{type(model).__name__}.{method} takes no attn_mask, so the state of a call cannot reach the blocks; "
                "supported are timm's own methods, or overrides that hand attn_mask on: add the argument to it"
            )


def pools_prefix_only(model: Any, classes: Sequence[type]) -> bool:
    """Whether the head reads nothing but prefix tokens; classes that override a method on the way are not trusted to."""
    own = getattr(type(model), "_tokenmerge_base", type(model))
    path = ("forward", "forward_features", "forward_head", "pool")
    known = all(any(getattr(own, name) is getattr(cls, name) for cls in classes) for name in path)
    untouched = not any(name in model.__dict__ for name in path)
    return known and untouched and model.global_pool == "token" and model.attn_pool is None and model.num_prefix_tokens > 0


def split_and_norm(attn: Any, made: dict[str, Tensor], kv_heads: int) -> tuple[Tensor, ...]:
    """Projections [B,N,H·d] of timm's attentions → [B,H,N,d], with their query-key norms."""
    norms = {"q": attn.q_norm, "k": attn.k_norm}
    parts = []
    for part, x in made.items():
        b, n, width = x.shape
        heads = attn.num_heads if part == "q" else kv_heads
        split = x.reshape(b, n, heads, width // heads).transpose(1, 2)
        parts.append(norms[part](split) if part in norms else split)
    return tuple(parts)


def project_out(attn: Any, gate_input: Callable[[], Tensor], out: Tensor) -> Tensor:
    """Inner norm, gate and output projection of timm's attentions: [B,H,Q,d] → [B,Q,C]. Releases of timm before 1.0.28
    have no gate."""
    out = attn.norm(out.transpose(1, 2).flatten(2))
    gate = getattr(attn, "gate", None)
    if gate is not None:
        out = out * gate(gate_input()).sigmoid()
    return attn.proj_drop(attn.proj(out))


def timm_block_cost(block: Any, width: int, kv_width: int, post_norm: bool) -> BlockCost:
    """The cost of a timm block whose attention is `width` wide, its keys and values `kv_width`."""
    attn = block.attn
    gate = getattr(attn, "gate", None)
    if attn.qkv is not None:
        macs_q = macs_k = macs_v = linear_macs(attn.qkv) // 3
    else:
        macs_q, macs_k, macs_v = (linear_macs(part) for part in (attn.q_proj, attn.k_proj, attn.v_proj))
    return BlockCost(
        macs_q=macs_q,
        macs_k=macs_k,
        macs_v=macs_v,
        macs_out=linear_macs(attn.proj, gate),
        macs_mlp=linear_macs(block.mlp),
        width=attn.proj.out_features,
        attn_width=width,
        head_dim=width // attn.num_heads,
        norm_in=0 if post_norm else norm_width(block.norm1),
        norm_q=width if norm_width(attn.q_norm) else 0,
        norm_k=kv_width if norm_width(attn.k_norm) else 0,
        norm_attn=norm_width(attn.norm) + (norm_width(block.norm1) if post_norm or gate is not None else 0),
        norm_out=norm_width(block.norm2) + norm_width(getattr(block.mlp, "norm", None)),
    )
