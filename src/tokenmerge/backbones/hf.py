"""Hugging Face's vision transformers, one row of hf_families.py each: from ViT to the towers of CLIP and of video models.

Their models hand unknown keyword arguments from `forward` down to every layer. The state of a call travels as one of them:
nothing is kept on the model, no loop of theirs is copied, hooks fire as usual. Where a model hands none on, the state
travels with the hidden states (relay.py).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.attention import AttentionConfig, fused_projection
from .base import Backbone, BlockCost, Call, Preprocessing, Unsupported, register
from .helpers import (
    Passthrough,
    called_alone,
    check_blocks,
    linear_macs,
    norm_width,
    require_version,
    rotate_half,
    split_heads,
)
from .hf_families import FAMILIES, Family, Parts
from .hf_library import (
    as_patches,
    create_hf,
    hf_preprocessing,
    image_features,
    square_preprocessing,
    transformers_class,
    transformers_folder,
)
from .relay import RELAYS, Carried

KERNELS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")


class Flag(NamedTuple):
    """A flag of the model's own that carries the call."""

    value: bool
    call: Call

    def __bool__(self) -> bool:
        return self.value


class HFModel:
    """Put before the model's class: opens a call in `forward`, which keeps its signature (trainers read it)."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        base: Any = super().forward  # type: ignore[misc]

        @functools.wraps(base)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            call = _open(self, args, kwargs)
            family = _family(self)
            if family.relays:
                if args:
                    args = (Carried(args[0], call), *args[1:])
                else:
                    name = _input_name(self)
                    kwargs[name] = Carried(kwargs[name], call)
            elif family.carrier == "tokenmerge":
                kwargs["tokenmerge"] = call
            else:
                kwargs[family.carrier] = Flag(bool(kwargs.get(family.carrier)), call)
            return base(self, *args, **kwargs)

        cls.forward = forward  # type: ignore[attr-defined]


class HFBlock:
    """Put before a layer's class: hands the input to the call that came as a keyword."""

    _tokenmerge: int  # layer, from 1

    def forward(self, hidden_states: Tensor, *_: Any, **given: Any) -> Any:
        # A mask that arrives here is the model's own, and masks nothing: `_open` refuses others.
        block: Any = self
        call = given.get(_family(block).carrier)
        if isinstance(call, Flag):
            given |= {_family(block).carrier: call.value}
            call = call.call
        if not isinstance(call, Call):
            raise called_alone(self._tokenmerge)
        embeddings = given.get("position_embeddings")
        rope = None if embeddings is None else torch.cat(embeddings, -1)
        out = call.step(block, self._tokenmerge, hidden_states, rope, position_bias=_position_bias(block, given))
        return (out,) if _parts(block).returns_tuple else out


