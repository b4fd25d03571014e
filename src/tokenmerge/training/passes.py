"""The model under several plans in one step, and the loss between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.features import run_model
from ..engine.forward import Plan
from ..engine.records import LESSON, Lesson
from .whole_batch import set_plan


class Pass(NamedTuple):
    """What a pass gave."""

    logits: Tensor  # [B,K]
    features: Tensor  # [B,C], pre-logits
    notes: tuple[Any, ...]  # of the rules
    tokens: Tensor | None  # [B,N,C], the output of the last block


class Passes(nn.Module):
    """The model under one or several plans, and the loss, in one call: wrappers for several processes count calls, and must
    see all that has a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, x: Tensor, plans: Sequence[Plan], companions: Sequence[Plan], loss: Callable[[list[Pass], list[Pass]], Tensor]
    ) -> Tensor:
        """`loss` gets a pass under each plan, and one without gradient under each of the companions."""
        learning = [run_with(self.model, x, plan) for plan in plans]
        with torch.no_grad():
            others = [run_with(self.model, x, plan) for plan in companions]
        return loss(learning, others)


def run_with(model: nn.Module, x: Tensor, plan: Plan) -> Pass:
    """A pass of a merged model under another plan than its own."""
    before = set_plan(model, plan)
    lesson = Lesson(model)
    token = LESSON.set(lesson)
    try:
        out = run_model(model, x)
    finally:
        LESSON.reset(token)
        set_plan(model, before)
    return Pass(out.logits.float(), out.features.float(), tuple(lesson.notes), lesson.tokens)


def difference(features: Tensor, wanted: Tensor, counts: Tensor | None = None) -> Tensor:
    """Mean squared difference of the features [B,C], over the images that count, [B] bool; 0 if none does."""
    miss = (features - wanted).square().mean(1)
    if counts is None:
        return miss.mean()
    return (miss * counts).sum() / counts.sum().clamp(min=1)


def label_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """The probability of the true label of each image, [B]; of a mixed image, of both labels together. Smoothing gives
    every class the same small weight, which does not count."""
    probability = logits.softmax(1)
    if labels.ndim == 1:
        return probability.gather(1, labels.unsqueeze(1)).squeeze(1)
    least = labels.amin(1, keepdim=True)
    return (probability * (labels > least)).sum(1)
