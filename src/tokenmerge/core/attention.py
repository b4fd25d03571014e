"""Proportional attention, softmax(QKᵀ·scale + log size), for tokens that may be merged, packed or padded.

log size is an additive mask of one row per image: on a CPU that costs 1–6 % of the attention, while folding it into an
extra channel of the keys takes 1.3 to 2.2 times as long (docs/speed.md). Kernels for packed sequences take no mask: there
it is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .tokens import DROPPED, Assignment, KeyMask, Tokens, padded_rows, unpack_rows

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # older torch
    varlen_attn = None  # type: ignore[assignment]


# On a CPU, packed images attend in one padded call if there are this many of them, if each is this small (multiplications),
# and if padding adds no more than this; else each in a call of its own (benchmarks/ragged_attention.py).
PADDED_IMAGES = 16
PADDED_WORK = 2**18
PADDED_RATIO = 2.0


class AttentionConfig(NamedTuple):
    """How a block computes attention: the arguments of scaled_dot_product_attention."""

    scale: float | None = None  # None: 1/√d
    dropout_p: float = 0.0
    enable_gqa: bool = False

    def scale_for(self, width: int) -> float:
        return width**-0.5 if self.scale is None else self.scale


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast would compute a product of float32 matrices in half precision."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, config: AttentionConfig) -> Tensor:
    """Attention over tokens that are not packed, [B,H,Q,d]."""
    out = F.scaled_dot_product_attention(
        q, k, v, bias, dropout_p=config.dropout_p, scale=config.scale, enable_gqa=config.enable_gqa
    )
    if bias is not None and bias.shape[1] > 1 and torch.compiler.is_compiling():
        # With a bias per head, exporters decompose attention into products whose result has other strides.
        return out.clone(memory_format=torch.contiguous_format)
    return out


class BlockAttention:
    """The attention of one block in one call, over `tokens`, those that enter the block: all of them are keys."""

    __slots__ = (
        "config", "has_cls", "merged_position_bias", "merged_rope", "position_bias", "prefix", "proportional", "rope",
        "rotate", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokens: Tokens,
        config: AttentionConfig,
        prefix: int,
        has_cls: bool = True,
        proportional: bool = True,
        rope: Any = None,
        rotate: Callable[[Tensor, Any], Tensor] | None = None,
        position_bias: Tensor | None = None,
    ) -> None:
        self.tokens = tokens
        self.config = config
        self.prefix = prefix
        self.has_cls = has_cls
        self.proportional = proportional
        self.rope = rope  # RoPE embeddings of the original patches, which the model hands to its blocks
        self.rotate = rotate  # applies RoPE embeddings to queries or keys [B,H,N,d]
        self.position_bias = position_bias  # of the original tokens, [1 or B,H,N0,N0], added to QKᵀ·scale
        # Now, and not when a method decides: RoPE and biases may be learnt, and decisions have no gradient.
        self.merged_rope = None if rope is None else self._merge_rope(tokens)
        self.merged_position_bias = None if position_bias is None else merge_position_bias(position_bias, tokens, tokens)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, queries: Tokens | None = None) -> Tensor:
        """Proportional attention, [B,H,Q,d]; of packed tokens, [1,H,ΣQ,d]. `queries`: the tokens that have a query, if not
        all do; where they are the prefix alone, q is [B,H,P,d] and gets no RoPE."""
        tokens = self.tokens
        asking = tokens if queries is None else queries
        if self.rope is not None:
            q = self._apply_rope(q, asking)
            k = self._apply_rope(k, tokens)
        config = self.config
        bias = self._bias(q.dtype)
        if self.position_bias is not None:
            rows = q.shape[2] if queries is None and not tokens.packed else None
            bias = self._add_position_bias(bias, q.dtype, asking, rows)
        if tokens.mask is not None:
            return self.apply_map(masked_map(q, k, bias, config, tokens.mask), v)
        if not tokens.packed and not asking.packed:
            return attend(q, k, v, bias, config)
        if not tokens.packed:  # queries of a ragged batch: keys are packed, too
            k, v = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (k, v))
        lengths = tokens.lengths or (tokens.size.shape[1],) * tokens.size.shape[0]
        return attend_packed(q, k, v, bias, lengths, config, asking.lengths or lengths)

    def prefix_tokens(self, values: Tensor) -> Tensor:
        """The prefix tokens of each image, [B,P,C]."""
        tokens = self.tokens
        if not tokens.packed:
            return values[:, : self.prefix]
        return tokens.take(values, tokens.positions[: self.prefix].expand(tokens.size.shape[0], -1))

    def map(self, q: Tensor, k: Tensor) -> Tensor:
        """The attention map, softmax(QKᵀ·scale + log size), [B,H,N,N]."""
        if self.rope is not None:
            q = self._apply_rope(q, self.tokens)
            k = self._apply_rope(k, self.tokens)
        bias = self._bias(q.dtype)
        if self.position_bias is not None:
            bias = self._add_position_bias(bias, q.dtype, self.tokens)
        return attention_map(q, k, bias, self.config)

    def apply_map(self, weights: Tensor, v: Tensor) -> Tensor:
        """weights · V, as attention does it."""
        weights = F.dropout(weights, self.config.dropout_p).to(v.dtype)
        return weights @ repeat_kv(v, weights.shape[1])

    def cls_row(self, q: Tensor | None, k: Tensor, project_q: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Attention of the CLS token to all tokens, [B,H,N] float32; in a model without one, the mean over the attention of
        all tokens. `project_q`: x → queries, where q is not computed yet."""
        tokens = self.tokens
        if q is None:
            assert project_q is not None
            q = project_q(self.prefix_tokens(tokens.x)[:, :1] if self.has_cls else tokens.x)
        elif self.has_cls and tokens.packed:
            q = q[0, :, list(tokens.starts)].transpose(0, 1).unsqueeze(2)  # [B,H,1,d]
        q = q[:, :, :1] if self.has_cls else self._unpack(self._apply_rope(q, tokens))
        keys = self._unpack(self._apply_rope(k, tokens))
        bias = self._bias(q.dtype, unpacked=True)
        if self.position_bias is not None:
            bias = self._add_position_bias(bias, q.dtype, tokens, q.shape[2])
        weights = attention_map(q, keys, bias, self.config)
        if self.has_cls:
            return weights[:, :, 0]
        valid = (tokens.size > 0).float()[:, None, :, None]
        return (weights * valid).sum(2) / tokens.num_tokens[:, None, None].clamp(min=1)

    def _unpack(self, x: Tensor) -> Tensor:
        """[1,H,ΣN,d] → [B,H,N,d] where tokens are packed."""
        lengths = self.tokens.lengths
        return x if not self.tokens.packed or lengths is None or x.shape[0] > 1 else _unpack(x, lengths)

    def _apply_rope(self, x: Tensor, tokens: Tokens) -> Tensor:
        """RoPE on queries or keys. Queries of the prefix alone, [B,H,P,d], get none."""
        if self.rope is None or self.rotate is None or x.shape[2] <= self.prefix:
            return x
        rope: Any = self.merged_rope if tokens is self.tokens else self._merge_rope(tokens)
        if not tokens.packed:
            return self.rotate(x, rope)
        if x.shape[0] > 1:
            return x
        parts = zip(tokens.starts, tokens.lengths or (), range(len(rope)), strict=True)
        rotated = [self.rotate(x[:, :, start : start + n], rope[b : b + 1, :, : n - self.prefix]) for start, n, b in parts]
        return torch.cat(rotated, 2)

    def _merge_rope(self, tokens: Tokens) -> Any:
        """RoPE embeddings of the patches [.., N0, D] → those of the merged tokens, the mean over each group.

        The mean of rotated keys of equal content is the key under the mean rotation: a merged token is in the middle of its
        group, and the wider the group, the weaker its position."""
        rope = self.rope
        if not tokens.merged:
            return rope
        while rope.ndim < 4:  # [N,D] and [H,N,D] are shared by the batch
            rope = rope.unsqueeze(0)
        owner = tokens.owner
        if tokens.parked is not None:
            owner = torch.where(owner < tokens.size.shape[1], owner, DROPPED)
        owner = owner[:, self.prefix :] - self.prefix  # dropped tokens stay below 0
        return group_mean(rope.expand(owner.shape[0], -1, -1, -1), owner, tokens.size.shape[1] - self.prefix)

    def _add_position_bias(
        self, bias: Tensor | None, dtype: torch.dtype, queries: Tokens, rows: int | None = None
    ) -> Tensor:
        """The position bias of these queries, or of the first `rows` of them, plus `bias`, [B,H,Q,N]."""
        assert self.position_bias is not None
        if queries is self.tokens:
            found: Any = self.merged_position_bias
        else:
            found = merge_position_bias(self.position_bias, queries, self.tokens)
        if rows is not None:
            found = found[:, :, :rows]
        found = found.to(dtype)
        return found if bias is None else found + bias

    def _bias(self, dtype: torch.dtype, unpacked: bool = False) -> Tensor | None:
        """log size for the keys, −inf for padding, [B,1,1,N]; None while every token has size 1. `unpacked`: also where
        packed tokens have been unpacked."""
        tokens = self.tokens
        padded = tokens.ragged and (unpacked or not tokens.packed)
        if not tokens.merged or not (self.proportional or padded):
            return None
        bias = tokens.size.log()
        if not self.proportional:
            bias = bias.clamp(max=0)
        return bias[:, None, None, :].to(dtype)


