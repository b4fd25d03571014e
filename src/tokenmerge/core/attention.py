"""Proportional attention: softmax(QKᵀ·scale + log size), for images of equal and of different lengths.

log size is an additive mask of one row per image: on a CPU that costs 1–6 % of the attention, while folding it into an
extra channel of the keys takes 1.3 to 2.2 times as long (docs/speed.md). Kernels for packed sequences take no mask: there
it is folded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .matching import without_autocast

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older torch
    varlen_attn = None  # type: ignore[assignment]


class AttentionConfig(NamedTuple):
    """How a block computes attention: the arguments of scaled_dot_product_attention."""

    scale: float | None = None  # None: 1/√d
    dropout_p: float = 0.0
    enable_gqa: bool = False

    def scale_for(self, width: int) -> float:
        return width**-0.5 if self.scale is None else self.scale


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Sequence[int],
    config: AttentionConfig,
    query_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Packed images: k, v [1,H,ΣN,d], bias [B,1,1,N] padded; q [1,H,ΣQ,d] with `query_lengths` queries per image (None: as
    many as keys), or [B,H,Q,d] with the same number of queries for each image. The result has the shape of q."""
    packed = len(q) == 1
    queries = (query_lengths or lengths) if packed else (q.shape[2],) * len(q)
    if q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and varlen_attn is not None and not config.dropout_p:
        return _varlen(q, k, v, bias, lengths, config, queries)
    outs = []
    start = first = 0
    for b, (n, count) in enumerate(zip(lengths, queries, strict=True)):
        part = slice(start, start + n)
        q_b = q[:, :, first : first + count] if packed else q[b : b + 1]
        start += n
        first += count
        bias_b = None if bias is None else bias[b : b + 1, :, :, :n]
        out = F.scaled_dot_product_attention(
            q_b, k[:, :, part], v[:, :, part], bias_b,
            dropout_p=config.dropout_p, scale=config.scale, enable_gqa=config.enable_gqa,
        )  # fmt: skip
        outs.append(out.transpose(1, 2))  # so that the parts are contiguous without another copy
    return torch.cat(outs, 1 if packed else 0).transpose(1, 2)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Sequence[int],
    config: AttentionConfig,
    queries: Sequence[int],
) -> Tensor:
    """One kernel for all images (CUDA, half precision)."""
    width = v.shape[-1]
    packed = len(q) == 1
    scale = config.scale_for(width)
    if bias is not None:
        log_size = torch.cat([bias[b, 0, 0, :n] for b, n in enumerate(lengths)])
        q, k, v = fold_log_size(q, k, v, log_size, scale)
    rows = (q if packed else q.transpose(0, 1).flatten(1, 2).unsqueeze(0))[0].transpose(0, 1)  # [T,H,d]
    ends_q, ends_k = (torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=q.device) for n in (queries, lengths))
    out: Any = varlen_attn(
        rows, k[0].transpose(0, 1), v[0].transpose(0, 1), ends_q, ends_k, max(queries), max(lengths),
        scale=scale, enable_gqa=config.enable_gqa,
    )  # fmt: skip
    out = out[..., :width].transpose(0, 1)  # [H,T,d]
    return out.unsqueeze(0) if packed else out.unflatten(1, (len(q), -1)).transpose(0, 1)


def attention_map(q: Tensor, k: Tensor, bias: Tensor | None, config: AttentionConfig) -> Tensor:
    """softmax(QKᵀ·scale + bias), [B,H,Q,N] in float32."""
    with without_autocast(q.device.type):
        logits = (q.float() * config.scale_for(q.shape[-1])) @ repeat_kv(k.float(), q.shape[1]).transpose(-2, -1)
        return (logits if bias is None else logits + bias).softmax(-1)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Keys or values of grouped-query attention, repeated for each head, [B,H,N,d]."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def fold_log_size(q: Tensor, k: Tensor, v: Tensor, log_size: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Put log_size [ΣN] into an extra channel, so that plain attention adds it: (q, 1/scale)·(k, log size)·scale.
    Kernels need widths that are multiples of 8, and values as wide as keys."""
    extra = 8
    q = F.pad(q, (0, extra))
    q[..., -extra] = 1 / scale
    k = F.pad(k, (0, extra))
    k[..., -extra] = log_size
    return q, k, F.pad(v, (0, extra))
