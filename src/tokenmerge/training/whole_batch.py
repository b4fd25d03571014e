"""The paper's batch rule over a whole step, where the step is cut into micro-batches or divided among processes.

r is averaged over the 256 to 1024 images of a step. A micro-batch alone would average over fewer. So a first pass, without
gradient and in eval mode, runs all images of the step that this process has at once, and counts the pairs above θ layer by
layer, over all processes. The micro-batches then merge that many pairs. What differs from one large batch: in the first pass
stochastic depth and dropout are off, and BatchNorm (LV-ViT's stem) has its running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.matching import ThresholdRule, TopRule, View, assign_top
from ..core.tokens import Decision
from ..engine.forward import Plan
from ..engine.patch import plan_of
from ..methods.base import Rule


def averages_over_batch(plan: Plan) -> bool:
    return any(isinstance(rule, ThresholdRule) and rule.batch == "mean" for rule in plan.rules)


@torch.no_grad()
def count_whole_batch(model: nn.Module, plan: Plan, x: Tensor, add_up: Callable[[Tensor], Tensor]) -> Plan:
    """The plan with the numbers of pairs that its rules give on the whole step: x are its images in this process, and
    `add_up` sums a tensor over the processes. The model's own plan is left as it was."""
    rules = plan.rules
    counts: dict[int, int] = {}

    def counted(layer: int, rule: ThresholdRule) -> Rule:
        def decide(view: View) -> Decision | None:
            pairs = rule.pairs(view)
            if pairs is None:
                return None
            above = pairs.above(rule.theta).sum()
            total, images = add_up(torch.stack((above, torch.full_like(above, len(pairs.score))))).tolist()
            counts[layer] = min(total // images, view.num_patches // 2)  # the limit of TopRule
            return assign_top(view.tokens, view.prefix, pairs, counts[layer])

        return decide

    probe = [counted(layer, rule) if isinstance(rule, ThresholdRule) else rule for layer, rule in enumerate(rules, 1)]
    training = model.training
    model.eval()
    before = set_plan(model, replace(plan, rules=tuple(probe)))
    try:
        model(x)
    finally:
        set_plan(model, before)
        model.train(training)
    static = tuple(_static(rule, counts.get(layer, 0)) for layer, rule in enumerate(rules, 1))
    return replace(plan, rules=static)


def _static(rule: Rule | None, r: int) -> Rule | None:
    """The same pairs, r of them."""
    if not isinstance(rule, ThresholdRule):
        return rule
    return TopRule(rule.kind, rule.by_size, rule.size_weight, rule.attention_weight, r=r)


def set_plan(model: Any, plan: Plan) -> Plan:
    """Replace the plan of a merged model; its method's modules are not changed. Returns the plan that it had."""
    before = plan_of(model)
    model._tokenmerge = plan
    return before