def merge_map(weights: Tensor, tokens: Tokens, decision: Assignment) -> Tensor:
    """Merge an attention map with its tokens, [B,H,N,N] → [B,H,M,M]: keys that become one receive the sum of the attention,
    queries that become one get the mean of theirs, weighted like the tokens. No token may be dropped, and all images must
    keep the same number."""
    b, h, n, _ = weights.shape
    m = decision.length
    position = decision.rows(b * n).reshape(b, n) - m * torch.arange(b, device=weights.device).unsqueeze(1)
    weight = tokens.size.reshape(-1).index_select(0, decision.order) if decision.weight is None else decision.weight
    weight = weight.new_zeros(b * n).index_copy(0, decision.order, weight).reshape(b, n)
    total = weight.new_zeros(b, m).scatter_add(1, position, weight)
    columns = position[:, None, None, :].expand(b, h, n, n)
    weights = weights.new_zeros(b, h, n, m).scatter_add(3, columns, weights) * weight[:, None, :, None]
    rows = position[:, None, :, None].expand(b, h, n, m)
    return weights.new_zeros(b, h, m, m).scatter_add(2, rows, weights) / total[:, None, :, None]


def merge_position_bias(bias: Tensor, queries: Tokens, keys: Tokens) -> Tensor:
    """A position bias of the original tokens [1 or B,H,N0,N0] → that of merged ones [B,H,Q,K]: the mean over the members of
    both groups. It is exact where members agree; in the padding of shorter images it is 0."""
    for tokens in (queries, keys):  # rows first, then columns
        if tokens.merged:
            owner = tokens.owner
            if tokens.parked is not None:
                owner = torch.where(owner < tokens.size.shape[1], owner, DROPPED)
            bias = group_mean(bias.expand(owner.shape[0], -1, -1, -1), owner, tokens.size.shape[1])
        bias = bias.transpose(2, 3)
    return bias


