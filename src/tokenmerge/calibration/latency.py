"""How long a config takes in a runtime, predicted from a table that is measured once: a latency model.

MACs are not time: small matrix products are slower per MAC, and every merging layer has a fixed price. A config's time is

    rest + Σ attention(tokens that enter) + Σ MLP(tokens that leave) + Σ price(tokens that enter a merging layer)
    + overhead of every layer after the first merge

`measure_latency` times the two halves of the blocks over a grid of token counts, the baseline, and a few merged models, from
which the price of a merging layer follows. All of it is interleaved; each entry is a median.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..backbones import tower_of
from ..deployment.runtimes import EAGER, check_runtime, prepare, prepare_blocks
from ..engine.features import image_function
from ..engine.patch import apply, plan_of, shared_weights_copy
from ..engine.trace import trace
from ..evaluation.reference import FULL, Reference
from ..methods.base import Method
from ..methods.no_merge import BASELINE, NoMerge
from ..utils.progress import Progress, no_progress
from ..utils.timing import seconds_of
from .candidates import Candidate

GRID = (1.0, 0.85, 0.7, 0.55, 0.42, 0.3, 0.2)  # of the tokens
LEAST_SECONDS = 0.02  # of one timing


@dataclass(frozen=True)
class LatencyModel:
    """Milliseconds per batch."""

    runtime: str
    batch: int
    threads: int
    tokens: int  # without any merge
    prefix: int
    depth: int
    cls_only: bool  # whether the last layer computes the CLS token alone
    baseline: float  # the unmodified model
    grid: tuple[float, ...]  # token counts, ascending
    attention: tuple[float, ...]  # of one block at each of them, after a merge
    mlp: tuple[float, ...]
    first_attention: float  # of one block while nothing has merged
    rest: float  # embedding, head, and what the blocks do not explain
    last: float  # the last layer if it computes the CLS token alone, with all tokens
    prices: dict[str, tuple[float, float, float]]  # by matching: a + b · tokens for a merging layer, c for any later layer

    def predict(self, tokens: Sequence[float], matching: str) -> float:
        """Milliseconds of a config with these token counts after each layer. `matching`: a key of
        `prices`, the repr of a candidate."""
        at = float(self.tokens)
        total = self.rest
        base, slope, overhead = self.prices.get(matching, (0.0, 0.0, 0.0))
        for layer, after in enumerate(tokens, 1):
            if layer == self.depth and self.cls_only:
                total += self.last * self._at(self.attention, at) / self._at(self.attention, self.tokens)
                break
            total += self.first_attention if at >= self.tokens else self._at(self.attention, at) + overhead
            total += self._at(self.mlp, after)
            if after < at:
                total += base + slope * at
            at = after
        return total

    def ratio(self, tokens: Sequence[float], matching: str) -> float:
        """The same as a fraction of the baseline's time."""
        return self.predict(tokens, matching) / self.baseline

    def _at(self, values: Sequence[float], n: float) -> float:
        if n < self.grid[0]:  # a straight line through the two smallest
            slope = (values[1] - values[0]) / (self.grid[1] - self.grid[0])
            return max(values[0] - slope * (self.grid[0] - n), 0.0)
        return float(np.interp(n, self.grid, values))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LatencyModel:
        lists = {name: tuple(data[name]) for name in ("grid", "attention", "mlp")}
        return cls(**{**data, **lists, "prices": {name: tuple(price) for name, price in data["prices"].items()}})


class Halves(nn.Module):
    """The attention halves of the blocks of a model, or the MLP halves, on tokens [B,N,C]. `most`: blocks at most."""

    def __init__(self, model: nn.Module, part: str, most: int) -> None:
        super().__init__()
        self.backbone = plan_of(apply(model, FULL)).backbone
        self.blocks = nn.ModuleList(self.backbone.blocks(tower_of(model))[:most])
        self.part = part
        self.width = self.backbone.cost(self.blocks[0]).width

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.part == "mlp":
                x = self.backbone.add_mlp(block, x)
                continue
            q, k, v = self.backbone.project(block, x)
            config = self.backbone.attention_config(block)
            log_size = None if self.part == "first" else x[:, None, None, :, 0] * 0
            out = F.scaled_dot_product_attention(q, k, v, log_size, scale=config.scale, enable_gqa=config.enable_gqa)
            x = self.backbone.add_attention(block, x, out)
        return x


def price_configs(reference: Reference, candidates: Sequence[Candidate], single: bool = True) -> dict[str, list[Method]]:
    """By matching, merged models from which the price of a merging layer is found: many merging layers with many tokens,
    many with few, and, with `single`, one merging layer."""
    layers, patches = reference.merging_layers, reference.tokens - reference.prefix
    shapes = [[0.012 * patches] * layers, [0.4 * patches, *[0.02 * patches] * (layers - 1)]]
    if single:
        shapes.append([0.4 * patches, *[0.0] * (layers - 1)])
    configs: dict[str, list[Method]] = {}
    for candidate in candidates:
        configs[repr(candidate)] = []
        for counts in shapes:
            pairs = [*counts, *[0.0] * (reference.depth - layers)]
            _, thresholds = candidate.measure(reference, pairs)
            configs[repr(candidate)].append(candidate.method(pairs, thresholds, reference.tokens))
    return configs


