"""Hugging Face's vision transformers: ViT, DeiT, DINOv2 with and without registers, the vision towers of CLIP and SigLIP.

Their models hand unknown keyword arguments from `forward` down to every layer. The state of a call travels as one of them:
nothing is kept on the model, no loop of theirs is copied, hooks fire as usual.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from ..core.attention import AttentionConfig
from ..utils.optional import require_package
from .base import Backbone, BlockCost, Call, CannotLoad, Preprocessing, Unsupported, register
from .helpers import Passthrough, called_alone, check_blocks, linear_macs, norm_width, require_version, split_heads
from .hf_families import FAMILIES, Family, Parts

KERNELS = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
OUTPUTS = ("logits", "image_embeds", "pooler_output")


class HFModel:
    """Put before the model's class: opens a call in `forward`, which keeps its signature (trainers read it)."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        base: Any = super().forward  # type: ignore[misc]

        @functools.wraps(base)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return base(self, *args, **kwargs, tokenmerge=_open(self, args, kwargs))

        cls.forward = forward  # type: ignore[attr-defined]


class HFBlock:
    """Put before a layer's class: hands the input to the call that came as a keyword."""

    _tokenmerge: int  # layer, from 1

    def forward(
        self, hidden_states: Tensor, attention_mask: object = None, *, tokenmerge: object = None, **_: Any
    ) -> Tensor:
        # A mask that arrives here is the model's own and masks nothing: `_open` refuses others.
        if not isinstance(tokenmerge, Call):
            raise called_alone(self._tokenmerge)
        block: Any = self
        return tokenmerge.step(block, self._tokenmerge, hidden_states, None)


