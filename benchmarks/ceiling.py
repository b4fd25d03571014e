"""How fast merging could be if it cost nothing: the same model with the token sequence truncated in every layer.

    python benchmarks/ceiling.py deit_small_patch16_224 WEIGHTS PHOTOS "ATM(1.0, 0.03, 0.865)" [BATCH] [ROUNDS]

Nothing is compared, nothing is merged, no state is kept. What is lost against the MAC reduction is lost by any method,
because smaller matrix products are slower per MAC. Variants are interleaved in random order; medians of milliseconds per
image.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import tokenmerge as tm
from tokenmerge.core.attention import partial_qkv
from tokenmerge.engine.patch import shared_weights_copy


def cut(model: Any, x: Tensor, tokens: Sequence[int]) -> Tensor:
    """A timm ViT that keeps only the first `tokens[l]` tokens after the attention of layer l."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    for block, left in zip(model.blocks, tokens, strict=True):
        attn, (b, n, width) = block.attn, x.shape
        h, last = block.norm1(x), left == 1
        if last:  # the query of the class token alone
            qkv = attn.qkv.weight, attn.qkv.bias
            made = partial_qkv(*qkv, h[:, :1], "q") | partial_qkv(*qkv, h, "kv")
            q, k, v = (made[part].reshape(b, -1, attn.num_heads, attn.head_dim).transpose(1, 2) for part in "qkv")
            x = x[:, :1]
        else:
            q, k, v = attn.qkv(h).reshape(b, n, 3, attn.num_heads, attn.head_dim).permute(2, 0, 3, 1, 4).unbind()
        x = x + attn.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, width))
        x = x[:, :left].contiguous()
        x = x + block.mlp(block.norm2(x))
    return model.head(model.norm(x)[:, 0])


@torch.inference_mode()
def main(name: str, weights: str, folder: str, config: str, batch: int = 1, rounds: int = 100) -> None:
    base = tm.load_model(name, weights)
    batches = [b.images for b in tm.load_images(folder, base, limit=max(8, 4 * batch)).batches(batch)]
    merged = tm.apply(shared_weights_copy(base), tm.parse(config))
    counts, ratios = [], []
    for x in batches:
        with tm.trace(merged, detail=False) as t:
            merged(x)
        counts.append([int(layer[0]) for layer in t.tokens])
        ratios.append(t.cost("paper").ratio)
    patched = tm.apply(shared_weights_copy(base), tm.NoMerge(last_layer="full"))
    variants: dict[str, Callable[[int], Any]] = {
        "baseline": lambda i: base(batches[i]),
        "patched, NoMerge": lambda i: patched(batches[i]),
        config: lambda i: merged(batches[i]),
        "truncated, at no cost": lambda i: cut(base, batches[i], counts[i]),
    }
    times: dict[str, list[float]] = {key: [] for key in variants}
    for turn in range(rounds):
        for key in random.sample(list(variants), len(variants)):
            began = time.perf_counter()
            variants[key](turn % len(batches))
            times[key].append(1e3 * (time.perf_counter() - began) / batch)
    ratio = len(ratios) / sum(ratios)
    for key, found in times.items():
        speedup = median(times["baseline"][5:]) / median(found[5:])
        print(f"{key:<40}{median(found[5:]):8.1f} ms   speed-up {speedup:.3f}   efficiency {speedup / ratio:.3f}")
    print(f"MAC reduction {ratio:.3f}, batch {batch}, {rounds} rounds")


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(int, sys.argv[5:]))
