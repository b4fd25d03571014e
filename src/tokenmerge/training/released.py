"""Weights that the authors of a trained method released, as files that `apply` and `load_model` read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..data.checkpoint import model_with, read_weights
from ..engine.forward import method_modules
from ..engine.patch import apply
from ..methods.base import Method
from .checkpoints import trained_method, write_trained


def convert(checkpoint: str | Path, model: str, method: Method, out: str | Path, **options: Any) -> Method:
    """Write `model.safetensors`, `method.json` and, for methods with modules, `method.modules.safetensors` into the folder
    `out`. `model`: the timm name of the base model. All keys must be known, and none missing. `options` go to timm."""
    own, modules = type(method).from_released(read_weights(checkpoint, ("model",)))
    what = f"{checkpoint} is not a released checkpoint of {type(method).__name__} for {model}"
    network = apply(model_with(model, own, what, **options), method)
    made = method_modules(network)
    expected = set() if made is None else set(made.state_dict())
    if expected != set(modules):
        missing, unknown = sorted(expected - set(modules)), sorted(set(modules) - expected)
        raise ValueError(f"{what}: modules missing {missing[:3]}, unexpected {unknown[:3]}")
    if made is not None:
        try:
            made.load_state_dict(modules)
        except RuntimeError as error:
            raise ValueError(f"{what}: {str(error).splitlines()[-1].strip()}") from None
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_trained(network, method, out)
    return trained_method(network, method, out)
