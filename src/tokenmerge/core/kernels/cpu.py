"""Three numba kernels around one matrix product select and merge the tokens of a layer on a CPU: `prepare`, the product,
`choose`, `merge_rows`.

They do what matching.py and tokens.py do in PyTorch, for rules that pair each source with its best target. They run in one
thread, release the GIL, keep no state and start no threads, so that threads and forked processes may share a model.

x is [rows,C]: the tokens of all images, image after image. Queries and keys are flat arrays, with the strides of [B,H,N].
`lengths` [B] is the number of tokens of each image, where tokens are packed, else empty. The caller allocates the outputs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numba import njit

EACH, MEAN, TOP = 0, 1, 2  # pairs above θ per image; as many as the batch has on average; the r best pairs

f32 = np.float32


def _compile(function: Any = None, *, fast: bool = False) -> Any:
    """Compiled at the first call, and kept on disk where a cache can be written. `fast`: sums may be reordered, so that they
    vectorise. The other functions round as PyTorch does, operation by operation, so that equal cosines stay equal."""
    if function is None:
        return partial(_compile, fast=fast)
    options: dict[str, Any] = {"nogil": True, "fastmath": {"reassoc", "contract", "nsz"} if fast else False}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package nor the home directory is writable
        return njit(**options)(function)


@_compile
def group_sizes(n, prefix, by_size):
    """Number of sources and of targets among n tokens."""
    if by_size:
        return (n - prefix) // 2, n - prefix - (n - prefix) // 2
    return (n + 1) // 2 - (prefix + 1) // 2, n // 2 - prefix // 2


@_compile
def _split(n, prefix, by_size, sizes, key, source, target):
    """Positions of the sources and the targets of one image; `key` is memory to work in."""
    if not by_size:
        for i, position in enumerate(range(prefix + prefix % 2, n, 2)):
            source[i] = position
        for i, position in enumerate(range(prefix + 1 - prefix % 2, n, 2)):
            target[i] = position
        return
    for i in range(n - prefix):
        key[i] = sizes[prefix + i] + f32(i) / f32(sizes.shape[0] - prefix + 1)
    order = np.argsort(key[: n - prefix], kind="mergesort")
    half = (n - prefix) // 2
    for i in range(half):
        source[i] = prefix + order[i]
    for i in range(half, n - prefix):
        target[i - half] = prefix + order[i]


@_compile(fast=True)
def _cls_attention(q, at_q, stride_q, heads, k, at_k, stride_k, kv_heads, width, scale, sizes, logits, out):
    """Attention of the query at `at_q` to the keys from `at_k` on, the mean over the heads. `sizes` is empty where attention
    is not proportional; `logits` [H,≥count] is memory to work in."""
    count = out.shape[0]
    for i in range(count):
        bias = f32(math.log(sizes[i])) if sizes.shape[0] else f32(0)
        for h in range(heads):
            query = q[at_q + h * stride_q[1] :][:width]
            key = k[at_k + (h * kv_heads // heads) * stride_k[1] + i * stride_k[2] :][:width]
            dot = f32(0)
            for c in range(width):
                dot += query[c] * key[c]
            logits[h, i] = dot * f32(scale) + bias
    for i in range(count):
        out[i] = 0
    for h in range(heads):
        row = logits[h]
        highest = f32(-np.inf)
        for i in range(count):
            highest = max(highest, row[i])
        total = f32(0)
        for i in range(count):
            row[i] = math.exp(row[i] - highest)
            total += row[i]
        share = f32(1) / (total * f32(heads))
        for i in range(count):
            out[i] += row[i] * share


@_compile
def _mean_to_one(factor, prefix, n, power):
    """CLS attention → (attention with mean 1 over the patches)^power."""
    mean = f32(0)
    for i in range(prefix, n):
        mean += factor[i]
    mean /= f32(max(n - prefix, 1))
    mean = f32(1e-12) if mean < f32(1e-12) else mean  # NaN stays
    for i in range(n):
        factor[i] = math.pow(factor[i] / mean, f32(power))


@_compile
def _mean_key(k, first, head_stride, kv_heads, out):
    """A key, averaged over heads. (Slices: with a computed index into the flat array, the compiler would not vectorise.)"""
    dim = out.shape[0]
    part = k[first:][:dim]
    for c in range(dim):
        out[c] = part[c]
    for h in range(1, kv_heads):
        part = k[first + h * head_stride :][:dim]
        for c in range(dim):
            out[c] += part[c]
    for c in range(dim):
        out[c] /= f32(kv_heads)


@_compile
def _normalise(x):
    """Divide by the norm, which is added up in eight lanes, as `torch.linalg.vector_norm` does it."""
    whole = x.shape[0] // 8 * 8
    a = b = c = d = e = f = g = h = f32(0)
    for i in range(0, whole, 8):
        part = x[i : i + 8]
        a += part[0] * part[0]
        b += part[1] * part[1]
        c += part[2] * part[2]
        d += part[3] * part[3]
        e += part[4] * part[4]
        f += part[5] * part[5]
        g += part[6] * part[6]
        h += part[7] * part[7]
    total = a + b + c + d + e + f + g + h
    for i in range(whole, x.shape[0]):
        total += x[i] * x[i]
    norm = f32(math.sqrt(total))
    norm = f32(1e-12) if norm < f32(1e-12) else norm  # NaN stays
    for i in range(x.shape[0]):
        x[i] /= norm


@_compile
def prepare(
    x, k, stride_k, kv_heads, q, stride_q, heads, width, scale, proportional, size, lengths, prefix, by_keys, by_size,
    power, unit_source, unit_target, source, target, factor,
):  # fmt: skip
    """Split the patches of each image into sources [B,S] and targets [B,T], and write their unit vectors [B,S,D], [B,T,D].
    `factor` [B,N], where it is not empty, becomes (CLS attention with mean 1 over the patches)^power; with heads = 0 it
    holds the CLS attention already."""
    packed = lengths.shape[0] > 0
    longest = size.shape[1]
    work = np.empty(longest, np.float32)
    logits = np.empty((heads, longest), np.float32)
    start = 0
    for b in range(size.shape[0]):
        n = lengths[b] if packed else longest
        _split(n, prefix, by_size, size[b], work, source[b], target[b])
        sources, targets = group_sizes(n, prefix, by_size)
        at_k = start * stride_k[2] if packed else b * stride_k[0]
        for j in range(sources + targets):
            if j < sources:
                position = source[b, j]
                out = unit_source[b, j]
            else:
                position = target[b, j - sources]
                out = unit_target[b, j - sources]
            if by_keys:
                _mean_key(k, at_k + position * stride_k[2], stride_k[1], kv_heads, out)
            else:
                token = x[start + position]
                for c in range(out.shape[0]):
                    out[c] = token[c]
            _normalise(out)
        if factor.shape[0]:
            if heads:
                at_q = start * stride_q[2] if packed else b * stride_q[0]
                sizes = size[b, :n] if proportional else size[b, :0]
                _cls_attention(
                    q, at_q, stride_q, heads, k, at_k, stride_k, kv_heads, width, scale, sizes, logits, factor[b, :n]
                )
            _mean_to_one(factor[b], prefix, n, power)
        start += n


@_compile
def _size_weights(inverse, inverses, power, out):
    """(1/2n + 1/2m)^−p of one source and all targets."""
    if power == 0.5:
        for j in range(out.shape[0]):
            out[j] = f32(1) / math.sqrt(inverse + inverses[j])
    else:
        for j in range(out.shape[0]):
            out[j] = math.pow(inverse + inverses[j], f32(-power))


@_compile
def _best(row):
    """The highest score, and the first target that has it. NaN counts as the highest."""
    top, at = f32(-np.inf), 0
    for j in range(row.shape[0]):
        value = row[j]
        if value > top:
            top, at = value, j
        elif math.isnan(value):
            return value, j
    return min(top, f32(1)), at  # rounding may exceed 1, and a threshold of 1 means never


@_compile
def _best_targets(cosine, size, size_weight, factor, source, target, best, top):
    """The best target of each source of one image, by the cosines [S,T]. `factor` is empty without attention weight."""
    sources, targets = cosine.shape
    inverse = np.empty(targets, np.float32)  # 1/2m of each target, and 2nm/(n+m) is 1/(1/2n + 1/2m)
    alone = np.ones(targets, np.float32)  # weights of sources of size 1, which are most of them
    other = np.ones(targets, np.float32)
    attention = np.ones(targets, np.float32)
    row = np.empty(targets, np.float32)
    for j in range(targets):
        inverse[j] = f32(0.5) / max(size[target[j]], f32(1))
        if factor.shape[0]:
            attention[j] = factor[target[j]]
    if size_weight > 0:
        _size_weights(f32(0.5), inverse, size_weight, alone)
    last = f32(0)
    for i in range(sources):
        weight = alone
        if size_weight > 0:
            own = f32(0.5) / max(size[source[i]], f32(1))
            if own != f32(0.5):
                weight = other
                if own != last:
                    _size_weights(own, inverse, size_weight, other)
                    last = own
        elif not factor.shape[0]:
            top[i], best[i] = _best(cosine[i])
            continue
        own_factor = factor[source[i]] if factor.shape[0] else f32(1)
        score = cosine[i]
        for j in range(targets):
            row[j] = (score[j] - f32(1)) * (weight[j] * (own_factor * attention[j])) + f32(1)
        top[i], best[i] = _best(row)


@_compile
def choose(
    cosine, first, size, lengths, prefix, by_size, size_weight, factor, source, target, rule, theta, r, best, top, chosen,
    merged,
):  # fmt: skip
    """Find the best target of each source by the cosines [images,S,T] of the images from `first` on. After the last image,
    choose the pairs that merge, and count them per image."""
    for image in range(cosine.shape[0]):
        b = first + image
        n = lengths[b] if lengths.shape[0] else size.shape[1]
        sources, targets = group_sizes(n, prefix, by_size)
        for i in range(sources if targets else 0, top.shape[1]):  # no such pair in this image
            top[b, i], best[b, i] = f32(-np.inf), 0
        if targets:
            own = factor[b] if factor.shape[0] else np.empty(0, np.float32)
            seen = cosine[image, :sources, :targets]
            _best_targets(seen, size[b], size_weight, own, source[b], target[b], best[b], top[b])
    if first + cosine.shape[0] == top.shape[0]:
        _choose(top, rule, theta, r, chosen, merged)


@_compile
def _choose(top, rule, theta, r, chosen, merged):
    """The pairs that merge, [B,S], and their number, [B]."""
    images, sources = top.shape
    if rule != TOP:
        threshold = f32(theta)
        total = 0
        for b in range(images):
            merged[b] = 0
            for i in range(sources):
                chosen[b, i] = top[b, i] > threshold
                merged[b] += chosen[b, i]
            total += merged[b]
        if rule == EACH or images == 1:
            return
        r = total // images
    negative = np.empty(sources, np.float32)
    for b in range(images):
        for i in range(sources):
            negative[i] = f32(np.inf) if math.isnan(top[b, i]) else -top[b, i]
            chosen[b, i] = False
        order = np.argsort(negative, kind="mergesort")  # ties go by position
        for i in range(r):
            chosen[b, order[i]] = True
        merged[b] = r


@_compile
def _order(n, prefix, source, target, chosen, merged, order):
    """The positions of one image that remain, in their new order: prefix, the sources that stay, the targets. An image that
    merges nothing keeps the order of its tokens."""
    if merged == 0:
        for i in range(n):
            order[i] = i
        return
    for i in range(prefix):
        order[i] = i
    row = prefix
    for i in range(source.shape[0]):
        if not chosen[i]:
            order[row] = source[i]
            row += 1
    for j in range(target.shape[0]):
        order[row + j] = target[j]


@_compile
def _merge_image(x, size, source, target, best, chosen, first, joined, into, out, out_size):
    """Merge the chosen pairs of one image. The tokens that remain are in `out` already, the targets from row `first` on. The
    positions that join go to `joined`, and the rows that they join to `into`."""
    for i in range(source.shape[0]):
        if chosen[i]:
            out_size[first + best[i]] += size[source[i]]
    join = 0
    for i in range(source.shape[0]):
        if chosen[i]:
            row = first + best[i]
            joined[join], into[join] = source[i], row
            join += 1
            fraction = size[source[i]] / out_size[row]
            goal, token, other = out[row], x[source[i]], x[target[best[i]]]
            for c in range(goal.shape[0]):
                goal[c] += fraction * (token[c] - other[c])


@_compile
def merge_rows(x, size, lengths, prefix, by_size, source, target, best, chosen, merged, order, into, out, out_size):
    """Merge the chosen pairs. `order` and `into`: see Assignment. `out` [rows,M] and `out_size` [B,M] are the tokens after
    the merge."""
    grid = size.shape[1]
    start = row = join = 0
    for b in range(size.shape[0]):
        n = lengths[b] if lengths.shape[0] else grid
        sources, targets = group_sizes(n, prefix, by_size)
        left = n - merged[b]
        tokens, kept = x[start : start + n], order[row : row + left]
        image, image_size = out[row : row + left], out_size[b]
        _order(n, prefix, source[b, :sources], target[b, :targets], chosen[b], merged[b], kept)
        for i in range(left):
            image_size[i] = size[b, kept[i]]
            goal, token = image[i], tokens[kept[i]]
            for c in range(goal.shape[0]):
                goal[c] = token[c]
        for i in range(left, image_size.shape[0]):
            image_size[i] = 0
        if merged[b]:
            joined, rows = order[out.shape[0] + join :][: merged[b]], into[join : join + merged[b]]
            _merge_image(
                tokens, size[b], source[b, :sources], target[b, :targets], best[b], chosen[b], left - targets, joined, rows,
                image, image_size,
            )  # fmt: skip
            for i in range(merged[b]):
                joined[i] += b * grid
                rows[i] += row
        for i in range(left):
            kept[i] += b * grid
        start += n
        row += left
        join += merged[b]
