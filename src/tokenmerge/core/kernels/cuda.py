"""The same on CUDA, in Triton: at most seven kernels and one matrix product per merging layer, and one host–device sync
where the number of merges depends on the images.

Not timed on hardware: the tests run these kernels in Triton's interpreter and compare them with the reference. Scores are
added up in another order than by PyTorch, so cosines that are equal up to the last bit may be ordered in another way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..matching import PairRule, Pairs, ThresholdRule, TopRule, View, split_alternate, split_by_size
from ..tokens import Assignment, Tokens, empty_merge

ROWS = 16  # tokens that one program compares or normalises
BLOCK = 64  # tokens that they are compared with at a time


@triton.jit
def _length(lengths, b, n, ragged: tl.constexpr):
    """Tokens of image b."""
    return tl.load(lengths + b).to(tl.int32) if ragged else n


@triton.jit
def _start(lengths, b, n, images, ragged: tl.constexpr, images_block: tl.constexpr):
    """The row of x at which image b begins."""
    if ragged:
        index = tl.arange(0, images_block)
        return tl.sum(tl.load(lengths + index, mask=index < b, other=0).to(tl.int64), 0)
    else:
        return tl.cast(b, tl.int64) * n


@triton.jit
def _group_sizes(n, prefix, by_size: tl.constexpr):
    """Number of sources and of targets among n tokens."""
    if by_size:
        half = tl.maximum(n - prefix, 0) // 2
        return half, n - prefix - half
    else:
        return (n + 1) // 2 - (prefix + 1) // 2, n // 2 - prefix // 2


@triton.jit
def _is_nan(value):
    return value != value  # noqa: PLR0124


@triton.jit
def split_kernel(
    size, lengths, source, target, n, prefix, s, t, ragged: tl.constexpr, rows: tl.constexpr, block: tl.constexpr
):
    """The smaller half of the patches are sources, the larger half targets; ties go by position."""
    b = tl.program_id(0)
    i = tl.program_id(1) * rows + tl.arange(0, rows)
    count = _length(lengths, b, n, ragged) - prefix
    sizes = size + tl.cast(b, tl.int64) * n + prefix
    own = tl.load(sizes + i, mask=i < count, other=0)
    rank = tl.zeros([rows], tl.int32)
    for first in range(0, n - prefix, block):
        j = first + tl.arange(0, block)
        other = tl.load(sizes + j, mask=j < count, other=float("inf"))
        before = (other[None, :] < own[:, None]) | ((other[None, :] == own[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((before & (j < count)[None, :]).to(tl.int32), 1)
    half = count // 2
    position = (i + prefix).to(tl.int64)
    tl.store(source + tl.cast(b, tl.int64) * s + rank, position, mask=(i < count) & (rank < half))
    tl.store(target + tl.cast(b, tl.int64) * t + rank - half, position, mask=(i < count) & (rank >= half))


@triton.jit
def attention_kernel(
    q, k, size, lengths, logits, factor, n, images, prefix, heads, group, width, scale, power,
    qb, qh, qn, kb, kh, kn,
    ragged: tl.constexpr, proportional: tl.constexpr, images_block: tl.constexpr, width_block: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """factor [B,N] = (CLS attention, the mean over the heads, with mean 1 over the patches)^power; one program per image.
    `logits` [B,N] is memory to work in."""
    b = tl.program_id(0)
    count = _length(lengths, b, n, ragged)
    start = _start(lengths, b, n, images, ragged, images_block)
    image = tl.cast(b, tl.int64)
    first_q = start * qn if ragged else image * qb
    first_k = start * kn if ragged else image * kb
    c = tl.arange(0, width_block)
    for h in range(heads):
        query = tl.load(q + first_q + h * qh + c, mask=c < width, other=0).to(tl.float32) * scale
        keys = k + first_k + (h // group) * kh
        highest = tl.full([1], float("-inf"), tl.float32)
        for first in range(0, count, block):
            i = first + tl.arange(0, block)
            mask = (i < count)[:, None] & (c < width)[None, :]
            key = tl.load(keys + i[:, None].to(tl.int64) * kn + c[None, :], mask=mask, other=0).to(tl.float32)
            score = tl.sum(key * query[None, :], 1)
            if proportional:
                bias = tl.log(tl.load(size + image * n + i, mask=i < count, other=1))
                score += bias.to(q.dtype.element_ty).to(tl.float32)  # rounded as the mask of attention is
            tl.store(logits + image * n + i, score, mask=i < count)
            highest = tl.maximum(highest, tl.max(tl.where(i < count, score, float("-inf")), 0))
        tl.debug_barrier()  # other threads read what these wrote
        total = tl.zeros([1], tl.float32)
        for first in range(0, count, block):
            i = first + tl.arange(0, block)
            score = tl.load(logits + image * n + i, mask=i < count, other=float("-inf"))
            total += tl.sum(tl.exp(score - highest), 0)
        for first in range(0, count, block):
            i = first + tl.arange(0, block)
            score = tl.load(logits + image * n + i, mask=i < count, other=float("-inf"))
            before = tl.load(factor + image * n + i, mask=(i < count) & (h > 0), other=0)
            tl.store(factor + image * n + i, before + tl.exp(score - highest) / total / heads, mask=i < count)
        tl.debug_barrier()
    mean = tl.zeros([1], tl.float32)
    for first in range(0, count, block):
        i = first + tl.arange(0, block)
        mean += tl.sum(tl.load(factor + image * n + i, mask=(i >= prefix) & (i < count), other=0), 0)
    mean = tl.maximum(mean / tl.maximum(count - prefix, 1), 1e-12)
    for first in range(0, count, block):
        i = first + tl.arange(0, block)
        value = tl.load(factor + image * n + i, mask=i < count, other=1) / mean
        tl.store(factor + image * n + i, tl.exp(power * tl.log(value)), mask=i < count)


@triton.jit
def prepare_kernel(
    values, lengths, source, target, unit_source, unit_target, n, images, prefix, s, t, dim, heads, vb, vh, vn,
    ragged: tl.constexpr, by_size: tl.constexpr, images_block: tl.constexpr, dim_block: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Unit vectors of the sources [B,S,D] and the targets [B,T,D]; of keys, the mean over the heads. Where groups alternate,
    their positions are written, too."""
    b = tl.program_id(0)
    image = tl.cast(b, tl.int64)
    j = tl.program_id(1) * rows + tl.arange(0, rows)
    sources, targets = _group_sizes(_length(lengths, b, n, ragged), prefix, by_size)
    is_source = j < s
    at = tl.where(is_source, j, j - s)
    valid = tl.where(is_source, at < sources, at < targets) & (j < s + t)
    if by_size:
        position = tl.load(source + image * s + at, mask=valid & is_source, other=0)
        position += tl.load(target + image * t + at, mask=valid & (j >= s), other=0)
    else:
        position = tl.where(is_source, prefix + prefix % 2, prefix + 1 - prefix % 2) + 2 * at
        tl.store(source + image * s + at, position.to(tl.int64), mask=valid & is_source)
        tl.store(target + image * t + at, position.to(tl.int64), mask=valid & (j >= s))
    first = _start(lengths, b, n, images, ragged, images_block) * vn if ragged else image * vb
    c = tl.arange(0, dim_block)
    mask = valid[:, None] & (c < dim)[None, :]
    pointer = values + first + position.to(tl.int64)[:, None] * vn + c[None, :]
    unit = tl.zeros([rows, dim_block], tl.float32)
    for h in range(heads):
        unit += tl.load(pointer + h * vh, mask=mask, other=0).to(tl.float32)
    unit /= heads
    norm = tl.sqrt(tl.sum(unit * unit, 1))
    unit = unit / tl.where(norm < 1e-12, 1e-12, norm)[:, None]
    to_source = unit_source + (image * s + at[:, None]) * dim + c[None, :]
    to_target = unit_target + (image * t + at[:, None]) * dim + c[None, :]
    tl.store(to_source, unit, mask=mask & is_source[:, None])
    tl.store(to_target, unit, mask=mask & (j >= s)[:, None])


