"""How long calls take."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt


@cache
def keep_freed_memory() -> bool:
    """From now on, this process keeps the memory that it frees. By default, glibc gives large blocks back to the system and
    gets them again, page by page, in the next layer. Whether it does so depends on what ran before: the time of one model
    relative to another differed by up to 15 % in batches of 32. Returns whether it could be set (glibc only)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all(mallopt(parameter, 2**31 - 1) for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD))


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
    keep_freed_memory()
    with num_threads(threads):
        run(inputs[0])
        return elapsed(run, inputs)


def _synchronize(x: Tensor) -> None:
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