def _position_bias(block: Any, given: Mapping[str, Any]) -> Tensor | None:
    """What a layer adds to its attention: its own relative position bias and one that all layers share."""
    names = _parts(block)
    if names.position_bias is None:
        return None
    shared: Tensor | None = given.get("attention_mask")
    if shared is None:
        shared = given.get("relative_position_bias")
    path, _, name = names.position_bias.rpartition(".")
    own = getattr(block.get_submodule(path), name, None)
    if own is None:
        return shared
    patch = _part(block, names.attention).config.patch_size
    height, width = (size // patch for size in given["resolution"])
    bias: Tensor = own((height, width), given.get("interpolate_pos_encoding", False), dim_size=height * width + 1)
    return bias if shared is None else bias + shared


def _input_name(model: Any) -> str:
    return getattr(model, "main_input_name", "pixel_values")


def _open(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    def asked(name: str) -> Any:
        return kwargs.get(name) if kwargs.get(name) is not None else getattr(model.config, name, False)

    name = type(model).__name__
    if asked("output_attentions"):
        raise ValueError(
            "a merged model returns no attentions: its maps are those of merged tokens, smaller in every layer, and are "
            "never computed. Call it without output_attentions, or tokenmerge.remove(model) first"
        )
    if kwargs.get("attention_mask") is not None or kwargs.get("is_causal"):
        raise ValueError(
            "a merged model takes no attention_mask and no is_causal: a mask would have to merge with the tokens. "
            "Call it without, or tokenmerge.remove(model) first"
        )
    if asked("output_hidden_states") and transformers_folder(transformers_class(type(model))) == "yolos":
        raise ValueError(
            f"a merged {name} returns no hidden_states: its detection tokens are moved to the front. Call it without "
            "output_hidden_states, or tokenmerge.remove(model) first"
        )
    mask = _family(model).patches
    valid = None if mask is None else args[1] if len(args) > 1 else kwargs.get(mask)
    x = args[0] if args else kwargs.get(_input_name(model))
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} takes {_input_name(model)}, a tensor, not {type(x).__name__}")
    grid = transformers_class(type(model)).__name__.endswith("Backbone")
    each = bool(asked("output_hidden_states")) or grid
    larger = {"interpolate_pos_encoding": True} if kwargs.get("interpolate_pos_encoding") else {}
    return model._tokenmerge.open(model, x, restore_each=each, grid=grid, valid=valid, **larger)


def _family(module: object) -> Family:
    kind: Any = type(module)
    return _family_of(kind)


@functools.cache
def _family_of(cls: Any) -> Family:
    return FAMILIES[transformers_folder(transformers_class(cls))]


def _parts(block: Any) -> Parts:
    return _family(block).parts


def _tower(model: Any) -> Any:
    inside = _family(model).headed.get(transformers_class(type(model)).__name__)
    return model if inside is None else getattr(model, inside)


def _part(block: Any, path: str) -> Any:
    return attrgetter(path)(block)


def _before_residual(block: Any, half: int, x: Tensor) -> Tensor:
    for name in _parts(block).after[half]:
        part = _part(block, name)
        if isinstance(part, nn.Module):
            x = part(x)
        elif part is not None:
            x = part * x
    return x


@register
class HuggingFace(Backbone):
    """Layers x + attention(norm x), x + mlp(norm x), with LayerScale, dropout, RoPE and position biases where present."""

    name = "Hugging Face vision transformers"
    name_prefix = "hf:"
    name_form = "hf:FOLDER"
    model_mixin = HFModel
    block_mixin = HFBlock

    def matches(self, model: nn.Module) -> bool:
        family = FAMILIES.get(transformers_folder(transformers_class(type(model))))
        name = transformers_class(type(model)).__name__
        return family is not None and (name in family.towers or name in family.headed)

    def check(self, model: Any) -> None:
        require_version("transformers", "5.19")
        family = _family(model)
        own = import_module(transformers_class(type(model)).__module__)
        attentions = (family.attention,) if isinstance(family.attention, str) else family.attention
        check_blocks(self, model, (getattr(own, family.layer),), tuple(getattr(own, name) for name in attentions))
        name = type(model).__name__
        for entry, (supported, reason) in family.required.items():
            if (found := getattr(_tower(model).config, entry, supported)) != supported:
                raise Unsupported(f"{name} has {entry}={found}; supported is {entry}={supported}: {reason}")
        parameters = inspect.signature(type(model).forward).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise Unsupported(f"{name}.forward takes no other keywords, so the state of a call cannot reach the layers")
        kernel = getattr(_tower(model).config, "_attn_implementation", "sdpa")
        if kernel not in KERNELS:
            raise Unsupported(
                f"{name} computes attention by {kernel!r}; merged models use torch's scaled_dot_product_attention in its "
                f"place, which equals {', '.join(KERNELS)}: set_attn_implementation('sdpa') first, if that is right"
            )

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return _tower(model).get_submodule(_family(model).layers)

    def relays(self, model: Any) -> Mapping[nn.Module, type]:
        tower = _tower(model)
        return {tower.get_submodule(path): RELAYS[name] for path, name in _family(model).relays.items()}

    def attention(self, block: Any) -> nn.Module:
        return _part(block, _parts(block).attention)

    def ignores_hook(self, hook: Callable[..., Any]) -> bool:
        """transformers collects hidden states and attentions through hooks of its own, idle while none are asked for."""
        return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"

    def prefix(self, model: Any) -> int:
        config = _tower(model).config
        more = ("num_register_tokens", "num_detection_tokens")
        return _family(model).prefix + sum(int(getattr(config, name, 0)) for name in more)

    def time_steps(self, model: Any) -> int:
        config = _tower(model).config
        return int(config.num_frames) // int(config.tubelet_size) if hasattr(config, "tubelet_size") else 1

    def has_cls_token(self, model: Any) -> bool:
        return self.prefix(model) > 0

    def head_reads_prefix_only(self, model: Any) -> bool:
        own = transformers_class(type(model))
        plain = own is getattr(type(model), "_tokenmerge_base", type(model)) and "forward" not in model.__dict__
        return plain and own.__name__ in _family(model).prefix_heads

    def head_reads_cls_only(self, model: Any) -> bool:
        return super().head_reads_cls_only(model) and not hasattr(model, "distillation_classifier")

    def classifier(self, model: Any) -> nn.Module | None:
        return getattr(model, "classifier", None) or getattr(model, "cls_classifier", None)

    def output(self, out: Any) -> Tensor:
        return image_features(out)

    def takes_images(self, model: Any) -> bool:
        return _family(model).patches is None

    def run(self, model: Any, images: Tensor) -> Tensor:
        if self.takes_images(model):
            return super().run(model, images)
        return self.output(model(**as_patches(images, _tower(model).config.patch_size)))

    def sequence(self, model: Any, images: Tensor, layer: int | None) -> Tensor:
        if layer is None:
            whole: Tensor = model(images).last_hidden_state
            return whole
        states: Tensor = model(images, output_hidden_states=True).hidden_states[layer]
        return states

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        names = _parts(block)
        attn = _part(block, names.attention)
        x = getattr(block, names.norms[0])(x)
        heads = getattr(attn, names.heads)
        if len(names.projections) == 1:
            made = fused_projection(getattr(attn, names.projections[0]), x, parts)
            return tuple(split_heads(made[part], heads) for part in parts)
        return tuple(split_heads(getattr(attn, names.projections["qkv".index(part)])(x), heads) for part in parts)

    def apply_rope(self, block: Any, x: Tensor, rope: Any) -> Tensor:
        cos, sin = rope.chunk(2, -1)
        return rotate_half(x, cos, sin)

    def attention_config(self, block: Any) -> AttentionConfig:
        names = _parts(block)
        attn = _part(block, names.attention)
        dropout = getattr(attn, names.dropout)
        scale = None if names.scale is None else getattr(attn, names.scale)
        return AttentionConfig(scale, getattr(dropout, "p", dropout) if attn.training else 0.0)

    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        output = _part(block, _parts(block).output)
        return x + _before_residual(block, 0, output(out.transpose(1, 2).flatten(2)))

    def add_mlp(self, block: Any, x: Tensor) -> Tensor:
        names = _parts(block)
        out = getattr(block, names.norms[1])(x)
        for part in names.mlp:
            out = _part(block, part)(out)
        return x + _before_residual(block, 1, out)

    def cost(self, block: Any) -> BlockCost:
        names = _parts(block)
        attn: Any = self.attention(block)
        output = _part(block, names.output)
        projections = [linear_macs(getattr(attn, name)) for name in names.projections]
        macs = projections if len(projections) == 3 else [projections[0] // 3] * 3
        return BlockCost(
            macs_q=macs[0],
            macs_k=macs[1],
            macs_v=macs[2],
            macs_out=linear_macs(output),
            macs_mlp=linear_macs(*(_part(block, part) for part in names.mlp)),
            width=output.out_features,
            attn_width=output.in_features,
            head_dim=getattr(attn, names.head_dim),
            norm_in=norm_width(getattr(block, names.norms[0])),
            norm_out=norm_width(getattr(block, names.norms[1])),
        )

    def counting_inputs(self, model: Any, image: tuple[int, ...]) -> dict[str, Any]:
        if self.takes_images(model) or len(image) > 2:
            return {}
        return {"pixel_attention_mask": None, "spatial_shapes": torch.tensor([[image[0], 1]])}

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        parent, _, name = _family(model).layers.rpartition(".")
        stand_in = Passthrough(exit_tokens, _family(model).parts.returns_tuple)
        setattr(_tower(model).get_submodule(parent), name, nn.ModuleList([stand_in]))

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        return create_hf(self.name_prefix, name, pretrained, **options)

    def preprocessing(self, model: Any, crop: float | None, size: int | None) -> Preprocessing:
        found = hf_preprocessing(model, crop, size)
        return found if self.takes_images(model) else square_preprocessing(found, self.input_size(model))

    def input_size(self, model: Any) -> tuple[int, ...]:
        """(C,H,W) of an image; (frames,C,H,W) of a video, (frames, mel bins) of a spectrogram."""
        config = _tower(model).config
        if hasattr(config, "num_mel_bins"):
            return config.max_length, config.num_mel_bins
        size = config.image_size if self.takes_images(model) else math.isqrt(config.num_patches) * config.patch_size
        frames = (config.num_frames,) if hasattr(config, "num_frames") else ()
        return (*frames, getattr(config, "num_channels", 3), *(size if isinstance(size, Sequence) else (size, size)))

    def num_classes(self, model: Any) -> int:
        return int(model.config.num_labels) if self.classifier(model) is not None else 0

    def class_names(self, model: Any) -> Sequence[str] | None:
        names = None if self.classifier(model) is None else getattr(model.config, "id2label", None)
        return None if not names else [names[i] for i in sorted(names)]

    def enable_checkpointing(self, model: Any) -> None:
        model.gradient_checkpointing_enable()
