"""Multiply-accumulates (MACs) of what ran. The paper's "GFLOPs" are MACs, too.

`macs`: convolutions, linear layers, QKᵀ and AV, and the decisions of the method: comparisons, rows of attention.
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
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..backbones.base import Backbone, BlockCost
from ..backbones.helpers import norm_width
from .patch import remove
from .records import CallRecord, LateProjection, LayerRecord

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
    baseline: Tensor  # [B] float64: the same images through the baseline model

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
        """The part of `gmacs` spent on comparing tokens."""
        return float(self.matching.sum(0).mean()) / 1e9

    @property
    def baseline_gmacs(self) -> float:
        return float(self.baseline.mean()) / 1e9

    @property
    def ratio(self) -> float:
        """GMACs as a fraction of the baseline's."""
        return self.gmacs / self.baseline_gmacs


def count_cost(
    model: nn.Module, calls: Sequence[CallRecord], convention: Convention, memo: dict[Any, float] | None = None
) -> Cost:
    """Add up what calls of a model did. The model need not be merged any more: its shapes are the same. `memo` keeps what
    was counted outside the blocks, for the next time."""
    if convention not in get_args(Convention):
        raise ValueError(f"unknown convention {convention!r}; known: {', '.join(get_args(Convention))}")
    depth = max(max(call.layers) for call in calls)
    backbone = calls[0].backbone
    costs = [backbone.cost(block) for block in backbone.blocks(model)]
    memo = {} if memo is None else memo
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for call in calls:

        def outside(exit_tokens: int | None, call: CallRecord = call) -> float:
            return outside_macs(model, backbone, call.image, call.entry, exit_tokens, convention, call.options, memo)

        n = call.layers[1].tokens_in.double().cpu()
        zero = torch.zeros_like(n)
        ran = [call.layers.get(layer) for layer in range(1, depth + 1)]  # a call may have stopped early
        parts.append(
            (
                zero + outside(None if call.last_layer == "full" else call.prefix),
                torch.stack([zero if r is None else _layer_macs(costs[i], r, convention) for i, r in enumerate(ran)]),
                torch.stack([zero if r is None else r.matching.double().cpu() for r in ran]),
                outside(None)
                + torch.stack([block_macs(cost, n, n, None, convention) for cost in costs[: len(call.layers)]]).sum(0),
            )
        )
    outside_blocks, blocks, matching, baseline = (torch.cat(column, -1) for column in zip(*parts, strict=True))
    return Cost(convention, outside_blocks, blocks, matching, baseline)


def _layer_macs(cost: BlockCost, record: LayerRecord, convention: Convention) -> Tensor:
    return block_macs(cost, record.attending.double().cpu(), record.tokens_out.double().cpu(), record.late, convention)


Count = TypeVar("Count", Tensor, float)


def block_macs(cost: BlockCost, n: Count, m: Count, late: LateProjection, convention: Convention) -> Count:
    """N tokens in, M after the merge: 4NC² + 2N²C + 2·ratio·MC² for a plain block. Late queries or values are those of the
    M remaining tokens, and then only these leave attention."""
    q = m if late == "q" else n
    v = m if late == "v" else n
    out = m if late else n
    macs = q * cost.macs_q + n * cost.macs_k + v * cost.macs_v + out * cost.macs_out + m * cost.macs_mlp
    macs = macs + (q * n + out * v) * cost.attn_width
    if convention == "lvvit":
        hidden = cost.macs_mlp / (2 * cost.width)
        heads = cost.attn_width / cost.head_dim
        return macs + 10 * heads * q * n + 11 * cost.width * n + m * (9 * hidden + 11 * cost.width)
    elements = (n + m if late else n) * cost.norm_in + q * cost.norm_q + n * cost.norm_k
    return macs + _NORMS[convention] * (elements + out * cost.norm_attn + m * cost.norm_out)


def outside_macs(
    model: nn.Module,
    backbone: Backbone,
    image: tuple[int, ...],
    entry: str,
    exit_tokens: int | None,
    convention: Convention,
    options: tuple[tuple[str, Any], ...],
    memo: dict[Any, float],
) -> float:
    """MACs of everything but the blocks, counted by running a copy of the model on the meta device; or from `memo`, where
    results are kept."""
    key = (image, entry, exit_tokens, convention, options)
    if key in memo:
        return memo[key]
    shell = _meta_copy(model)
    backbone.bypass(shell, exit_tokens)
    elements = 0

    def count(module: nn.Module, args: object, out: Tensor) -> None:
        nonlocal elements
        elements += out.numel()

    for module in shell.modules():
        if norm_width(module):
            module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        x = torch.empty(1, *image, device="meta", dtype=next(shell.parameters()).dtype)
        getattr(shell, entry)(x, **dict(options), **backbone.counting_inputs(shell, image))
    if convention == "lvvit":
        memo[key] = float(counter.get_flop_counts()["Global"].get(torch.ops.aten.convolution, 0) / 2)
    else:
        memo[key] = float(counter.get_total_flops() / 2 + _NORMS[convention] * elements)
    return memo[key]


def _meta_copy(model: nn.Module) -> Any:
    """A baseline copy on the meta device, without hooks; no weight is copied, the model is not touched."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = (
            nn.Parameter(tensor.to("meta"), requires_grad=False) if isinstance(tensor, nn.Parameter) else tensor.to("meta")
        )
    for module in model.modules():
        for name in _HOOKS:
            memo[id(getattr(module, name))] = OrderedDict()
    return remove(copy.deepcopy(model, memo)).eval()
