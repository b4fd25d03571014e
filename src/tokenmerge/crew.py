"""Several processes on the same work: who they are, and how what they found comes together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from .extras import need


@dataclass(frozen=True)
class Crew:
    """This process among `size` of them."""

    rank: int = 0
    size: int = 1

    def gather(self, rows: list[Any]) -> list[Any]:
        """The rows of all processes, in each of them."""
        if self.size == 1:
            return rows
        from accelerate.utils import gather_object

        found: list[Any] = gather_object(rows)
        return found


def crew() -> Crew:
    """The processes that `accelerate launch` or torchrun started; this one alone where neither did."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return Crew()
    need("accelerate", "several processes")
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.accelerator.is_available())
    return Crew(state.process_index, state.num_processes)
