"""Packed attention against the formula, image by image."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import profile

from tokenmerge.core import attention
from tokenmerge.core.attention import AttentionConfig, attend_packed, fold_log_size

LENGTHS = (5, 9, 2)


def packed(width: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, sum(LENGTHS), width, dtype=torch.float64, generator=generator)
    size = torch.randint(1, 9, (3, max(LENGTHS)), generator=generator).double()
    return q, k, v, size


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("queries", ["own", "prefix"])
@pytest.mark.parametrize("calls", ["one padded", "one per image"])
def test_equals_the_formula(with_bias: bool, queries: str, calls: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PADDED_IMAGES", 1 if calls == "one padded" else 4)
    monkeypatch.setattr(attention, "PADDED_RATIO", 9)
    q, k, v, size = packed()
    if queries == "prefix":
        q = q[:, :, :6].reshape(2, 3, 2, 8).transpose(0, 1)  # two queries for each of three images
    bias = size.log()[:, None, None] if with_bias else None
    with profile() as profiler:
        out = attend_packed(q, k, v, bias, LENGTHS, AttentionConfig())
    made = sum(event.name == "aten::scaled_dot_product_attention" for event in profiler.events() or ())
    assert made == (1 if calls == "one padded" else 3)
    assert out.shape == q.shape
    start = 0
    for b, n in enumerate(LENGTHS):
        part = slice(start, start + n)
        mine = q[0, :, part] if queries == "own" else q[b]
        logits = mine @ k[0, :, part].transpose(1, 2) / 8**0.5 + (size[b, :n].log() if with_bias else 0)
        expected = logits.softmax(-1) @ v[0, :, part]
        torch.testing.assert_close(out[0, :, part] if queries == "own" else out[b], expected)
        start += n


def test_folding_the_sizes_into_a_channel_is_the_same_attention() -> None:
    """What the kernels for packed sequences get, where a mask cannot go in. The kernels themselves need a GPU."""
    q, k, v, _ = packed()
    log_size = torch.rand(sum(LENGTHS), dtype=torch.float64)
    folded = F.scaled_dot_product_attention(*fold_log_size(q, k, v, log_size, 0.3), scale=0.3)
    expected = F.scaled_dot_product_attention(q, k, v, log_size[None, None, None], scale=0.3)
    torch.testing.assert_close(folded[..., :8], expected)
    assert not folded[..., 8:].any()
