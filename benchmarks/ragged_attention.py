"""Attention of images with different numbers of tokens: image by image, or padded in buckets of similar length?

    python benchmarks/ragged_attention.py [ROUNDS]

`loop`: one call per image. `padded`: one call for all. The library takes one of the two. `buckets`: images sorted by length,
padded by at most 5 or 15 %, one call per bucket. `equal`: one call for images of the same total number of tokens, if all had
the same. Milliseconds, interleaved medians, for the heads of the embedded model, DeiT-T and DeiT-S.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from tokenmerge.core import attention
from tokenmerge.core.attention import AttentionConfig, attend_packed
from tokenmerge.utils.environment import cpu_features


def buckets(lengths: Sequence[int], padding: float) -> list[list[int]]:
    """Images in groups of similar length: at most this fraction of each group is padding."""
    groups: list[list[int]] = []
    used = 0
    for image in sorted(range(len(lengths)), key=lambda b: -lengths[b]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= (1 + padding) * (used + lengths[image]):
            groups[-1].append(image)
            used += lengths[image]
        else:
            groups.append([image])
            used = lengths[image]
    return groups


def in_buckets(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lengths: Sequence[int], padding: float) -> Tensor:
    """`attend_packed`, one call per bucket."""
    starts = [0, *accumulate(lengths)]
    outs: dict[int, Tensor] = {}
    for group in buckets(lengths, padding):
        n = lengths[group[0]]
        first = torch.tensor([starts[b] for b in group]).unsqueeze(1)
        valid = torch.arange(n) < torch.tensor([lengths[b] for b in group]).unsqueeze(1)
        rows = torch.where(valid, first + torch.arange(n), first).reshape(-1)
        padded = [
            t[0].transpose(0, 1).index_select(0, rows).unflatten(0, (len(group), n)).transpose(1, 2) for t in (q, k, v)
        ]
        mask = bias[group, :, :, :n].masked_fill(~valid[:, None, None, :], -torch.inf)
        out = F.scaled_dot_product_attention(*padded, mask).transpose(1, 2)
        outs |= {b: out[i, : lengths[b]] for i, b in enumerate(group)}
    return torch.cat([outs[b] for b in range(len(lengths))]).unsqueeze(0).transpose(1, 2)


@torch.inference_mode()
def compare(heads: int, width: int, batch: int, mean: int, deviation: int, rounds: int) -> str:
    generator = torch.Generator().manual_seed(0)
    lengths = [int(mean + deviation * z) for z in torch.randn(batch, generator=generator).clamp(-3, 3).tolist()]
    qkv = torch.randn(1, sum(lengths), 3, heads, width).permute(2, 0, 3, 1, 4).unbind()
    bias = torch.rand(batch, 1, 1, max(lengths))
    same = torch.randn(batch, sum(lengths) // batch, 3, heads, width).permute(2, 0, 3, 1, 4).unbind()
    same_bias = bias[..., : sum(lengths) // batch]

    def library(padded: bool) -> Tensor:
        with patch.object(attention, "_pads", lambda *_: padded):
            return attend_packed(*qkv, bias, lengths, AttentionConfig())

    ways: dict[str, Callable[[], Tensor]] = {
        "loop": lambda: library(False),
        "padded": lambda: library(True),
        "buckets, 5 %": lambda: in_buckets(*qkv, bias, lengths, 0.05),
        "buckets, 15 %": lambda: in_buckets(*qkv, bias, lengths, 0.15),
        "equal": lambda: F.scaled_dot_product_attention(*same, same_bias),
    }
    for way in ("padded", "buckets, 5 %", "buckets, 15 %"):
        torch.testing.assert_close(ways[way](), ways["loop"](), atol=1e-5, rtol=0)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            times[way].append(1e3 * (time.perf_counter() - start))
    figures = ", ".join(f"{way} {median(found):.2f}" for way, found in times.items())
    calls = len(buckets(lengths, 0.05)), len(buckets(lengths, 0.15))
    case = f"{heads} heads of width {width}, batch {batch}, about {mean} tokens"
    return f"{case}: {figures} ms; {calls[0]} and {calls[1]} buckets"


def main(rounds: int = 60) -> None:
    print(f"CPU: {', '.join(cpu_features())}; {torch.get_num_threads()} threads")
    for heads, width in ((2, 32), (3, 64), (6, 64)):
        sizes = (
            ((8, 24, 3), (50, 24, 3), (50, 40, 5))
            if width == 32
            else ((8, 150, 10), (8, 90, 15), (32, 150, 10), (32, 90, 15))
        )
        for batch, mean, deviation in sizes:
            print(compare(heads, width, batch, mean, deviation, rounds), flush=True)


if __name__ == "__main__":
    main(*(int(arg) for arg in sys.argv[1:]))
