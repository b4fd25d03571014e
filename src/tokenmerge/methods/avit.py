"""A-ViT: tokens halt when their cumulative halting score reaches 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.matching import InputView
from ..core.state import Update
from ..core.tokens import KeyMask, Tokens, assign_kept
from .base import InputRule, TrainedMethod, register
from .learning import ModelFacts, TrainingStep

EPSILON = 0.01
PONDER, PRIOR = 5e-4, 1e-3  # weights of the losses
CENTRE = 8 / 12  # of the depth: where the prior wants tokens to halt
C, REMAINDER = 0, 1  # what travels with a token: its cumulative halting score, and what is left of 1


@register
@dataclass(frozen=True, repr=False)
class AViT(TrainedMethod):
    """Adaptive Tokens (CVPR 2022). After each block, a token has the halting score σ(gamma · x₀ − beta), from its first
    channel. When its scores add up to 1 − ε, it halts: it is dropped. The output is the sum of the CLS token after each
    block, weighted by its halting scores, with the remainder at the block where it halts. An image whose CLS token has
    halted is finished: all its patches are dropped. In training, halted tokens are masked instead.

    The published constants are gamma = 10, and beta = 30 for DeiT-T, 75 for DeiT-S. There are no parameters: the weights of
    the model learn to halt."""

    summary = "tokens halt by a score in their first channel"
    paper = "CVPR 2022"
    learns = True

    gamma: float = 10.0
    beta: float = 75.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("gamma", 0.0, 1000.0)
        self._check_range("beta", -1000.0, 1000.0)

    @property
    def drops_tokens(self) -> bool:
        return True

    @property
    def batch_invariant(self) -> bool:
        return True

    def check_model(self, facts: ModelFacts) -> None:
        if not facts.cls_head:
            raise self._error(
                "the output is a weighted sum of the CLS token over the layers, so the head must read the CLS token alone; "
                "DynamicViT and Evo-ViT work with heads that read patches"
            )

    def input_rule(self, layer: int, depth: int) -> InputRule | None:
        return self._halt if layer > 1 else None

    def _halt(self, view: InputView) -> Update:
        """The bookkeeping after block `layer` − 1. Prefix tokens other than the CLS token never halt."""
        tokens, prefix = view.tokens, view.prefix
        h = torch.sigmoid(self.gamma * tokens.unpack(tokens.x[..., :1])[..., 0].float() - self.beta)
        h = torch.cat((h[:, :1], torch.zeros_like(h[:, 1:prefix]), h[:, prefix:]), 1)
        state = tokens.extra
        if state is None:
            state = torch.stack((torch.zeros_like(h), torch.ones_like(h)), -1)
        before = state[..., C]
        alive = (before < 1 - EPSILON) & (tokens.size > 0)
        cumulative = before + h
        goes_on = cumulative < 1 - EPSILON
        remainder = state[..., REMAINDER]
        weight = torch.where(goes_on, h, remainder) * alive  # of this layer in the output
        left = torch.where(goes_on & alive, remainder - h, remainder)
        cls = tokens.take(tokens.x, view.prefix_index[:, :1])[:, 0]
        total = weight[:, :1] * cls.float()
        total = total if tokens.memory is None else tokens.memory + total
        state = torch.stack((cumulative, left), -1)
        if view.training:
            view.note((h,))
            masked = tokens.x * goes_on.unsqueeze(-1).to(tokens.x.dtype)
            return Update(x=masked, extra=state, memory=total, mask=KeyMask(goes_on.float()))
        stays = goes_on & goes_on[:, :1] & (tokens.size > 0)
        stays = torch.cat((torch.ones_like(stays[:, :prefix]), stays[:, prefix:]), 1)
        return Update(assign_kept(tokens, stays), extra=state, memory=total)

    def finish(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The last layer has what is left of 1."""
        if tokens.extra is None or tokens.memory is None:  # an empty batch, or a single layer
            return x
        state = tokens.extra[:, 0]
        alive = (state[:, C] < 1 - EPSILON).float()
        weight = (alive * state[:, REMAINDER]).unsqueeze(-1)
        cls = (tokens.memory + weight * x[:, 0].float()).to(x.dtype)
        return torch.cat((cls.unsqueeze(1), x[:, 1:]), 1)

    def loss(self, step: TrainingStep) -> Tensor:
        return step.task + PONDER * ponder(step.notes) + PRIOR * halting_prior(step.notes)


def ponder(notes: Any) -> Tensor:
    """Layers that a token runs, and its remainder: the mean over all tokens."""
    total = torch.zeros_like(notes[0][0])
    cumulative, remainder = torch.zeros_like(total), torch.ones_like(total)
    for (h,) in (*notes, (torch.ones_like(total),)):  # in the last layer every token halts
        alive = cumulative < 1 - EPSILON
        cumulative = cumulative + h
        goes_on = cumulative < 1 - EPSILON
        total = total + alive + torch.where(alive & ~goes_on, remainder, 0.0)
        remainder = torch.where(alive & goes_on, remainder - h, remainder)
    return total.mean()


def halting_prior(notes: Any) -> Tensor:
    """KL between a normal density around two thirds of the depth and the mean halting score of each layer."""
    means = torch.stack([*(h.mean() for (h,) in notes), torch.ones((), device=notes[0][0].device)])
    share = (means / means.sum()).clamp(0.01, 0.99)
    depth = len(means)
    centre = round(CENTRE * depth)
    density = torch.tensor([math.exp(-((i - centre) ** 2) / 2) for i in range(depth)], device=means.device)
    target = density * 0.98 / density[:centre].sum()
    return (target * (target.clamp(min=1e-30).log() - share.log())).sum() / depth
