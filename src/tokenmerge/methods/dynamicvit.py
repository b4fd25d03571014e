"""DynamicViT: predictors keep the tokens with the highest scores, before three of the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.matching import InputView
from ..core.state import Update
from ..core.tokens import Decision, KeyMask, assign
from .base import InputRule, SomeLayers, WithModules, register
from .learning import MODULES, ModelFacts, TrainingStep

EPSILON = 1e-6  # of the masked softmax in training
KL, TOKENS, RATIO = 0.5, 0.5, 2.0  # weights of the losses, as published for DeiT-S
WARM_UP = 1 / 6  # of the run: five of 30 epochs in which only the predictors learn


class Predictor(nn.Module):
    """log-probabilities of keeping and of dropping each token, [B,N,2], from the token and the mean of those that are
    left."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half, quarter = width // 2, width // 4
        self.in_conv = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.out_conv = nn.Sequential(
            nn.Linear(width, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2)
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, stays: Tensor) -> Tensor:
        """x [B,N,C], patches; `stays` [B,N]: 1 for those that are left."""
        u = self.in_conv(x)
        own, others = u.chunk(2, -1)
        weight = stays.unsqueeze(-1).to(u.dtype)
        mean = (others * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
        return F.log_softmax(self.out_conv(torch.cat((own, mean.expand_as(others)), -1)).float(), -1)


@register
@dataclass(frozen=True, repr=False)
class DynamicViT(WithModules, SomeLayers):
    """Dynamic Token Sparsification (NeurIPS 2021). Before three blocks, a predictor scores the patches; ⌊keep^k · patches⌋
    of them stay, in the order of their scores. In training, tokens are masked instead, by a Gumbel softmax.

    `layers`, from 1; None: after each quarter of the depth."""

    summary = "predictors keep the tokens with the highest scores"
    paper = "NeurIPS 2021"
    learns = True
    needs_tokens = True
    distils_tokens = True

    keep: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.0, 1.0)

    @property
    def drops_tokens(self) -> bool:
        return True

    def modules(self, facts: ModelFacts) -> nn.ModuleDict:
        layers = self.layers or self.default_layers(facts.depth)
        return nn.ModuleDict({str(k): Predictor(facts.width) for k in range(len(layers))})

    @classmethod
    def from_released(cls, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        first = "score_predictor."
        own = {key: value for key, value in state.items() if not key.startswith(first)}
        return own, {key.removeprefix(first): value for key, value in state.items() if key.startswith(first)}

    def input_rule(self, layer: int, depth: int) -> InputRule | None:
        layers = sorted(self.layers or self.default_layers(depth))
        if layer not in layers:
            return None
        return partial(self._select, number=layers.index(layer))

    def _select(self, view: InputView, number: int) -> Decision | Update | None:
        tokens, prefix = view.tokens, view.prefix
        patches = tokens.x[:, prefix:]
        mask = None if tokens.mask is None else tokens.mask.weight
        stays = torch.ones_like(tokens.size) if mask is None else mask
        score = view.module(str(number))(patches, stays[:, prefix:])  # [B,N,2]
        n, c = patches.shape[1:]
        view.record(macs=n * (c * c + c * (c // 2) + (c // 2) * (c // 4) + 2 * (c // 4)))
        if view.training:
            drawn = F.gumbel_softmax(score, hard=True)[..., 0] * stays[:, prefix:]
            view.note((drawn, self.keep ** (number + 1)))
            whole = torch.cat((torch.ones_like(stays[:, :prefix]), drawn), 1)
            return Update(mask=KeyMask(whole, EPSILON))
        left = max(int((tokens.original - prefix) * self.keep ** (number + 1)), 1)
        if left >= n:
            return None
        best = score[..., 0].argsort(dim=1, descending=True, stable=True)[:, :left]
        return assign(tokens, view.keep(best + prefix))

    def loss(self, step: TrainingStep) -> Tensor:
        """Cross-entropy, distillation of logits and of the tokens that are left, and the keep ratios."""
        assert step.teacher_logits is not None
        assert step.teacher_tokens is not None
        assert step.normed_tokens is not None
        wanted = F.log_softmax(step.teacher_logits, -1)
        loss = step.task + KL * F.kl_div(F.log_softmax(step.logits, -1), wanted, reduction="batchmean", log_target=True)
        drawn = [stays for stays, _ in step.notes]
        prefix = step.normed_tokens.shape[1] - drawn[-1].shape[1]
        left = drawn[-1].detach().unsqueeze(-1)
        squares = (step.normed_tokens - step.teacher_tokens)[:, prefix:].float().square() * left
        loss = loss + TOKENS * squares.sum() / (left.sum().clamp(min=1) * squares.shape[-1])
        ratio = sum(((stays.mean(1) - wanted) ** 2).mean() for stays, wanted in step.notes)
        return loss + RATIO / len(drawn) * ratio

    def parameter_group(self, name: str) -> str:
        if name.startswith(MODULES):
            return "predictors"
        return "frozen" if name.endswith(("cls_token", "pos_embed")) else "backbone"

    def learning_rate_factor(self, group: str, done: float) -> float:
        """The backbone learns at a hundredth of the predictors' rate, after five of 30 epochs."""
        if group == "predictors":
            return 1.0
        return 0.0 if group == "frozen" or done < WARM_UP else 0.01
