"""A merged model as one graph."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..backbones.base import Unsupported
from ..engine.patch import adapter_of
from ..methods.base import exporting_methods


class ExportWrapper(nn.Module):
    """What goes into the file: images in, logits or features out; with the normalisation, if that is wanted."""

    def __init__(self, model: nn.Module, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        super().__init__()
        self.model = model
        self.run = adapter_of(model).run
        self.normalise = mean is not None
        if mean is not None and std is not None:
            self.register_buffer("scale", 1 / (255 * torch.tensor(std).view(1, -1, 1, 1)))
            self.register_buffer("shift", torch.tensor(mean).view(1, -1, 1, 1) / torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if self.normalise:
            images = images.float() * self.scale - self.shift  # type: ignore[operator]
        return self.run(self.model, images)


def export_program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """A graph for any batch size. The model is a merged one, or an `ExportWrapper`."""
    if len(example) < 2:
        example = example.repeat(2, 1, 1, 1)  # torch.export would specialise on a batch of 1
    try:
        with torch.no_grad(), quiet():
            batch = torch.export.Dim("batch", min=1, max=65536)
            return torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # torch's own errors have many classes
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Unsupported(
            f"torch.export cannot trace this {type(model).__name__} as one graph ({reason[:300]}). Methods that export: "
            f"{', '.join(exporting_methods())}; models: those that torch.export can trace without merging"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn of their own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