def _open(model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    def asked(name: str) -> Any:
        return kwargs.get(name) if kwargs.get(name) is not None else getattr(model.config, name, False)

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
    x = args[0] if args else kwargs.get("pixel_values")
    if not isinstance(x, Tensor):
        raise ValueError(f"{type(model).__name__} takes pixel_values [B,C,H,W], not {type(x).__name__}")
    each = bool(asked("output_hidden_states")) or _class(model).__name__.endswith("Backbone")
    larger = {"interpolate_pos_encoding": True} if kwargs.get("interpolate_pos_encoding") else {}
    return model._tokenmerge.open(model, x, restore_each=each, **larger)


def _class(module: object) -> type:
    own: Any = type(module)
    return _nearest(getattr(own, "_tokenmerge_base", own))


@functools.cache
def _nearest(own: type) -> type:
    """The nearest class of transformers' own."""
    return next((cls for cls in own.__mro__ if cls.__module__.startswith("transformers.models.")), own)


@functools.cache
def _folder(cls: type) -> str:
    """transformers.models.<folder>.modeling_<folder>; empty for classes from elsewhere."""
    _, _, path = cls.__module__.partition("transformers.models.")
    return path.partition(".")[0]


def _family(module: object) -> Family:
    return FAMILIES[_folder(_class(module))]


@functools.cache
def _parts_of(cls: type) -> Parts:
    return FAMILIES[_folder(_nearest(getattr(cls, "_tokenmerge_base", cls)))].parts


def _parts(block: Any) -> Parts:
    cls: Any = type(block)
    return _parts_of(cls)


def _tower(model: Any) -> Any:
    inside = _family(model).headed.get(_class(model).__name__)
    return model if inside is None else getattr(model, inside)


def _before_residual(block: Any, half: int, x: Tensor) -> Tensor:
    for name in _parts(block).after[half]:
        x = getattr(block, name)(x)
    return x


# Of models with two towers, the vision tower.
_VISION_TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


@register
class HuggingFace(Backbone):
    """Layers x + attention(norm x), x + mlp(norm x), with LayerScale and dropout where present."""

    name = "Hugging Face ViT, DeiT, DINOv2, CLIP and SigLIP vision"
    name_prefix = "hf:"
    name_form = "hf:FOLDER"
    model_mixin = HFModel
    block_mixin = HFBlock

    def matches(self, model: nn.Module) -> bool:
        family = FAMILIES.get(_folder(_class(model)))
        name = _class(model).__name__
        return family is not None and (name in family.towers or name in family.headed)

    def check(self, model: Any) -> None:
        require_version("transformers", "5.19")
        family = _family(model)
        own = import_module(_class(model).__module__)
        check_blocks(self, model, (getattr(own, family.layer),), (getattr(own, family.attention),))
        name = type(model).__name__
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

    def attention(self, block: Any) -> nn.Module:
        return getattr(block, _parts(block).attention)

    def ignores_hook(self, hook: Callable[..., Any]) -> bool:
        """transformers collects hidden states and attentions through hooks of its own, idle while none are asked for."""
        return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"

    def prefix(self, model: Any) -> int:
        return _family(model).prefix + int(getattr(_tower(model).config, "num_register_tokens", 0))

    def has_cls_token(self, model: Any) -> bool:
        return self.prefix(model) > 0

    def head_reads_prefix_only(self, model: Any) -> bool:
        own = _class(model)
        plain = own is getattr(type(model), "_tokenmerge_base", type(model)) and "forward" not in model.__dict__
        return plain and own.__name__ in _family(model).prefix_heads

    def head_reads_cls_only(self, model: Any) -> bool:
        return super().head_reads_cls_only(model) and not hasattr(model, "distillation_classifier")

    def classifier(self, model: Any) -> nn.Module | None:
        return getattr(model, "classifier", None) or getattr(model, "cls_classifier", None)

    def output(self, out: Any) -> Tensor:
        for name in OUTPUTS:
            found = getattr(out, name, None)
            if isinstance(found, Tensor):
                return found
        if isinstance(getattr(out, "feature_maps", None), tuple):  # of a Backbone class: the mean of the last map
            return out.feature_maps[-1].mean((2, 3))
        if isinstance(getattr(out, "last_hidden_state", None), Tensor):
            return out.last_hidden_state.mean(1)
        raise ValueError(f"found none of {', '.join(OUTPUTS)} in {type(out).__name__}; leave return_dict out")

    def project(self, block: Any, x: Tensor, parts: str = "qkv") -> tuple[Tensor, ...]:
        names = _parts(block)
        attn = getattr(block, names.attention)
        x = getattr(block, names.norms[0])(x)
        heads = getattr(attn, names.heads)
        return tuple(split_heads(getattr(attn, f"{part}_proj")(x), heads) for part in parts)

    def attention_config(self, block: Any) -> AttentionConfig:
        names = _parts(block)
        attn = getattr(block, names.attention)
        return AttentionConfig(getattr(attn, names.scale), getattr(attn, names.dropout) if attn.training else 0.0)

    def add_attention(self, block: Any, x: Tensor, out: Tensor) -> Tensor:
        names = _parts(block)
        output = getattr(getattr(block, names.attention), names.output)
        return x + _before_residual(block, 0, output(out.transpose(1, 2).flatten(2)))

    def add_mlp(self, block: Any, x: Tensor) -> Tensor:
        return x + _before_residual(block, 1, block.mlp(getattr(block, _parts(block).norms[1])(x)))

    def cost(self, block: Any) -> BlockCost:
        names = _parts(block)
        attn: Any = self.attention(block)
        output = getattr(attn, names.output)
        return BlockCost(
            macs_q=linear_macs(attn.q_proj),
            macs_k=linear_macs(attn.k_proj),
            macs_v=linear_macs(attn.v_proj),
            macs_out=linear_macs(output),
            macs_mlp=linear_macs(block.mlp),
            width=output.out_features,
            attn_width=output.in_features,
            head_dim=attn.head_dim,
            norm_in=norm_width(getattr(block, names.norms[0])),
            norm_out=norm_width(getattr(block, names.norms[1])),
        )

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        parent, _, name = _family(model).layers.rpartition(".")
        setattr(_tower(model).get_submodule(parent), name, nn.ModuleList([Passthrough(exit_tokens)]))

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        if not pretrained or options:
            raise CannotLoad(
                f"{self.name_prefix}{name}: the folder has its own weights and classes; leave out --weights and "
                "--num-classes"
            )
        require_package("transformers", "models of Hugging Face")
        import transformers

        try:
            config = transformers.AutoConfig.from_pretrained(name)
            kind = (config.architectures or ["AutoModel"])[0]
            cls: Any = getattr(transformers, _VISION_TOWERS.get(kind, kind), transformers.AutoModel)
            return cls.from_pretrained(name)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise CannotLoad(f"{name}: not a folder or name that transformers can load ({reason})") from error

    def preprocessing(self, model: Any, crop: float | None, size: int | None) -> Preprocessing:
        if crop is not None or size is not None:
            raise ValueError(
                "a model of Hugging Face's has its image processor; leave out crop and size, or give a transform"
            )
        from transformers import AutoImageProcessor

        load: Any = AutoImageProcessor.from_pretrained
        try:
            processor = load(model.config.name_or_path)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"no image processor was found next to the weights of this {type(model).__name__} "
                f"({str(error).splitlines()[0]}); give load_images a transform, or a tensor or loader instead of the folder"
            ) from None
        return Preprocessing(
            lambda image: processor(image, return_tensors="pt")["pixel_values"][0],
            tuple(processor.image_mean),
            tuple(processor.image_std),
            description=str(processor),
        )

    def input_size(self, model: Any) -> tuple[int, ...]:
        config = _tower(model).config
        return getattr(config, "num_channels", 3), config.image_size, config.image_size

    def num_classes(self, model: Any) -> int:
        return int(model.config.num_labels) if self.classifier(model) is not None else 0

    def class_names(self, model: Any) -> Sequence[str] | None:
        names = getattr(model.config, "id2label", None)
        return None if not names else [names[i] for i in sorted(names)]

    def enable_checkpointing(self, model: Any) -> None:
        model.gradient_checkpointing_enable()
