"""Multiply-accumulates of what ran. The paper's "GFLOPs" are multiply-accumulates, too.

`macs`: convolutions, linear layers, QKᵀ and AV, and the comparisons of tokens.
`paper`: the same and one per LayerNorm element, which gives the paper's 1.25 / 4.60 / 17.57 for DeiT-T/S/B.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .backbones.base import Backbone, BlockShape
from .engine import LayerRecord, Run
from .surgery import plan_of, remove

Convention = Literal["macs", "paper"]


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


def count_cost(model: nn.Module, runs: Sequence[Run], convention: Convention) -> Cost:
    """Add up the records of complete runs of a merged model."""
    if convention not in get_args(Convention):
        raise ValueError(f"unknown convention {convention!r}; known: {', '.join(get_args(Convention))}")
    plan = plan_of(model)
    shapes = [plan.backbone.shape(block) for block in plan.backbone.blocks(model)]
    norms = 1 if convention == "paper" else 0
    outside: list[Tensor] = []
    blocks: list[Tensor] = []
    matching: list[Tensor] = []
    unmerged: list[Tensor] = []
    for run in runs:
        records = [run.records[layer] for layer in sorted(run.records)]
        whole = run.last_layer == "full"
        exit_tokens = None if whole else run.prefix
        batch = len(records[0].tokens_in)
        outside.append(torch.full((batch,), _outside(model, plan.backbone, run.image, exit_tokens, norms)))
        full = _outside(model, plan.backbone, run.image, None, norms)
        start = records[0].tokens_in.double()
        unmerged.append(full + torch.stack([_block(shape, start, start, None, norms) for shape in shapes]).sum(0))
        blocks.append(torch.stack([_layer(shape, record, norms) for shape, record in zip(shapes, records, strict=False)]))
        matching.append(torch.stack([record.matching.double().cpu() for record in records]))
    return Cost(convention, torch.cat(outside), torch.cat(blocks, 1), torch.cat(matching, 1), torch.cat(unmerged))


def _layer(shape: BlockShape, record: LayerRecord, norms: int) -> Tensor:
    return _block(shape, record.tokens_in.double(), record.tokens_out.double(), record.queries, norms)


def _block(shape: BlockShape, n: Tensor, m: Tensor, queries: int | None, norms: int) -> Tensor:
    """N tokens in, M after the merge: 4NC² + 2N²C + 2·ratio·MC² for a plain block, fewer for fewer queries."""
    q = n if queries is None else torch.full_like(n, queries)
    macs = n * shape.key_value + q * (shape.query + shape.output) + 2 * q * n * shape.attention + m * shape.mlp
    return (macs + norms * (n * shape.norms_in + m * shape.norms_out)).cpu()


def _outside(model: nn.Module, backbone: Backbone, image: tuple[int, ...], exit_tokens: int | None, norms: int) -> float:
    """Everything but the blocks, counted by running a weightless copy of the host on one imagined image."""
    shell = _skeleton(model)
    backbone.bypass(shell, exit_tokens)
    elements = 0

    def count(module: nn.Module, args: object, out: Tensor) -> None:
        nonlocal elements
        elements += out.numel()

    for module in shell.modules():
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        shell(torch.empty(1, *image, device="meta", dtype=next(shell.parameters()).dtype))
    return counter.get_total_flops() / 2 + norms * elements


def _skeleton(model: nn.Module) -> Any:
    """A copy of the unmerged host on the meta device; no weight is copied, and the model itself is not touched."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = (
            nn.Parameter(tensor.to("meta"), requires_grad=False) if isinstance(tensor, nn.Parameter) else tensor.to("meta")
        )
    return remove(copy.deepcopy(model, memo)).eval()
