"""The process group of `accelerate launch` or torchrun."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .optional import require_package


@dataclass(frozen=True)
class ProcessGroup:
    """This process in its group."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, rows: list[Any]) -> list[Any]:
        """The rows of all processes, in every process."""
        if self.size == 1:
            return rows
        from accelerate.utils import gather_object

        gathered: list[Any] = gather_object(rows)
        return gathered


def current_process_group() -> ProcessGroup:
    """The group that `accelerate launch` or torchrun started; a group of one otherwise."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return ProcessGroup()
    require_package("accelerate", "several processes")
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available())
    return ProcessGroup(state.process_index, state.num_processes)
