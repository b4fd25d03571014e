"""`apply` and `remove`: put classes of ours before the host's, and take them away again. No weight is touched."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from torch import nn

from .backbones import Unsupported, find_backbone
from .engine import Plan
from .methods import Method

Model = TypeVar("Model", bound=nn.Module)


class Patched:
    """Marks a class made by `apply`. It has no importable name, so pickle and deepcopy get its recipe."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        recipe: Any = super().__reduce_ex__(2)
        _, _, *state = recipe
        mixin, host = type(self).__bases__[1:]
        return (_rebuild, (mixin, host), *state)


@cache
def _patched_class(mixin: Any, host: Any) -> Any:
    # The host's own name: printing, logging and saving a merged model look as before.
    names = {"__module__": host.__module__, "__qualname__": host.__qualname__, "__doc__": host.__doc__}
    return type(host.__name__, (Patched, mixin, host), names)


def _rebuild(mixin: Any, host: Any) -> Any:
    cls = _patched_class(mixin, host)
    return cls.__new__(cls)


def _patch(module: Any, mixin: Any, note: object) -> None:
    host: Any = type(module)
    module.__class__ = _patched_class(mixin, host)
    module._tokenmerge = note


def is_applied(model: nn.Module) -> bool:
    return isinstance(model, Patched)


def apply(model: Model, method: Method) -> Model:
    """Merge tokens in this model from now on, in place; the model is returned. A method applied before is replaced."""
    if not isinstance(method, Method):
        raise TypeError(f"apply takes a method such as tokenmerge.ATM(…) or tokenmerge.ToMe(r=8), not {method!r}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"apply takes a torch.nn.Module, not {type(model).__name__}")
    _refuse_wrappers(model)
    before = plan_of(model) if is_applied(model) else None
    remove(model)
    try:
        plan = _plan(model, method)
    except Exception:
        if before is not None:
            _install(model, before)
        raise
    _install(model, plan)
    return model


def _plan(model: nn.Module, method: Method) -> Plan:
    backbone = find_backbone(model)
    method.check_depth(len(backbone.blocks(model)))
    plan = Plan(method, backbone)
    plan.last_layer(model)
    return plan


def _install(model: nn.Module, plan: Plan) -> None:
    for layer, block in enumerate(plan.backbone.blocks(model), 1):
        _patch(block, plan.backbone.block_mixin, layer)
    _patch(model, plan.backbone.model_mixin, plan)


def remove(model: Model) -> Model:
    """Undo `apply` exactly; a model without it is left alone."""
    for module in model.modules():
        if isinstance(module, Patched):
            module.__class__ = type(module).__bases__[2]
            del module._tokenmerge
    return model


def plan_of(model: nn.Module) -> Plan:
    """What `apply` decided for this model."""
    if not is_applied(model):
        raise ValueError(
            f"no method is applied to this {type(model).__name__}; tokenmerge.apply(model, …) first, NoMerge() if need be"
        )
    plan: Plan = model._tokenmerge  # type: ignore[assignment]
    return plan


def _refuse_wrappers(model: nn.Module) -> None:
    """Wrappers copy, shard or compile what they wrap: the inside must be ready before."""
    name = type(model).__name__
    inside = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
    if isinstance(inside, nn.Module):
        raise Unsupported(
            f"the model is wrapped in {name}; apply to the bare model first, then wrap: "
            f"{name}(tokenmerge.apply(model, method))"
        )
