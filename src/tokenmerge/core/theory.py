"""The merging error: Definition 2 and Theorem 1 of the paper."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def merging_error(x_i: Tensor, x_j: Tensor, n_i: Tensor, n_j: Tensor) -> Tensor:
    """Definition 2: E = n_i δ(x_i, x_ij) + n_j δ(x_j, x_ij), δ = 1 − cos, for unit vectors x_i, x_j [..., D]."""
    x_ij = (n_i.unsqueeze(-1) * x_i + n_j.unsqueeze(-1) * x_j) / (n_i + n_j).unsqueeze(-1)

    def delta(x: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(x, x_ij, dim=-1)

    return n_i * delta(x_i) + n_j * delta(x_j)


def merging_error_of(distance: Tensor, n_i: Tensor, n_j: Tensor) -> Tensor:
    """The same in closed form from δ = 1 − cos(x_i, x_j): E = N − √(N² − 2Mδ), N = n_i + n_j, M = n_i n_j."""
    n, m = n_i + n_j, n_i * n_j
    return 2 * m * distance / (n + torch.sqrt((n * n - 2 * m * distance).clamp(min=0)))  # stable where δ is small


def merging_error_bounds(distance: Tensor, n_i: Tensor, n_j: Tensor) -> tuple[Tensor, Tensor]:
    """Theorem 1: M/N·δ ≤ E ≤ 2M/N·δ."""
    low = n_i * n_j / (n_i + n_j) * distance
    return low, 2 * low