@triton.jit
def best_kernel(
    cosine, size, factor, lengths, source, target, best, top, n, prefix, s, t, power,
    ragged: tl.constexpr, by_size: tl.constexpr, by_attention: tl.constexpr, size_weight: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The best target of each source, and its score."""
    b = tl.program_id(0)
    image = tl.cast(b, tl.int64)
    i = tl.program_id(1) * rows + tl.arange(0, rows)
    sources, targets = _group_sizes(_length(lengths, b, n, ragged), prefix, by_size)
    valid = i < sources
    position = tl.load(source + image * s + i, mask=valid, other=0)
    own = 0.5 / tl.maximum(tl.load(size + image * n + position, mask=valid, other=1), 1)
    highest = tl.full([rows], float("-inf"), tl.float32)
    at = tl.zeros([rows], tl.int32)
    for first in range(0, t, block):
        j = first + tl.arange(0, block)
        pair = valid[:, None] & (j < targets)[None, :]
        score = tl.load(cosine + (image * s + i[:, None]) * t + j[None, :], mask=pair, other=0)
        if size_weight or by_attention:
            other = tl.load(target + image * t + j, mask=j < targets, other=0)
            weight = tl.full([rows, block], 1, tl.float32)
            if size_weight:
                inverse = 0.5 / tl.maximum(tl.load(size + image * n + other, mask=j < targets, other=1), 1)
                weight = tl.exp(-power * tl.log(own[:, None] + inverse[None, :]))
            if by_attention:
                mine = tl.load(factor + image * n + position, mask=valid, other=1)
                theirs = tl.load(factor + image * n + other, mask=j < targets, other=1)
                weight = weight * (mine[:, None] * theirs[None, :])
            score = (score - 1) * weight + 1
        score = tl.where(_is_nan(score), float("inf"), score)  # NaN counts as the highest
        score = tl.where(pair, score, float("-inf"))
        better = tl.max(score, 1) > highest
        at = tl.where(better, first + tl.argmax(score, 1).to(tl.int32), at)
        highest = tl.maximum(highest, tl.max(score, 1))
    highest = tl.where(highest == float("inf"), float("nan"), tl.minimum(highest, 1))
    tl.store(best + image * s + i, at.to(tl.int64), mask=i < s)
    tl.store(top + image * s + i, tl.where(valid & (targets > 0), highest, float("-inf")), mask=i < s)


@triton.jit
def rank_kernel(top, rank, counts, s, theta, with_rank: tl.constexpr, s_block: tl.constexpr, rows: tl.constexpr):
    """The number of pairs above θ in each image, and the rank of each pair by its score: ties go by position, NaN last."""
    image = tl.cast(tl.program_id(0), tl.int64)
    j = tl.arange(0, s_block)
    score = tl.load(top + image * s + j, mask=j < s, other=float("-inf"))
    tl.store(counts + image, tl.sum((score > theta).to(tl.int64), 0))
    if with_rank:
        score = tl.where(_is_nan(score), float("-inf"), score)
        for first in range(0, s, rows):
            i = first + tl.arange(0, rows)
            own = tl.load(top + image * s + i, mask=i < s, other=float("-inf"))
            own = tl.where(_is_nan(own), float("-inf"), own)
            before = (score[None, :] > own[:, None]) | ((score[None, :] == own[:, None]) & (j[None, :] < i[:, None]))
            place = tl.sum((before & (j < s)[None, :]).to(tl.int32), 1)
            tl.store(rank + image * s + i, place, mask=i < s)


@triton.jit
def order_kernel(
    top, rank, counts, lengths, source, target, best, chosen, order, into, n, images, prefix, s, t, theta, r, rows,
    ragged: tl.constexpr, by_size: tl.constexpr, by_rank: tl.constexpr, images_block: tl.constexpr, s_block: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Which pairs merge, the new order of the tokens and the rows that tokens join; one program per image. An image that
    merges nothing keeps its order; in the others it is: prefix, the sources that stay, the targets."""
    b = tl.program_id(0)
    image = tl.cast(b, tl.int64)
    count = _length(lengths, b, n, ragged)
    sources, targets = _group_sizes(count, prefix, by_size)
    i = tl.arange(0, s_block)
    if by_rank:
        joins = (tl.load(rank + image * s + i, mask=i < s, other=s) < r) & (i < sources)
        join = image * r
    else:
        joins = tl.load(top + image * s + i, mask=i < s, other=float("-inf")) > theta
        index = tl.arange(0, images_block)
        join = tl.sum(tl.load(counts + index, mask=index < b, other=0), 0)
    row = _start(lengths, b, n, images, ragged, images_block) - join
    tl.store(chosen + image * s + i, joins.to(tl.int8), mask=i < s)
    merged = tl.sum(joins.to(tl.int32), 0)
    stay = (i < sources) & (joins == 0)
    stays = sources - merged
    grid = image * n
    moved = tl.where(merged > 0, targets, 0)
    for first in range(0, n, block):
        c = first + tl.arange(0, block)
        tl.store(order + row + c, grid + c, mask=c < tl.where(merged > 0, prefix, count))
        at = tl.load(target + image * t + c, mask=c < moved, other=0)
        tl.store(order + row + prefix + stays + c, grid + at, mask=c < moved)
    position = tl.load(source + image * s + i, mask=i < sources, other=0)
    place = tl.cumsum(stay.to(tl.int32), 0) - 1
    tl.store(order + row + prefix + place, grid + position, mask=stay & (i < tl.where(merged > 0, sources, 0)))
    place = tl.cumsum(joins.to(tl.int32), 0) - 1
    goal = tl.load(best + image * s + i, mask=joins, other=0)
    tl.store(order + rows + join + place, grid + position, mask=joins)
    tl.store(into + join + place, row + prefix + stays + goal, mask=joins)


@triton.jit
def merge_kernel(
    x, size, lengths, counts, source, best, chosen, order, out, out_size, n, m, images, prefix, s, r, channels,
    ragged: tl.constexpr, by_size: tl.constexpr, by_rank: tl.constexpr, images_block: tl.constexpr, s_block: tl.constexpr,
    c_block: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One token after the merge per program: the token that keeps the row, pulled towards those that join it."""
    b = tl.program_id(0)
    image = tl.cast(b, tl.int64)
    index = tl.program_id(1)
    count = _length(lengths, b, n, ragged)
    start = _start(lengths, b, n, images, ragged, images_block)
    if by_rank:
        merged = r
        join = image * r
    else:
        merged = tl.load(counts + b).to(tl.int32)
        before = tl.arange(0, images_block)
        join = tl.sum(tl.load(counts + before, mask=before < b, other=0), 0)
    left = count - merged
    if index < left:
        sources, targets = _group_sizes(count, prefix, by_size)
        row = start - join + index
        position = tl.load(order + row) - image * n
        own = tl.load(size + image * n + position)
        goal = tl.where(merged > 0, index - (left - targets), -1)  # index of the target; below 0: no target
        i = tl.arange(0, s_block)
        mine = tl.load(chosen + image * s + i, mask=i < sources, other=0) != 0
        mine = mine & (tl.load(best + image * s + i, mask=i < sources, other=-2) == goal)
        others = tl.load(source + image * s + i, mask=mine, other=0)
        total = own + tl.sum(tl.load(size + image * n + others, mask=mine, other=0), 0)
        for first in range(0, channels, c_block):
            c = first + tl.arange(0, c_block)
            token = tl.load(x + (start + position) * channels + c, mask=c < channels, other=0).to(tl.float32)
            pull = tl.zeros([c_block], tl.float32)
            for from_source in range(0, tl.where(total > own, s, 0), block):
                j = from_source + tl.arange(0, block)
                joins = tl.load(chosen + image * s + j, mask=j < sources, other=0) != 0
                joins = joins & (tl.load(best + image * s + j, mask=j < sources, other=-2) == goal)
                at = tl.load(source + image * s + j, mask=joins, other=0)
                share = tl.load(size + image * n + at, mask=joins, other=0) / total
                mask = joins[:, None] & (c < channels)[None, :]
                value = tl.load(x + (start + at[:, None]) * channels + c[None, :], mask=mask, other=0).to(tl.float32)
                pull += tl.sum(tl.where(mask, share[:, None] * (value - token[None, :]), 0.0), 0)
            tl.store(out + row * channels + c, (token + pull).to(out.dtype.element_ty), mask=c < channels)
        tl.store(out_size + image * m + index, total)
    else:
        tl.store(out_size + image * m + index, 0.0)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Start one kernel. It rounds operation by operation, as PyTorch does."""
    kernel[grid](*args, **constants, enable_fp_fusion=False)


def on_host(counts: Tensor) -> list[int]:
    """The only host–device sync in a layer."""
    return counts.tolist()


def _lengths(tokens: Tokens) -> Tensor:
    """Tokens of each image on the device, without waiting for it; any tensor where all images have the same number."""
    if tokens.lengths is None:
        return tokens.positions
    lengths = torch.tensor(tokens.lengths, pin_memory=tokens.x.is_cuda)
    return lengths.to(tokens.x.device, non_blocking=True)


def select_and_merge(rule: PairRule, view: View) -> tuple[Tokens, Assignment | None]:
    """The tokens after the merge, and the decision; None if nothing merges. `applies` must hold."""
    tokens, prefix = view.tokens, view.prefix
    b, n = tokens.size.shape
    c = tokens.x.shape[-1]
    device = tokens.x.device
    if rule.by_size:
        s, t = (n - prefix) // 2, (n - prefix + 1) // 2
    else:
        s, t = (n + 1) // 2 - (prefix + 1) // 2, n // 2 - prefix // 2
    theta = rule.theta if isinstance(rule, ThresholdRule) else 0.0
    r = min(rule.r, (n - prefix) // 2, s) if isinstance(rule, TopRule) else 0
    if s <= 0 or t <= 0 or (isinstance(rule, TopRule) and r <= 0):
        return tokens, None
    x, size = tokens.x.detach().reshape(-1, c).contiguous(), tokens.size.contiguous()
    lengths = _lengths(tokens)
    ragged: dict[str, Any] = {"ragged": tokens.packed, "images_block": triton.next_power_of_2(b)}
    s_block = triton.next_power_of_2(s)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    source, target = empty(b, s, dtype=torch.int64), empty(b, t, dtype=torch.int64)
    if rule.by_size:
        launch(
            split_kernel, (b, triton.cdiv(n - prefix, ROWS)), size, lengths, source, target, n, prefix, s, t,
            ragged=tokens.packed, rows=ROWS, block=BLOCK,
        )  # fmt: skip
    factor = _attention_factor(rule, view, size, lengths, ragged)
    unit_source, unit_target = _unit_vectors(rule, view, x, lengths, source, target, ragged)
    cosine = torch.bmm(unit_source, unit_target.mT)
    best, top = empty(b, s, dtype=torch.int64), empty(b, s)
    size_weight = rule.size_weight if tokens.merged else 0.0
    launch(
        best_kernel, (b, triton.cdiv(s, ROWS)), cosine, size, size if factor is None else factor, lengths, source, target,
        best, top, n, prefix, s, t, size_weight, ragged=tokens.packed, by_size=rule.by_size, by_attention=factor is not None,
        size_weight=size_weight > 0, rows=ROWS, block=BLOCK,
    )  # fmt: skip
    if view.ledger is not None:
        split = (split_by_size if rule.by_size else split_alternate)(tokens, prefix)
        view.record(Pairs(split, best, top), split.compared(b) * unit_source.shape[-1])

    by_rank = isinstance(rule, TopRule) or (isinstance(rule, ThresholdRule) and rule.batch == "mean" and b > 1)
    counts, rank = empty(b, dtype=torch.int64), empty(b, s, dtype=torch.int32)
    launch(rank_kernel, (b,), top, rank, counts, s, theta, with_rank=by_rank, s_block=s_block, rows=ROWS)
    merged = [r] * b if isinstance(rule, TopRule) else on_host(counts)
    if by_rank:
        r = sum(merged) // b
        merged = [r] * b
    if not any(merged):
        return tokens, None
    after, decision = empty_merge(tokens, merged, x.dtype)
    m = decision.length
    chosen = empty(b, s, dtype=torch.int8)
    launch(
        order_kernel, (b,), top, rank, counts, lengths, source, target, best, chosen, decision.order, decision.into, n, b,
        prefix, s, t, theta, r, len(decision.kept), **ragged, by_size=rule.by_size, by_rank=by_rank, s_block=s_block,
        block=BLOCK,
    )  # fmt: skip
    launch(
        merge_kernel, (b, m), x, size, lengths, counts, source, best, chosen, decision.order, after.x, after.size, n, m, b,
        prefix, s, r, c, **ragged, by_size=rule.by_size, by_rank=by_rank, s_block=s_block,
        c_block=min(triton.next_power_of_2(c), 128), block=16,
    )  # fmt: skip
    return after, decision


def _attention_factor(rule: PairRule, view: View, size: Tensor, lengths: Tensor, ragged: dict[str, Any]) -> Tensor | None:
    """(CLS attention with mean 1 over the patches)^(q/2), [B,N]; None where attention has no weight."""
    if rule.attention_weight <= 0:
        return None
    attention, q, k = view.attention, view.q, view.k
    if q is None or attention.rope is not None or attention.position_bias is not None or not attention.has_cls:
        return view.attention_factor(rule.attention_weight)
    b, n = size.shape
    heads, width = q.shape[1], q.shape[-1]
    if view.ledger is not None:
        view.record_cls_attention(heads)
    q, k = (values if values.stride(-1) == 1 else values.contiguous() for values in (q.detach(), k.detach()))
    factor, logits = torch.empty_like(size), torch.empty_like(size)
    launch(
        attention_kernel, (b,), q, k, size, lengths, logits, factor, n, b, view.prefix, heads, heads // k.shape[1], width,
        attention.config.scale_for(width), rule.attention_weight / 2, *q.stride()[:3], *k.stride()[:3], **ragged,
        proportional=view.tokens.merged and attention.proportional, width_block=triton.next_power_of_2(width), block=BLOCK,
    )  # fmt: skip
    return factor


def _unit_vectors(
    rule: PairRule, view: View, x: Tensor, lengths: Tensor, source: Tensor, target: Tensor, ragged: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Unit vectors of the sources [B,S,D] and of the targets [B,T,D]."""
    n = view.tokens.size.shape[1]
    (b, s), t = source.shape, target.shape[1]
    if rule.kind == "keys":
        k = view.k.detach()
        values = k if k.stride(-1) == 1 else k.contiguous()
        heads, dim = values.shape[1], values.shape[3]
        strides = values.stride()[:3]
    else:
        values, heads, dim = x, 1, x.shape[1]
        strides = (n * dim, 0, dim)
    unit_source, unit_target = (torch.empty(b, count, dim, dtype=torch.float32, device=x.device) for count in (s, t))
    dim_block = triton.next_power_of_2(dim)
    rows = min(ROWS, max(1, 8192 // dim_block))  # as many as fit into registers
    launch(
        prepare_kernel, (b, triton.cdiv(s + t, rows)), values, lengths, source, target, unit_source, unit_target, n, b,
        view.prefix, s, t, dim, heads, *strides, **ragged, by_size=rule.by_size, dim_block=dim_block, rows=rows,
    )  # fmt: skip
    return unit_source, unit_target
