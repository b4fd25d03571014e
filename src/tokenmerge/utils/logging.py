"""Log the metrics of a long run to TensorBoard or Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from .optional import require_package


class Log(Protocol):
    """Called with the metrics of every step or trial."""

    def __call__(self, step: int, values: Mapping[str, float]) -> object: ...


def no_log(step: int, values: Mapping[str, float]) -> None:
    """The default: log nothing."""


def make_logger(target: str) -> Log:
    """`target`: "tensorboard:FOLDER", or "wandb:PROJECT"."""
    kind, _, name = target.partition(":")
    if kind not in ("tensorboard", "wandb") or not name:
        raise ValueError(f"cannot log to {target!r}; write tensorboard:FOLDER or wandb:PROJECT")
    require_package(kind, f"logs to {target}")
    if kind == "wandb":
        import wandb

        run = wandb.init(project=name)
        return lambda step, values: run.log(dict(values), step=step)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(name)

    def write(step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return write
