"""`apply` and `remove`: put classes of ours before the model's, and take them away again. No weight is touched. Modules of a
method are registered as one child of the model, and taken off again."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..backbones import Backbone, ModelAdapter, Unsupported, find_backbone, match_adapter, tower_of
from ..methods.base import Method
from ..methods.learning import MODULES, ModelFacts
from .forward import Output, Plan, Restore, method_modules

Model = TypeVar("Model", bound=nn.Module)


class Patched:
    """Marks a class made by `apply`. It has no importable name, so pickle and deepcopy get its recipe."""

    _tokenmerge_mixin: type
    _tokenmerge_base: type
    _tokenmerge: Any  # the plan of a model, the layer of a block

    def __reduce_ex__(self, protocol: Any) -> Any:
        recipe: Any = super().__reduce_ex__(2)
        _, _, *state = recipe
        return (_rebuild, (self._tokenmerge_mixin, self._tokenmerge_base), *state)


@cache
def _patched_class(mixin: Any, base: Any) -> Any:
    # The model's own name: printing, logging and saving a merged model look as before.
    names = {key: getattr(base, key) for key in ("__module__", "__qualname__", "__doc__")}
    names |= {"_tokenmerge_mixin": mixin, "_tokenmerge_base": base}
    return type(base.__name__, (Patched, mixin, base), names)


def _rebuild(mixin: Any, base: Any) -> Any:
    cls = _patched_class(mixin, base)
    return cls.__new__(cls)


def _patch(module: Any, mixin: Any, note: object) -> None:
    base: Any = type(module)
    module.__class__ = _patched_class(mixin, base)
    module._tokenmerge = note


def is_applied(model: nn.Module) -> bool:
    return isinstance(tower_of(model), Patched)


def apply(model: Model, method: Method, *, restore: Restore | None = None, output: Output = "full") -> Model:
    """Merge tokens in this model from now on, in place; the model is returned. Of a model with more than one tower, the
    vision tower merges. A method applied before is replaced.

    `restore`: what the original tokens get where the model returns or pools the whole sequence: the vector of their group
    ("group"), or their own vector at the merge plus what the group has changed since ("residual"). By default, residual
    where the sequence is returned, and group where a classifier pools it.

    `output`: "reduced" returns the tokens that are left instead of the whole sequence, for language models and other readers
    of tokens; `tokenmerge.reduce` tells which original tokens each one stands for."""
    if output not in get_args(Output):
        raise ValueError(f"output is one of {', '.join(map(repr, get_args(Output)))}, not {output!r}")
    if restore is not None and restore not in get_args(Restore):
        raise ValueError(f"restore is one of {', '.join(map(repr, get_args(Restore)))}, not {restore!r}")
    if not isinstance(method, Method):
        raise TypeError(f"apply takes a method such as tokenmerge.ATM(…) or tokenmerge.ToMe(r=8), not {method!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply takes a torch.nn.Module, not {type(model).__name__}")
    _refuse_wrappers(model)
    tower = tower_of(model)
    before = (plan_of(tower), method_modules(tower)) if is_applied(tower) else None
    remove(tower)
    try:
        plan = _make_plan(tower, method, restore, output)
        modules = _make_modules(tower, plan)
    except Exception:
        if before is not None:
            _install(tower, *before)
        raise
    _install(tower, plan, modules)
    return model


def _make_plan(model: nn.Module, method: Method, restore: Restore | None, output: Output) -> Plan:
    backbone = find_backbone(model)
    for module in (model, *backbone.blocks(model)):
        if "forward" in vars(module):
            raise Unsupported(
                f"this {type(module).__name__} has a `forward` of its own on the instance, as accelerate's device maps and "
                "some wrappers set it, which would bypass the merging; apply first, then dispatch or wrap"
            )
    method.check_depth(len(backbone.blocks(model)))
    method.check_model(facts_of(model, backbone))
    plan = Plan.of(model, method, backbone, restore, output)
    if plan.last_layer(model) == "full" and output == "reduced" and backbone.has_classifier(model):
        raise Unsupported(
            f"output='reduced' is for models that return tokens; the head of this {type(model).__name__} would pool the "
            "tokens that are left as if each stood for one patch. Use output='full', or the model without its head"
        )
    return plan


def facts_of(model: nn.Module, backbone: Backbone) -> ModelFacts:
    """What a method may know of the model."""
    blocks = backbone.blocks(model)
    cost = backbone.cost(blocks[0])
    return ModelFacts(
        len(blocks), cost.width, cost.attn_width // cost.head_dim, backbone.has_cls_token(model),
        backbone.head_reads_cls_only(model), backbone.num_classes(model),
    )  # fmt: skip


def _make_modules(model: nn.Module, plan: Plan) -> nn.ModuleDict | None:
    """The modules of the method, with its weights, where the model is. New ones are the same each time. They can be trained,
    even if `apply` is called in inference mode."""
    with torch.inference_mode(False), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        modules = plan.method.modules(facts_of(model, plan.backbone))
        if modules is None:
            return None
        weights: str | None = getattr(plan.method, "weights", None)
        if weights is not None:
            load_modules(modules, weights)
        like = next(model.parameters())
        return modules.to(like.device, like.dtype).train(model.training)


def _install(model: nn.Module, plan: Plan, modules: nn.ModuleDict | None) -> None:
    if modules is not None:
        model.add_module(MODULES, modules)
    for layer, block in enumerate(plan.backbone.blocks(model), 1):
        _patch(block, plan.backbone.block_mixin, layer)
    for module, mixin in plan.backbone.relays(model).items():
        _patch(module, mixin, None)
    _patch(model, plan.backbone.model_mixin, plan)


def remove(model: Model) -> Model:
    """Undo `apply` exactly; a model without it is left alone."""
    patched = [module for module in model.modules() if isinstance(module, Patched)]
    for module in patched:
        if type(module) is not _patched_class(module._tokenmerge_mixin, module._tokenmerge_base):
            raise Unsupported(
                f"the class of this {type(module).__name__} was changed again after `apply`, "
                "by parametrize, FSDP or the like; undo that first, then remove"
            )
    for module in patched:
        module.__class__ = module._tokenmerge_base
        del module._tokenmerge
        module._modules.pop(MODULES, None)
    return model


def load_modules(modules: nn.Module, path: str | Path) -> None:
    """Read the weights of a method's modules, strictly."""
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not the weights of a method ({error}); `tokenmerge finetune` writes them") from None
    own = modules.state_dict()
    wrong = [
        f"{key}: {'missing' if key not in state else 'unknown' if key not in own else 'has another shape'}"
        for key in sorted(own.keys() | state.keys())
        if key not in own or key not in state or own[key].shape != state[key].shape
    ]
    if wrong:
        raise ValueError(f"{path}: not the weights of this method for this model; {'; '.join(wrong[:3])}")
    modules.load_state_dict(state)


