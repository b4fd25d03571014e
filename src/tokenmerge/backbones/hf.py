"""Hugging Face's vision transformers: ViT, DeiT, DINOv2 with and without registers, the vision towers of CLIP and SigLIP.

Their models hand keyword arguments that they do not know from `forward` down to every layer. The state of a call travels as
one of them: nothing is kept on the model, no loop of theirs is copied, hooks fire as ever.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from .base import (
    BlockShape,
    Call,
    Pass,
    Unsupported,
    called_alone,
    check_blocks,
    heads,
    linear_macs,
    norm_width,
    refuse_hooks,
    require,
)
from .hf_families import FAMILIES, Family, Parts

KERNELS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
ANSWERS = ("logits", "image_embeds", "pooler_output")


class HFModel:
    """Put before the host's class: opens a call in `forward`, which keeps its signature (trainers read it)."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        host: Any = super().forward  # type: ignore[misc]

        @functools.wraps(host)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return host(self, *args, **kwargs, tokenmerge=_open(self, args, kwargs))

        cls.forward = forward  # type: ignore[attr-defined]


class HFBlock:
    """Put before a layer's class: hands the input to the call that came as a keyword."""

    _tokenmerge: int  # layer, from 1

    def forward(
        self, hidden_states: Tensor, attention_mask: object = None, *, tokenmerge: object = None, **_: Any
    ) -> Tensor:
        # A mask that arrives here is the host's own and masks nothing: `_open` refuses others.
        if not isinstance(tokenmerge, Call):
            raise called_alone(self._tokenmerge)
        block: Any = self
        refuse_hooks(_attention(block), self._tokenmerge, but=_captures)
        return tokenmerge.step(block, self._tokenmerge, hidden_states, None)