def group_mean(values: Tensor, owner: Tensor, length: int) -> Tensor:
    """Mean over the original tokens of each of `length` tokens: values [B,H,N0,D], owner [B,N0] → [B,H,length,D]."""
    b, h, _, d = values.shape
    if not torch.compiler.is_compiling() and length == 0:  # all of them were dropped
        return values.new_zeros(b, h, 0, d)
    kept = (owner >= 0).to(values.dtype)[:, None, :, None]
    index = owner.clamp(min=0)[:, None, :, None]
    total = values.new_zeros(b, h, length, d).scatter_add(2, index.expand(b, h, -1, d), values * kept)
    count = values.new_zeros(b, 1, length, 1).scatter_add(2, index, kept.expand(b, 1, -1, 1))
    return total / count.clamp(min=1)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Sequence[int],
    config: AttentionConfig,
    query_lengths: Sequence[int] | None = None,
) -> Tensor:
    """Packed images: k, v [1,H,ΣN,d], bias [B,1,1,N] or [B,H,Q,N] padded; q [1,H,ΣQ,d] with `query_lengths` queries per
    image (None: as many as keys), or [B,H,Q,d] with the same number of queries for each image. The result has the shape of
    q."""
    packed = len(q) == 1
    queries = (query_lengths or lengths) if packed else (q.shape[2],) * len(q)
    half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    per_key = bias is None or bias.shape[1:3] == (1, 1)  # what can be folded into the keys
    if half and per_key and varlen_attn is not None and not config.dropout_p:
        return _varlen(q, k, v, bias, lengths, config, queries)
    if _pads(q, queries, lengths):
        return _padded(q, k, v, bias, lengths, config, queries)
    # Split once: slices of their own would cost a tenth of the attention of small images.
    ones = [1] * len(lengths)
    parts = zip(
        q.split_with_sizes(list(queries), 2) if packed else q.split_with_sizes(ones),
        k.split_with_sizes(list(lengths), 2),
        v.split_with_sizes(list(lengths), 2),
        [None] * len(lengths) if bias is None else bias.split_with_sizes(ones),
        lengths,
        strict=True,
    )
    outs = []
    for q_b, k_b, v_b, bias_b, n in parts:
        out = F.scaled_dot_product_attention(
            q_b, k_b, v_b, None if bias_b is None else _of_image(bias_b, q_b.shape[2], n),
            dropout_p=config.dropout_p, scale=config.scale, enable_gqa=config.enable_gqa,
        )  # fmt: skip
        outs.append(out.transpose(1, 2))  # so that the parts are contiguous without another copy
    return torch.cat(outs, 1 if packed else 0).transpose(1, 2)