@torch.inference_mode()
def measure_latency(
    model: nn.Module,
    x: Tensor,
    merged: Mapping[str, Sequence[Method]],
    *,
    runtime: str = EAGER,
    threads: int | None = None,
    rounds: int = 7,
    progress: Progress = no_progress,
) -> LatencyModel:
    """A latency model for batches like `x`. `merged`: by matching, the configs from which the price of a merging layer is
    found. The model is not changed."""
    check_runtime(runtime)
    threads = threads or torch.get_num_threads()
    plain = shared_weights_copy(model)
    plan = plan_of(apply(shared_weights_copy(model), NoMerge()))
    cls_only = plan.last_layer(tower_of(model)) != "full"
    with trace(probe := apply(shared_weights_copy(model), FULL), detail=False) as t:
        image_function(probe)(x[:1])
    tokens = int(t.tokens_in[0][0])
    grid = sorted({max(plan.prefix + 2, round(part * tokens)) for part in GRID})
    configs = {(kind, i): method for kind, methods in merged.items() for i, method in enumerate(methods)}
    counts: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        variants: list[tuple[Any, Any, Tensor]] = [(BASELINE, prepare(plain, runtime, x, where, threads), x)]
        if cls_only:
            nothing = apply(shared_weights_copy(model), NoMerge())
            variants.append(("last", prepare(nothing, runtime, x, where, threads), x))
        for key, method in configs.items():
            one = apply(shared_weights_copy(model), method)
            with trace(one, detail=False) as t:
                image_function(one)(x)
            counts[key] = [float(layer.double().mean()) for layer in t.tokens]
            variants.append((key, prepare(one, runtime, x, where, threads), x))
        for part in ("first", "attention", "mlp"):
            if part == "first" and runtime != EAGER:
                continue
            # Exporters take a second per block, and blocks are alike.
            halves = Halves(shared_weights_copy(model), part, plan.depth if runtime == EAGER else 4).eval()
            like = torch.randn(max(2, len(x)), tokens, halves.width, generator=torch.Generator().manual_seed(0)).to(x)
            run = prepare_blocks(halves, runtime, like, where, threads)
            sizes = [tokens] if part == "first" else grid
            variants += [((part, n), run, like[: len(x), :n].contiguous()) for n in sizes]
            timed = len(halves.blocks)
        times = _interleave(variants, threads, rounds, progress)
    blocks = plan.depth
    attention, mlp = (_monotone([times[part, n] / timed for n in grid]) for part in ("attention", "mlp"))
    first = times["first", tokens] / timed if runtime == EAGER else attention[-1]
    rest = times[BASELINE] - blocks * (first + mlp[-1])
    last = times["last"] - rest - (blocks - 1) * (first + mlp[-1]) if cls_only else 0.0
    found = LatencyModel(
        runtime, len(x), threads, tokens, plan.prefix, blocks, cls_only, times[BASELINE], tuple(map(float, grid)),
        tuple(attention), tuple(mlp), first, rest, max(last, 0.0), {},
    )  # fmt: skip
    prices = {}
    for kind, methods in merged.items():
        rows = []
        for i, _ in enumerate(methods):
            left = [float(tokens), *counts[kind, i]][: blocks + (not cls_only)]  # the CLS-only last layer does not merge
            entering = [a for a, b in pairwise(left) if b < a]
            later = sum(a < tokens for a in left[:-1])
            rows.append((len(entering), sum(entering), later, times[kind, i] - found.predict(counts[kind, i], kind)))
        prices[kind] = fit_price(rows)
    return replace(found, prices=prices)


def _interleave(
    variants: Sequence[tuple[Any, Callable[[Tensor], Any], Tensor]], threads: int, rounds: int, progress: Progress
) -> dict[Any, float]:
    """Milliseconds of each. In every round all of them run, and each is compared with the baseline of the round."""
    repeats = {key: max(1, math.ceil(LEAST_SECONDS / seconds_of(run, [x], threads))) for key, run, x in variants}
    times: dict[Any, list[float]] = {key: [] for key in repeats}
    for turn in range(rounds + 1):  # the first round warms up
        for key, run, x in random.Random(turn).sample(variants, len(variants)):
            seconds = seconds_of(run, [x] * repeats[key], threads) / repeats[key]
            if turn:
                times[key].append(1e3 * seconds)
        progress("rounds", 1, rounds + 1)
    base = median(times[BASELINE])
    return {key: base * median(a / b for a, b in zip(times[key], times[BASELINE], strict=True)) for key in times}


def _monotone(values: Sequence[float]) -> list[float]:
    """No smaller than any before: more tokens never take less time."""
    return list(accumulate(values, max))


def fit_price(rows: Sequence[tuple[float, float, float, float]]) -> tuple[float, float, float]:
    """a, b, c ≥ 0 with layers · a + tokens · b + later · c = time, for the rows (layers, tokens, later, time): the best fit
    with as few of the three as rows allow."""
    left = np.array([row[:3] for row in rows], dtype=float)
    right = np.array([row[3] for row in rows], dtype=float)
    best, least = np.zeros(3), float(right @ right)
    for count in range(1, min(3, len(rows)) + 1):
        for chosen in combinations(range(3), count):
            columns = left[:, chosen]
            values = np.linalg.lstsq(columns, right, rcond=None)[0]
            miss = float(np.sum((columns @ values - right) ** 2))
            if values.min() >= 0 and miss < least - 1e-12:
                best, least = np.zeros(3), miss
                best[list(chosen)] = values
    a, b, c = best.tolist()
    return a, b, c
