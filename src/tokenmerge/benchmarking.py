"""How much faster: merged and unmerged side by side in one process, taking turns, medians.

**Efficiency** is the speed-up divided by the ratio of MACs: 1 means that every multiplication saved is time saved.
"""

from __future__ import annotations

import platform
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import Timer

from .evaluation import UNMERGED
from .loading import Source, as_images
from .methods import Method, NoMerge
from .runtimes import check_runtime, prepare
from .surgery import apply, twin
from .tracing import trace


@dataclass(frozen=True)
class Timing:
    """One variant at one batch size."""

    method: str
    batch: int
    image_size: int
    tokens: int  # before any merge
    threads: int
    milliseconds: float  # median of a batch
    low: float  # quartiles
    high: float
    images_per_second: float
    speedup: float  # against the unmerged model: the median over the rounds of the ratio within a round
    gmacs: float  # of an image
    macs_ratio: float  # unmerged / merged
    efficiency: float  # speedup / macs_ratio
    matching_share: float | None  # of the time, spent on matching and merging
    peak_mb: float | None  # memory that torch allocated at once during a batch, beyond weights and images
    runtime: str = "eager"  # of both the variant and the unmerged model


def bench(
    model: nn.Module,
    images: Source,
    methods: Sequence[Method],
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    threads: int | None = None,
    rounds: int = 15,
    runtimes: Sequence[str] = ("eager",),
    progress: Callable[[int], object] = lambda done: None,
) -> list[Timing]:
    """Time the unmerged model and every method on batches of the first images, in each runtime (see runtimes.py). The
    model is left as it was found."""
    for runtime in runtimes:
        check_runtime(runtime)
    threads = threads or torch.get_num_threads()
    like = next(model.parameters())
    pool = next(iter(as_images(images, model).batches(max(batch_sizes)))).images.to(like.device, like.dtype)
    # Each variant is set up once, as its users do.
    plain = [(UNMERGED, NoMerge(last_layer="full"), twin(model))]
    merged = [(repr(method), method, apply(twin(model), method)) for method in methods]
    found: list[Timing] = []
    with tempfile.TemporaryDirectory() as folder:
        for runtime in runtimes:
            variants = [
                _Variant(name, method, prepare(one, runtime, pool[:4], Path(folder), threads), runtime)
                for name, method, one in (*plain, *merged)
            ]
            for size in batch_sizes:
                # Small batches go through several images, since what merges depends on the image.
                chunks = torch.split(pool.repeat(-(-size // len(pool)), 1, 1, 1), size)[:8]
                chunks = tuple(chunk for chunk in chunks if len(chunk) == size)
                found += _bench_batch(twin(model), variants, chunks, threads, rounds, progress)
    return found


@dataclass(frozen=True)
class _Variant:
    name: str
    method: Method  # what it computes, for the count of MACs
    run: Any
    runtime: str


@torch.inference_mode()
def _bench_batch(
    probe: nn.Module,
    variants: Sequence[_Variant],
    chunks: tuple[Tensor, ...],
    threads: int,
    rounds: int,
    progress: Callable[[int], object],
) -> list[Timing]:
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(rounds + 1):  # the first round warms up
        for variant in random.Random(turn).sample(variants, len(variants)):  # no place in the round is favoured
            names = {"run": variant.run, "chunks": chunks}
            timer = Timer("for chunk in chunks: run(chunk)", globals=names, num_threads=threads)
            seconds = timer.timeit(1).median / len(chunks)
            if turn:
                times[variant.name].append(seconds)
        progress(1)
    x = chunks[0]
    costs = {variant.name: _cost(apply(probe, variant.method), chunks) for variant in variants}
    rows = []
    for variant in variants:
        name, run, eager = variant.name, variant.run, variant.runtime == "eager"
        low, middle, high = _quartiles(times[name])
        gmacs, tokens, share = costs[name]
        ratio = costs[UNMERGED][0] / gmacs
        speedup = median(base / mine for base, mine in zip(times[UNMERGED], times[name], strict=True))
        rows.append(
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
                macs_ratio=ratio,
                efficiency=speedup / ratio,
                matching_share=share if eager and name != UNMERGED else None,
                peak_mb=peak_mb(lambda run=run: run(x), x.device) if eager else None,  # type: ignore[misc]
                runtime=variant.runtime,
            )
        )
    return rows


def _quartiles(seconds: list[float]) -> tuple[float, float, float]:
    if len(seconds) == 1:
        return (seconds[0],) * 3
    low, middle, high = quantiles(seconds, n=4)
    return low, middle, high


def _cost(model: nn.Module, chunks: tuple[Tensor, ...]) -> tuple[float, int, float]:
    """GMACs per image, tokens before any merge, and the share of the time that went into matching and merging."""
    shares = []
    for _ in range(3):
        start = time.perf_counter()
        with trace(model, detail=False) as t:
            for chunk in chunks:
                model(chunk)
        shares.append(sum(call.seconds for call in t.calls) / (time.perf_counter() - start))
    return t.cost("macs").gmacs, int(t.tokens_in[0][0]), sorted(shares)[1]


def peak_mb(call: Callable[[], object], device: torch.device) -> float:
    """The most that a call had allocated at once, in MiB, from the allocator's own events."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        call()
        return (torch.cuda.max_memory_allocated() - start) / 2**20
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    now = peak = 0
    events: Any = profiler.profiler.kineto_results.events()
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak / 2**20


def hardware() -> str:
    """Processor or accelerator and the versions that matter, fit for a file name."""
    import timm

    name = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    elif Path("/proc/cpuinfo").exists():
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
        name = found[1] if found else name
    words = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
    return f"{words}_torch-{torch.__version__.partition('+')[0]}_timm-{timm.__version__}"


def plot_timings(timings: Sequence[Timing], path: Path) -> None:
    """Speed-up (solid) beside the ratio of MACs (dotted) over the batch size, a line a method."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5.5, 3.6))
    for name, runtime in dict.fromkeys((t.method, t.runtime) for t in timings if t.method != UNMERGED):
        mine = [t for t in timings if (t.method, t.runtime) == (name, runtime)]
        xs = range(len(mine))
        (line,) = axis.plot(xs, [t.speedup for t in mine], marker="o", label=f"{name[:60]}, {runtime}")
        axis.plot(xs, [t.macs_ratio for t in mine], linestyle=":", color=line.get_color())
        axis.set_xticks(list(xs), [f"{t.batch}×{t.image_size} px" for t in mine])
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.set_ylabel("speed-up (dotted: ratio of MACs)")
    axis.set_xlabel("batch")
    axis.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