def _of_image(bias: Tensor, queries: int, keys: int) -> Tensor:
    """The bias of one image [1,1 or H,1 or Q,N] without the padding of the batch."""
    bias = bias.narrow(3, 0, keys)
    return bias if bias.shape[2] == 1 else bias.narrow(2, 0, queries)


def _pads(q: Tensor, queries: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether one padded call is faster than a call per image."""
    most = max(queries) * max(lengths)
    work = sum(a * b for a, b in zip(queries, lengths, strict=True))
    small = q.shape[1] * q.shape[3] * most <= PADDED_WORK
    return small and len(lengths) >= PADDED_IMAGES and len(lengths) * most <= PADDED_RATIO * work


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    lengths: Sequence[int],
    config: AttentionConfig,
    queries: Sequence[int],
) -> Tensor:
    """One call for all images, padded to the longest."""
    packed = len(q) == 1
    columns = torch.arange(max(lengths), device=q.device)
    padding = (columns >= torch.tensor(lengths, device=q.device).unsqueeze(1))[:, None, None]
    mask = q.new_zeros(padding.shape) if bias is None else bias[..., : max(queries), : len(columns)]
    mask = mask.masked_fill(padding, -torch.inf)
    out = F.scaled_dot_product_attention(
        _unpack(q, queries) if packed else q, _unpack(k, lengths), _unpack(v, lengths), mask,
        dropout_p=config.dropout_p, scale=config.scale, enable_gqa=config.enable_gqa,
    )  # fmt: skip
    if not packed:
        return out
    rows = padded_rows(queries, out.shape[2], out.device)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, rows).unsqueeze(0).transpose(1, 2)


def _unpack(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """[1,H,ΣN,d] → [B,H,N,d]."""
    return unpack_rows(x[0].transpose(0, 1), lengths).transpose(1, 2)


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


def masked_map(q: Tensor, k: Tensor, bias: Tensor | None, config: AttentionConfig, mask: KeyMask) -> Tensor:
    """The attention map with masked keys, [B,H,Q,N] in float32; see KeyMask. Gradients pass through the mask."""
    n, queries = k.shape[2], q.shape[2]
    with without_autocast(q.device.type):
        logits = (q.float() * config.scale_for(q.shape[-1])) @ repeat_kv(k.float(), q.shape[1]).transpose(-2, -1)
        logits = logits if bias is None else logits + bias
        stays = mask.weight[:, None, None, :]
        itself = torch.eye(queries, n, device=q.device)
        e = (logits - logits.amax(-1, keepdim=True).detach()).exp() * (stays + (1 - stays) * itself)
        return (e + mask.epsilon / n) / (e.sum(-1, keepdim=True) + mask.epsilon)


def partial_qkv(weight: Tensor, bias: Tensor | None, x: Tensor, parts: str) -> dict[str, Tensor]:
    """Some of the three equal parts q, k, v of a fused projection, by those rows of its weight alone. The parts must be
    neighbours, so that the rows are."""
    width = weight.shape[0] // 3
    first = width * "qkv".index(parts)
    rows = slice(first, first + width * len(parts))
    out = F.linear(x, weight[rows], None if bias is None else bias[rows])
    return dict(zip(parts, out.chunk(len(parts), -1), strict=True))


HOOK_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_plain_linear(module: Any) -> bool:
    """Whether rows of the weight may be used without calling the module: no adapter, no quantisation, no hook."""
    plain = type(module) is nn.Linear and type(module.weight) is nn.Parameter
    return plain and not any(getattr(module, kind) for kind in HOOK_KINDS)


def fused_projection(linear: nn.Module, x: Tensor, parts: str) -> dict[str, Tensor]:
    """Those of queries, keys and values that are asked for, [B,N,H·d] each, from one layer for all three."""
    if parts != "qkv" and is_plain_linear(linear):
        weight: Any = linear.weight
        bias: Any = linear.bias
        return partial_qkv(weight, bias, x, parts)
    return dict(zip("qkv", linear(x).chunk(3, -1), strict=True))


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
