"""How much faster: every config and the baseline in one process, interleaved, medians.

**Efficiency** is the speed-up divided by the MAC reduction: 1 means that every saved MAC is saved time.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from ..data.load import Source, as_images
from ..deployment.runtimes import EAGER, check_runtime, prepare
from ..engine.features import image_function
from ..engine.patch import apply, shared_weights_copy
from ..engine.trace import trace
from ..methods.base import Method
from ..methods.no_merge import BASELINE
from ..utils.progress import Progress, no_progress
from ..utils.timing import seconds_of
from .reference import FULL


@dataclass(frozen=True)
class Timing:
    """One variant at one batch size."""

    method: str
    batch: int
    image_size: int
    tokens: int  # before any merge
    threads: int
    milliseconds: float  # median per batch
    low: float  # quartiles
    high: float
    images_per_second: float
    speedup: float  # over the baseline: the median over the rounds of the ratio within a round
    gmacs: float  # per image
    macs_ratio: float  # MAC reduction: baseline / merged
    efficiency: float  # speedup / macs_ratio
    matching_share: float | None  # fraction of the time spent on matching and merging
    peak_mb: float | None  # peak memory that torch allocated during a batch, beyond weights and images
    runtime: str = EAGER  # of both the variant and the baseline


@dataclass(frozen=True)
class Variant:
    """A config in a runtime, ready to be timed."""

    name: str
    method: Method  # what it computes, to count the MACs
    run: Any
    runtime: str


def bench(
    model: nn.Module,
    images: Source,
    methods: Sequence[Method],
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    threads: int | None = None,
    rounds: int = 15,
    runtimes: Sequence[str] = (EAGER,),
    progress: Progress = no_progress,
) -> list[Timing]:
    """Time the baseline and every method on batches of the first images, in each runtime. The model is not changed."""
    for runtime in runtimes:
        check_runtime(runtime)
    threads = threads or torch.get_num_threads()
    like = next(model.parameters())
    pool = next(iter(as_images(images, model).batches(max(batch_sizes)))).images.to(like.device, like.dtype)
    # Each variant is set up once, as users do. The baseline is the unpatched model.
    models: list[tuple[str, Method, nn.Module]] = [(BASELINE, FULL, shared_weights_copy(model))]
    models += [(repr(method), method, apply(shared_weights_copy(model), method)) for method in methods]
    timings: list[Timing] = []
    with tempfile.TemporaryDirectory() as folder:
        for runtime in runtimes:
            variants = [
                Variant(name, method, prepare(one, runtime, pool[:4], Path(folder), threads), runtime)
                for name, method, one in models
            ]
            for size in batch_sizes:
                # Small batches run on several images, since what merges depends on the image.
                chunks = torch.split(pool.repeat(-(-size // len(pool)), 1, 1, 1), size)[:8]
                chunks = tuple(chunk for chunk in chunks if len(chunk) == size)
                total = len(runtimes) * len(batch_sizes) * (rounds + 1)
                times = time_variants(variants, chunks, threads, rounds, progress, total)
                timings += _timings(shared_weights_copy(model), variants, chunks, times, threads)
    return timings


@torch.inference_mode()
def time_variants(
    variants: Sequence[Variant],
    chunks: Sequence[Tensor],
    threads: int,
    rounds: int,
    progress: Progress = no_progress,
    total: int | None = None,
) -> dict[str, list[float]]:
    """Seconds per batch of every variant, one entry per round. In each round, all variants run in random order. `total`: of
    the rounds that are reported to `progress`."""
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(rounds + 1):  # the first round warms up
        for variant in random.Random(turn).sample(variants, len(variants)):  # no position in the round is favoured
            seconds = seconds_of(variant.run, chunks, threads) / len(chunks)
            if turn:
                times[variant.name].append(seconds)
        progress("rounds", 1, total)
    return times


@torch.inference_mode()
def _timings(
    probe: nn.Module,
    variants: Sequence[Variant],
    chunks: tuple[Tensor, ...],
    times: dict[str, list[float]],
    threads: int,
) -> list[Timing]:
    costs = {variant.name: _cost(apply(probe, variant.method), chunks) for variant in variants}
    x = chunks[0]
    timings = []
    for variant in variants:
        name = variant.name
        eager = variant.runtime == EAGER
        low, middle, high = _quartiles(times[name])
        gmacs, tokens, matching_share = costs[name]
        macs_ratio = costs[BASELINE][0] / gmacs
        speedup = median(base / own for base, own in zip(times[BASELINE], times[name], strict=True))
        timings.append(
            Timing(
                method=name,
                batch=len(x),
                image_size=x.shape[-1],
                tokens=tokens,
                threads=threads,
                milliseconds=1e3 * middle,
                low=1e3 * low,
                high=1e3 * high,
                images_per_second=len(x) / middle,
                speedup=speedup,
                gmacs=gmacs,
                macs_ratio=macs_ratio,
                efficiency=speedup / macs_ratio,
                matching_share=matching_share if eager and name != BASELINE else None,
                peak_mb=peak_mb(variant.run, x) if eager else None,
                runtime=variant.runtime,
            )
        )
    return timings


def _quartiles(seconds: list[float]) -> tuple[float, float, float]:
    if len(seconds) == 1:
        return (seconds[0],) * 3
    low, middle, high = quantiles(seconds, n=4)
    return low, middle, high


def _cost(model: nn.Module, chunks: tuple[Tensor, ...]) -> tuple[float, int, float]:
    """GMACs per image, tokens before any merge, and the fraction of the time spent on matching and merging."""
    shares = []
    run = image_function(model)
    for _ in range(3):
        start = time.perf_counter()
        with trace(model, detail=False) as t:
            for chunk in chunks:
                run(chunk)
        shares.append(sum(call.seconds for call in t.calls) / (time.perf_counter() - start))
    return t.cost("macs").gmacs, int(t.tokens_in[0][0]), sorted(shares)[1]


def peak_mb(run: Callable[[Tensor], object], x: Tensor) -> float:
    """Peak memory that a call allocated, in MiB, from the allocator's own events."""
    if x.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        run(x)
        return (torch.cuda.max_memory_allocated() - start) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run(x)
    now = peak = 0
    events: Any = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak / 2**20


def timings_figure(timings: Sequence[Timing]) -> Any:
    """Speed-up (solid) and MAC reduction (dotted) over the batch size, one line per method."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 3.6))
    for name, runtime in dict.fromkeys((t.method, t.runtime) for t in timings if t.method != BASELINE):
        rows = [t for t in timings if (t.method, t.runtime) == (name, runtime)]
        xs = range(len(rows))
        (line,) = axis.plot(xs, [t.speedup for t in rows], marker="o", label=f"{name[:60]}, {runtime}")
        axis.plot(xs, [t.macs_ratio for t in rows], linestyle=":", color=line.get_color())
        axis.set_xticks(list(xs), [f"{t.batch}×{t.image_size} px" for t in rows])
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_ylabel("speed-up (dotted: MAC reduction)")
    axis.set_xlabel("batch")
    axis.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    return figure
