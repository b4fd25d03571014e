"""Where a long run can be followed: TensorBoard or Weights & Biases."""

from __future__ import annotations

from collections.abc import Callable

from .extras import need


def logger(where: str) -> Callable[[dict[str, float], int], object]:
    """For `log`: "tensorboard:FOLDER", or "wandb:PROJECT"."""
    kind, _, name = where.partition(":")
    if kind not in ("tensorboard", "wandb") or not name:
        raise ValueError(f"cannot log to {where!r}; write tensorboard:FOLDER or wandb:PROJECT")
    need(kind, f"logs to {where}")
    if kind == "wandb":
        import wandb

        run = wandb.init(project=name)
        return lambda values, number: run.log(values, step=number)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(name)

    def write(values: dict[str, float], number: int) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, number)
        writer.flush()

    return write