def shared_weights_copy(model: Model) -> Model:
    """A baseline copy in eval mode that shares the weights' memory."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return remove(copy.deepcopy(model, dict(shared))).eval()


def use_matmul(model: Model, on: bool) -> Model:
    """In graphs of this merged model, merge by a matrix product instead of a scatter, or no longer."""
    tower_of(model)._tokenmerge = replace(plan_of(model), matmul=on)  # type: ignore[assignment]
    return model


def plan_of(model: nn.Module) -> Plan:
    """What `apply` decided for this model."""
    tower: Any = tower_of(model)
    if not isinstance(tower, Patched):
        raise ValueError(f"no method is applied to this {type(model).__name__}; call tokenmerge.apply(model, …) first")
    plan: Plan = tower._tokenmerge
    return plan


def backbone_of(model: nn.Module) -> Backbone:
    """The backbone of a model, or of its vision tower, merged or not."""
    tower = tower_of(model)
    return plan_of(tower).backbone if isinstance(tower, Patched) else find_backbone(tower)


def adapter_of(model: nn.Module) -> ModelAdapter:
    """What is known of the model as a whole."""
    return match_adapter(model) or find_backbone(model)  # which says what is not supported


def _refuse_wrappers(model: nn.Module) -> None:
    """Wrappers copy, shard or compile what they wrap: the inside must be ready before."""
    name = type(model).__name__
    inside = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    if isinstance(inside, nn.Module):
        raise Unsupported(
            f"the model is wrapped in {name}; apply to the bare model first, then wrap: "
            f"{name}(tokenmerge.apply(model, method))"
        )
