"""How long calls take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def num_threads(threads: int) -> Iterator[None]:
    """PyTorch's number of threads within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def elapsed(run: Callable[[Tensor], Any], inputs: Sequence[Tensor]) -> float:
    """Seconds of the calls with each of the inputs, until the device is done."""
    _synchronize(inputs[0])
    began = time.perf_counter()
    for x in inputs:
        run(x)
    _synchronize(inputs[0])
    return time.perf_counter() - began


def seconds_of(run: Callable[[Tensor], Any], inputs: Sequence[Tensor], threads: int) -> float:
    """The same after one call that does not count, since another model may have run before."""
    with num_threads(threads):
        run(inputs[0])
        return elapsed(run, inputs)


def _synchronize(x: Tensor) -> None:
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
