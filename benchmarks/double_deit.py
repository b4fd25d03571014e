"""A DeiT-S-sized model that behaves like the real DeiT-Tiny, for timing where no DeiT-S weights are available.

    python benchmarks/double_deit.py deit_tiny_patch16_224.safetensors deit_small_doubled.safetensors

Two DeiT-Tinys side by side: width 384, six heads, every weight twice on the diagonal. Each half computes what DeiT-Tiny
does, so that tokens are as similar, and thresholds merge as many of them, as in the real model. With random weights all keys
are similar and thresholds mean nothing.
"""

from __future__ import annotations

import sys

import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def double(name: str, w: Tensor) -> Tensor:
    if name.startswith("head."):  # half of the sum of two equal answers
        return torch.cat((w, w), 1) / 2 if w.ndim == 2 else w
    if "qkv" in name:  # keep queries, keys and values together: [3,·,…]
        return torch.cat([double("", part) for part in w.chunk(3)])
    if w.ndim == 2:
        return torch.block_diag(w, w)
    return torch.cat((w, w), 0 if w.ndim in (1, 4) else -1)  # biases and the patch embedding; tokens and positions


def main(source: str, target: str) -> None:
    state = {name: double(name, w).contiguous() for name, w in load_file(source).items()}
    timm.create_model("deit_small_patch16_224").load_state_dict(state)
    save_file(state, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
