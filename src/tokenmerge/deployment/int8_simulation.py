"""What int8 does to a model, in eager PyTorch: weights and inputs of its linear layers are rounded as in an int8 file.

Calibration runs on it, so that its budget and its loss are those of what ships.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.features import image_function
from ..engine.patch import Model, shared_weights_copy
from .int8 import CHUNK, Int8


class Int8Linear(nn.Linear):
    """A linear layer whose weights are rounded already, and whose input is rounded to 256 values between two bounds."""

    low: float
    high: float

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.high - self.low) / 255
        zero = round(self.low / scale)
        return F.linear((x / scale).round().clamp(zero, zero + 255) * scale, self.weight, self.bias)


@torch.inference_mode()
def simulate_int8(model: Model, images: Tensor, options: Int8 | None = None) -> Model:
    """A copy that computes as a static int8 file does, with ranges measured on images [n,C,H,W]. The model is not
    changed."""
    bits = (options or Int8()).bits
    copy = shared_weights_copy(model)
    ranges = _input_ranges(copy, images)
    for name, module in copy.named_modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d) or name in ranges:
            layer: Any = module
            layer.weight = nn.Parameter(_rounded(layer.weight, bits), requires_grad=False)
        if name in ranges:
            layer.__class__ = Int8Linear
            layer.low, layer.high = ranges[name]
    return copy


def _input_ranges(model: nn.Module, images: Tensor) -> dict[str, tuple[float, float]]:
    """The least and the largest input of each linear layer that ran; both include 0."""
    found: dict[str, tuple[float, float]] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            low, high = found.get(name, (0.0, 1e-6))
            found[name] = min(low, float(args[0].min())), max(high, float(args[0].max()))

        return hook

    layers = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in layers]
    try:
        run = image_function(model)
        for part in torch.split(images, CHUNK):
            run(part)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _rounded(weight: Tensor, bits: int) -> Tensor:
    """To whole multiples of a scale per output channel."""
    flat = weight.detach().flatten(1)
    scale = flat.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return ((flat / scale).round() * scale).view_as(weight)
