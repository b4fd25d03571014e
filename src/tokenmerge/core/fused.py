"""Select and merge in a few kernels around one matrix product, where the rule and the device allow it.

matching.py and tokens.py are the reference: decisions are the same, values are equal to rounding. They run wherever the
kernels do not: in training, under autocast, in graphs, in float64, and without numba (CPU) or Triton (CUDA).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .matching import MAX_COSINES, PairRule, Pairs, ThresholdRule, TopRule, View, split_alternate, split_by_size
from .tokens import Assignment, Tokens, empty_merge

# Arguments that a kernel does not use.
NOTHING = np.empty(0, np.float32)
NO_FACTOR = np.empty((0, 0), np.float32)
NO_STRIDES: tuple[int, ...] = (0, 0, 0, 1)
NO_LENGTHS = np.empty(0, np.int64)  # all images have the same number of tokens
_ENABLED: ContextVar[bool] = ContextVar("tokenmerge_fused", default=os.environ.get("TOKENMERGE_FUSED", "1") != "0")


@contextmanager
def use_fused(enabled: bool) -> Iterator[None]:
    """Turn the fused kernels on or off for this thread of execution. TOKENMERGE_FUSED=0 turns them off for a process."""
    token = _ENABLED.set(enabled)
    try:
        yield
    finally:
        _ENABLED.reset(token)


@cache
def _kernels(device: str = "cpu") -> Any:
    """The kernels of a device; None where there are none, or where what they need is not installed."""
    try:
        return import_module(f".kernels.{device}", __package__) if device in ("cpu", "cuda") else None
    except ImportError:
        return None


def available(device: str = "cpu") -> bool:
    """Whether a device has kernels that can run, and they are not turned off."""
    return _ENABLED.get() and _kernels(device) is not None


def advice() -> str | None:
    """What to install for the fused kernels; None if they are there, or not wanted."""
    if _kernels() is not None or not _ENABLED.get():
        return None
    return "merging runs without its fused CPU kernels, which need numba: pip install 'tokenmerge[fast]'"


def applies(rule: PairRule, view: View) -> bool:
    """Whether the kernels can decide and merge in this layer, with the same result as rule(view), if they are `available`.
    They know two rules; one that is derived from them may decide in another way."""
    tokens = view.tokens
    x, k = tokens.x, view.k
    if type(rule) is ThresholdRule:
        known = tokens.packed if tokens.ragged and rule.batch == "each" else not tokens.ragged
    else:
        known = type(rule) is TopRule and not tokens.ragged
    (b, n), device = tokens.size.shape, x.device.type
    few = (n // 2 + 1) ** 2 <= MAX_COSINES if device == "cpu" else n < 2048 and b * n**2 < 2**27
    return (
        known
        and few
        and (device != "cpu" or _pays(rule, x))
        and x.dtype != torch.float64
        and type(x) is Tensor
        and type(k) is Tensor
        and b > 0
        and not (torch.is_grad_enabled() and (x.requires_grad or k.requires_grad))
        and not torch.is_autocast_enabled(device)
        and not _operators_are_watched()
    )


def _pays(rule: PairRule, x: Tensor) -> bool:
    """Whether the CPU kernels, which run in one thread, are faster than PyTorch (benchmarks/kernels.py, with two threads).
    Weights, and images that merge different numbers of tokens, need many operators in PyTorch."""
    costly = rule.size_weight > 0 or rule.attention_weight > 0 or (isinstance(rule, ThresholdRule) and rule.batch == "each")
    return x.numel() * torch.get_num_threads() <= (2**24 if costly else 2**21)


def _operators_are_watched() -> bool:
    """Whether someone counts, fakes, maps or records the operators of PyTorch, which the kernels are not."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return bool(modes or torch._C._are_functorch_transforms_active() or torch._C._is_tracing())


def _empty(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)  # whatever the default is


def _array(t: Tensor) -> Any:
    """A contiguous float32 array; shared with the tensor where that is possible."""
    if t.requires_grad:
        t = t.detach()
    if t.dtype != torch.float32:
        t = t.float()
    return (t if t.is_contiguous() else t.contiguous()).numpy()


def _flat(t: Tensor) -> tuple[Any, tuple[int, ...]]:
    """Queries or keys [B,H,N,d] as a flat float32 array, and their strides."""
    if t.requires_grad:
        t = t.detach()
    if t.dtype != torch.float32:
        t = t.float()
    if t.stride(-1) != 1:
        t = t.contiguous()
    (b, h, n, d), strides = t.shape, t.stride()
    extent = (b - 1) * strides[0] + (h - 1) * strides[1] + (n - 1) * strides[2] + d
    return t.as_strided((extent,), (1,)).numpy(), strides


class _Match(NamedTuple):
    """What the first two kernels found, as arrays."""

    x: Any  # [rows,C]
    size: Any  # [B,N]
    lengths: Any  # [B]; empty where all images have the same number of tokens
    source: Any  # [B,S] positions
    target: Any  # [B,T] positions
    best: Any  # [B,S] index into the targets
    top: Any  # [B,S] score of the best target
    chosen: Any  # [B,S] bool: pairs that merge
    merged: Any  # [B] their number


