"""Multiply-accumulates of what ran. The paper's "GFLOPs" are multiply-accumulates, too.

`macs`: convolutions, linear layers, QKᵀ and AV, and what a method spends on deciding: comparisons, rows of attention.
`paper`: the same and one per element of a norm, which gives the paper's 1.25 / 4.60 / 17.57 for DeiT-T/S/B.
`fvcore`: the same and five per element, as that tool counts (MCTF, DynamicViT, ATS): 1.26 / 4.61 / 17.58.
`lvvit`: as LV-ViT's authors count, and the ATM paper for it: convolutions and blocks, with softmax, GELU, bias and norms,
but without heads and the final norm; 2.87 / 6.57 / 12.74 for LV-ViT-T/S/M.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .backbones.base import Backbone, BlockShape, norm_width
from .engine import Apart, CallRecord, LayerRecord
from .surgery import remove

Convention = Literal["macs", "paper", "fvcore", "lvvit"]
_NORMS = {"macs": 0, "paper": 1, "fvcore": 5}  # per element of a norm

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@dataclass(frozen=True)
class Cost:
    """Per image and layer, in MACs; the properties give means over images, in GMACs."""

    convention: Convention
    outside: Tensor  # [B] float64: embedding, final norm, pooling and head
    blocks: Tensor  # [L,B] float64, without matching
    matching: Tensor  # [L,B] float64
    unmerged: Tensor  # [B] float64: the same images through the host as it is

    @cached_property
    def per_image(self) -> Tensor:
        """[B] GMACs."""
        return (self.outside + self.blocks.sum(0) + self.matching.sum(0)) / 1e9

    @property
    def gmacs(self) -> float:
        return float(self.per_image.mean())

    @property
    def layers(self) -> list[float]:
        """Mean GMACs of each block, matching included."""
        return [float(v) / 1e9 for v in (self.blocks + self.matching).mean(1)]

    @property
    def matching_gmacs(self) -> float:
        """The share of `gmacs` spent on comparing tokens."""
        return float(self.matching.sum(0).mean()) / 1e9

    @property
    def unmerged_gmacs(self) -> float:
        return float(self.unmerged.mean()) / 1e9

    @property
    def ratio(self) -> float:
        """GMACs as a fraction of the unmerged host's."""
        return self.gmacs / self.unmerged_gmacs


def count_cost(
    model: nn.Module, calls: Sequence[CallRecord], convention: Convention, memo: dict[Any, float] | None = None
) -> Cost:
    """Add up what calls of a model did. The model need not be merged any more: its shapes are the same. `memo` keeps what
    was counted outside of the blocks, for the next time."""
    if convention not in get_args(Convention):
        raise ValueError(f"unknown convention {convention!r}; known: {', '.join(get_args(Convention))}")
    depth = max(max(call.layers) for call in calls)
    backbone = calls[0].backbone
    shapes = [backbone.shape(block) for block in backbone.blocks(model)]
    around = {} if memo is None else memo

    def outside(call: CallRecord, exit_tokens: int | None) -> float:
        key = (call.image, call.entry, exit_tokens, convention, call.options)
        if key not in around:
            around[key] = _outside(model, backbone, *key)
        return around[key]

    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for call in calls:
        n = call.layers[1].tokens_in.double().cpu()
        nothing = torch.zeros_like(n)
        ran = [call.layers.get(layer) for layer in range(1, depth + 1)]  # a call may have stopped early
        parts.append(
            (
                nothing + outside(call, None if call.last_layer == "full" else call.prefix),
                torch.stack([nothing if r is None else _layer(shapes[i], r, convention) for i, r in enumerate(ran)]),
                torch.stack([nothing if r is None else r.matching.double().cpu() for r in ran]),
                outside(call, None)
                + torch.stack([_block(shape, n, n, None, convention) for shape in shapes[: len(call.layers)]]).sum(0),
            )
        )
    rest, blocks, matching, unmerged = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    return Cost(convention, rest, blocks, matching, unmerged)


def _layer(shape: BlockShape, record: LayerRecord, convention: Convention) -> Tensor:
    return _block(shape, record.tokens_in.double().cpu(), record.tokens_out.double().cpu(), record.apart, convention)


def _block(shape: BlockShape, n: Tensor, m: Tensor, apart: Apart, convention: Convention) -> Tensor:
    """N tokens in, M after the merge: 4NC² + 2N²C + 2·ratio·MC² for a plain block. Queries or values that were computed
    apart are those of the M tokens that go on, and then only these leave attention."""
    q, v, out = (m if apart == "q" else n), (m if apart == "v" else n), (m if apart else n)
    macs = q * shape.query + n * shape.key + v * shape.value + out * shape.output + m * shape.mlp
    macs = macs + (q * n + out * v) * shape.attention
    if convention == "lvvit":
        hidden, heads = shape.mlp / (2 * shape.width), shape.attention / shape.head
        return macs + 10 * heads * q * n + 11 * shape.width * n + m * (9 * hidden + 11 * shape.width)
    elements = (n + m if apart else n) * shape.norm_in + q * shape.norm_query + n * shape.norm_key
    return macs + _NORMS[convention] * (elements + out * shape.norm_inner + m * shape.norm_out)


def _outside(
    model: nn.Module,
    backbone: Backbone,
    image: tuple[int, ...],
    entry: str,
    exit_tokens: int | None,
    convention: Convention,
    options: tuple[tuple[str, Any], ...],
) -> float:
    """Everything but the blocks, counted by running a weightless copy of the host on one imagined image."""
    shell = _skeleton(model)
    backbone.bypass(shell, exit_tokens)
    elements = 0

    def count(module: nn.Module, args: object, out: Tensor) -> None:
        nonlocal elements
        elements += out.numel()

    for module in shell.modules():
        if norm_width(module):
            module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        getattr(shell, entry)(torch.empty(1, *image, device="meta", dtype=next(shell.parameters()).dtype), **dict(options))
    if convention == "lvvit":
        return float(counter.get_flop_counts()["Global"].get(torch.ops.aten.convolution, 0) / 2)
    return float(counter.get_total_flops() / 2 + _NORMS[convention] * elements)


def _skeleton(model: nn.Module) -> Any:
    """A copy of the unmerged host on the meta device, without hooks; no weight is copied, the model is not touched."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = (
            nn.Parameter(tensor.to("meta"), requires_grad=False) if isinstance(tensor, nn.Parameter) else tensor.to("meta")
        )
    for module in model.modules():
        for name in _HOOKS:
            memo[id(getattr(module, name))] = OrderedDict()
    return remove(copy.deepcopy(model, memo)).eval()