def _open(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    def asked(name: str) -> Any:
        return kwargs.get(name) if kwargs.get(name) is not None else getattr(model.config, name, False)

    if asked("output_attentions"):
        raise ValueError(
            "a merged model gives no attentions: its maps are those of merged tokens, smaller in every layer, and are not "
            "even made. Call it without output_attentions, or tokenmerge.remove(model) first"
        )
    if kwargs.get("attention_mask") is not None or kwargs.get("is_causal"):
        raise ValueError(
            "a merged model takes no attention_mask and no is_causal: a mask would have to merge with the tokens. "
            "Call it without, or tokenmerge.remove(model) first"
        )
    x = args[0] if args else kwargs.get("pixel_values")
    if not isinstance(x, Tensor):
        raise ValueError(f"{type(model).__name__} takes pixel_values [B,C,H,W], not {type(x).__name__}")
    each = bool(asked("output_hidden_states")) or _class(model).__name__.endswith("Backbone")
    larger = {"interpolate_pos_encoding": True} if kwargs.get("interpolate_pos_encoding") else {}
    return model._tokenmerge.open(model, x, restore_each=each, **larger)


def _captures(hook: Any) -> bool:
    """transformers' own hooks, through which it collects hidden states and attentions, sleep while none are asked for."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _class(module: object) -> type:
    own: Any = type(module)
    return _nearest(getattr(own, "_tokenmerge_host", own))


@functools.cache
def _nearest(own: type) -> type:
    """The nearest class of transformers' own."""
    return next((cls for cls in own.__mro__ if cls.__module__.startswith("transformers.models.")), own)


@functools.cache
def _folder(cls: type) -> str:
    """transformers.models.<folder>.modeling_<folder>; empty for what is not from there."""
    _, _, place = cls.__module__.partition("transformers.models.")
    return place.partition(".")[0]


def _family(module: object) -> Family:
    return FAMILIES[_folder(_class(module))]


def _parts(block: object) -> Parts:
    return _family(block).parts


def _attention(block: Any) -> Any:
    return getattr(block, _parts(block).attention)


def _tower(model: Any) -> Any:
    inside = _family(model).headed.get(_class(model).__name__)
    return model if inside is None else getattr(model, inside)


def _follow(block: Any, half: int, x: Tensor) -> Tensor:
    for name in _parts(block).after[half]:
        x = getattr(block, name)(x)
    return x


class HuggingFace:
    """Layers x + attention(norm x), x + mlp(norm x), with layer scale and dropout where present."""

    name = "Hugging Face ViT, DeiT, DINOv2, CLIP and SigLIP vision"
    model_mixin: type = HFModel
    block_mixin: type = HFBlock

    def matches(self, model: nn.Module) -> bool:
        family, name = FAMILIES.get(_folder(_class(model))), _class(model).__name__
        return family is not None and (name in family.towers or name in family.headed)

    def check(self, model: Any) -> None:
        require("transformers", (5, 19))
        family = _family(model)
        own = import_module(_class(model).__module__)
        blocks, host = self.blocks(model), type(model).__name__
        check_blocks(host, blocks, (getattr(own, family.layer),), _attention, (getattr(own, family.attention),))
        for layer, block in enumerate(blocks, 1):
            refuse_hooks(_attention(block), layer, but=_captures)
        parameters = inspect.signature(type(model).forward).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise Unsupported(f"{host}.forward takes no other keywords, so that the state of a call cannot reach the layers")
        kernel = getattr(_tower(model).config, "_attn_implementation", "sdpa")
        if kernel not in KERNELS:
            raise Unsupported(
                f"{host} computes attention by {kernel!r}; merged models use torch's scaled_dot_product_attention in its "
                f"place, which equals {', '.join(KERNELS)}: set_attn_implementation('sdpa') first, if that is right"
            )

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return _tower(model).get_submodule(_family(model).layers)

    def prefix(self, model: Any) -> int:
        return _family(model).prefix + int(getattr(_tower(model).config, "num_register_tokens", 0))

    def class_token(self, model: Any) -> bool:
        return self.prefix(model) > 0

    def head_reads_prefix_only(self, model: Any) -> bool:
        own = _class(model)
        plain = own is getattr(type(model), "_tokenmerge_host", type(model)) and "forward" not in model.__dict__
        return plain and own.__name__ in _family(model).free

    def classifier(self, model: Any) -> nn.Module | None:
        return getattr(model, "classifier", None) or getattr(model, "cls_classifier", None)

    def answer(self, out: Any) -> Tensor:
        for name in ANSWERS:
            found = getattr(out, name, None)
            if isinstance(found, Tensor):
                return found
        if isinstance(getattr(out, "feature_maps", None), tuple):  # of a backbone: the mean of the last map
            return out.feature_maps[-1].mean((2, 3))
        if isinstance(getattr(out, "last_hidden_state", None), Tensor):
            return out.last_hidden_state.mean(1)
        raise ValueError(f"found none of {', '.join(ANSWERS)} in {type(out).__name__}; leave return_dict out")

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        names = _parts(block)
        attn = getattr(block, names.attention)
        x = getattr(block, names.norms[0])(x)
        count = getattr(attn, names.heads)
        return tuple(heads(getattr(attn, f"{part}_proj")(x), count) for part in parts)

    def rotate(self, block: Any, x: Tensor, place: Any) -> Tensor:
        raise Unsupported(f"{type(block).__name__} has no rotary positions")

    def attention_options(self, block: Any) -> dict[str, Any]:
        names, attn = _parts(block), _attention(block)
        return {"scale": getattr(attn, names.scale), "dropout_p": getattr(attn, names.dropout) if attn.training else 0.0}

    def mix(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        project = getattr(_attention(block), _parts(block).output)
        return x + _follow(block, 0, project(out.transpose(1, 2).flatten(2)))

    def feed(self, block: Any, x: Tensor) -> Tensor:
        return x + _follow(block, 1, block.mlp(getattr(block, _parts(block).norms[1])(x)))

    def shape(self, block: Any) -> BlockShape:
        names, attn = _parts(block), _attention(block)
        output = getattr(attn, names.output)
        norm1, norm2 = (getattr(block, name) for name in names.norms)
        return BlockShape(
            query=linear_macs(attn.q_proj),
            key=linear_macs(attn.k_proj),
            value=linear_macs(attn.v_proj),
            output=linear_macs(output),
            mlp=linear_macs(block.mlp),
            width=output.out_features,
            attention=output.in_features,
            head=attn.head_dim,
            norm_in=norm_width(norm1),
            norm_query=0,
            norm_key=0,
            norm_inner=0,
            norm_out=norm_width(norm2),
        )

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        parent, _, name = _family(model).layers.rpartition(".")
        setattr(_tower(model).get_submodule(parent), name, nn.ModuleList([Pass(exit_tokens)]))