def select_and_merge(rule: PairRule, view: View) -> tuple[Tokens, Assignment | None]:
    """The tokens after the merge, and the decision; None if nothing merges. `applies` must hold."""
    if view.tokens.x.is_cuda:
        return _kernels("cuda").select_and_merge(rule, view)
    match = _match(rule, view)
    if match is None:
        return view.tokens, None
    if view.ledger is not None:
        split = (split_by_size if rule.by_size else split_alternate)(view.tokens, view.prefix)
        dim = view.k.shape[3] if rule.kind == "keys" else view.tokens.x.shape[-1]
        pairs = Pairs(split, torch.from_numpy(match.best), torch.from_numpy(match.top))
        view.record(pairs, split.compared(len(match.best)) * dim)
    return _merge(rule, view, match)


def _match(rule: PairRule, view: View) -> _Match | None:
    """Pair the tokens, and choose the pairs that merge; None if there is no pair."""
    kernels = _kernels()
    tokens, prefix, by_size, by_keys = view.tokens, view.prefix, rule.by_size, rule.kind == "keys"
    b, n = tokens.size.shape
    c = tokens.x.shape[-1]
    s, t = kernels.group_sizes(n, prefix, by_size)
    kind, theta, r = kernels.TOP, 0.0, 0
    if isinstance(rule, TopRule):
        r = min(rule.r, (n - prefix) // 2, s)
    elif isinstance(rule, ThresholdRule):
        kind, theta = (kernels.EACH if rule.batch == "each" else kernels.MEAN), float(rule.theta)
    if s <= 0 or t <= 0 or (kind == kernels.TOP and r <= 0):
        return None
    x, size = _array(tokens.x).reshape(-1, c), _array(tokens.size)
    lengths = NO_LENGTHS if tokens.lengths is None else np.array(tokens.lengths)

    kv_heads, width = view.k.shape[1], view.k.shape[3]
    k, stride_k = q, stride_q = NOTHING, NO_STRIDES
    factor, heads, scale = NO_FACTOR, 0, 1.0
    attention = view.attention
    if rule.attention_weight > 0:
        plain = attention.has_cls and attention.rope is None and attention.position_bias is None
        if plain and view.q is not None and view.q.dtype == torch.float32:  # in half precision, log size is rounded, too
            factor = np.empty((b, n), np.float32)
            q, stride_q = _flat(view.q)
            heads, scale = view.q.shape[1], attention.config.scale_for(width)
            if view.ledger is not None:
                view.record_cls_attention(heads)
        else:
            factor = _array(view.cls_attention().mean(1))
    if by_keys or heads:
        k, stride_k = _flat(view.k)
    dim = width if by_keys else c
    unit_source, unit_target = _empty(b, s, dim), _empty(b, t, dim)
    source, target = np.empty((b, s), np.int64), np.empty((b, t), np.int64)
    kernels.prepare(
        x, k, stride_k, kv_heads, q, stride_q, heads, width, scale, tokens.merged and attention.proportional, size, lengths,
        prefix, by_keys, by_size, rule.attention_weight / 2, unit_source.numpy(), unit_target.numpy(), source, target,
        factor,
    )  # fmt: skip

    best, top = np.empty((b, s), np.int64), np.empty((b, s), np.float32)
    chosen, merged = np.empty((b, s), np.bool_), np.empty(b, np.int64)
    size_weight = rule.size_weight if tokens.merged else 0.0
    step = MAX_COSINES // (s * t)
    for first in range(0, b, step):
        part = slice(first, first + step)
        whole = b <= step  # two calls fewer
        cosine = torch.bmm(unit_source if whole else unit_source[part], (unit_target if whole else unit_target[part]).mT)
        kernels.choose(
            cosine.numpy(), first, size, lengths, prefix, by_size, size_weight, factor, source, target, kind, theta, r, best,
            top, chosen, merged,
        )  # fmt: skip
    return _Match(x, size, lengths, source, target, best, top, chosen, merged)


def _merge(rule: PairRule, view: View, match: _Match) -> tuple[Tokens, Assignment | None]:
    tokens = view.tokens
    counts: list[int] = match.merged.tolist()
    if not any(counts):
        return tokens, None
    merged, decision = empty_merge(tokens, counts, torch.float32)
    _kernels().merge_rows(
        match.x, match.size, match.lengths, view.prefix, rule.by_size, match.source, match.target, match.best, match.chosen,
        match.merged, decision.order.numpy(), decision.into.numpy(), merged.x.numpy().reshape(-1, tokens.x.shape[-1]),
        merged.size.numpy(),
    )  # fmt: skip
    if tokens.x.dtype != torch.float32:
        merged = merged._replace(x=merged.x.to(tokens.x.dtype))
    return merged, decision
