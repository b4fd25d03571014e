"""The model under several reductions in one step, and the loss between them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ..engine.features import run_model
from .whole_batch import Rules, set_rules


class Passes(nn.Module):
    """The model under one or several sets of rules, in one call: wrappers for several processes count calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, rules: Sequence[Rules]) -> list[tuple[Tensor, Tensor]]:
        """Logits and pre-logits features under each set of rules."""
        return [run_with(self.model, x, own) for own in rules]


def run_with(model: nn.Module, x: Tensor, rules: Rules) -> tuple[Tensor, Tensor]:
    """Logits and pre-logits features of a merged model under other rules than its own."""
    before = set_rules(model, rules)
    try:
        out = run_model(model, x)
    finally:
        set_rules(model, before)
    return out.logits.float(), out.features.float()


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
