"""IA-RED²: interpreters drop the tokens that they find redundant, before each third of the blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.matching import InputView
from ..core.state import Update
from ..core.tokens import Decision, KeyMask, assign_kept
from .base import InputRule, SomeLayers, WithModules, register
from .learning import MODULES, ModelFacts, TrainingStep

POLICY = 1 / 3  # of the training of a group: ten of 30 epochs for its interpreter, twenty for the blocks


class Interpreter(nn.Module):
    """The probability of keeping each token, [B,N], from its similarity to the CLS token. One projection for queries, keys
    and, never used, values, as in the published file."""

    def __init__(self, width: int, heads: int, keep: float) -> None:
        """`keep`: the probability that new interpreters begin with."""
        super().__init__()
        self.heads = heads
        self.qk = nn.Linear(width, 3 * width)
        nn.init.trunc_normal_(self.qk.weight, std=0.02)
        nn.init.zeros_(self.qk.bias)
        # σ(q·k/√d) = keep where weights are 0: q = k = b in every channel, d · b² / √d = logit(keep)
        b = (torch.logit(torch.tensor(keep)) / (width // heads) ** 0.5).sqrt()
        with torch.no_grad():
            self.qk.bias[: 2 * width].fill_(float(b))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        z = F.layer_norm(x, (c,))
        weight, bias = self.qk.weight, self.qk.bias
        q = F.linear(z[:, :1], weight[:c], bias[:c]).reshape(b, 1, self.heads, -1)
        k = F.linear(z, weight[c : 2 * c], bias[c : 2 * c]).reshape(b, n, self.heads, -1)
        return (q.float() * k.float()).sum(-1).mul((c // self.heads) ** -0.5).sigmoid().mean(-1)


@register
@dataclass(frozen=True, repr=False)
class IARED2(WithModules, SomeLayers):
    """Interpretability-Aware Redundancy Reduction (NeurIPS 2021). Before three blocks, an interpreter gives each token the
    probability of being kept; those of at most `threshold` are dropped. The CLS token always stays. Trained group by group:
    the interpreter by REINFORCE with the greedy policy as its baseline, then the blocks.

    `initial_keep`: the probability of keeping a token that new interpreters begin with, from 0.5 on. `penalty`: the reward
    of a wrong class is minus this. `groups`: how many interpreters act, counted from the first; None: all. `sample`: draw
    the decisions instead of taking the likelier one. Both change while training. `layers`, from 1; None: before each third
    of the depth."""

    summary = "interpreters drop redundant tokens"
    paper = "NeurIPS 2021"

    threshold: float = 0.5
    initial_keep: float = field(default=0.9, kw_only=True)
    penalty: float = 3.0
    groups: int | None = None
    sample: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("threshold", 0.0, 1.0)
        self._check_range("initial_keep", 0.5, 0.999)
        self._check_range("penalty", 0.0, 1000.0)
        self._check_flag("sample")
        if self.groups is not None:
            self._check_count("groups")

    @property
    def drops_tokens(self) -> bool:
        return True

    @property
    def batch_invariant(self) -> bool:
        return True

    def default_layers(self, depth: int) -> tuple[int, ...]:
        third = max(depth // 3, 1)
        return tuple(range(1, depth + 1, third))[:3]

    def check_model(self, facts: ModelFacts) -> None:
        if not facts.has_cls:
            raise self._error("compares tokens with the CLS token, and this model has none; DynamicViT needs none")

    def modules(self, facts: ModelFacts) -> nn.ModuleDict:
        layers = self.layers or self.default_layers(facts.depth)
        return nn.ModuleDict({str(k): Interpreter(facts.width, facts.heads, self.initial_keep) for k in range(len(layers))})

    def input_rule(self, layer: int, depth: int) -> InputRule | None:
        layers = sorted(self.layers or self.default_layers(depth))
        if layer not in layers[: self.groups]:
            return None
        return partial(self._select, number=layers.index(layer))

    def _select(self, view: InputView, number: int) -> Decision | Update | None:
        tokens, prefix = view.tokens, view.prefix
        x = tokens.unpack(tokens.x).detach()
        alive = tokens.size > 0 if tokens.mask is None else tokens.mask.weight > 0
        with torch.set_grad_enabled(self.sample):  # the policy learns from what was drawn
            p = view.module(str(number))(x * alive.unsqueeze(-1).to(x.dtype))
        n = tokens.num_tokens
        c = x.shape[-1]
        view.record(macs=n * c * c + c * c + n * c)
        stays = p.detach() > self.threshold
        if self.sample:
            stays = torch.rand_like(p) < p.detach()
        stays[:, :prefix] = True
        stays = stays & alive
        if not view.training:
            return assign_kept(tokens, stays)
        view.note((p, stays, alive, prefix))
        return Update(mask=KeyMask(stays.float()))

    # Training: the same part of the run for each group.

    @property
    def learns(self) -> bool:  # type: ignore[override]
        """Only drawn decisions have a gradient."""
        return self.sample

    def _phase(self, done: float) -> tuple[int, bool]:
        """The group that is trained, from 0, and whether its interpreter is."""
        count = 3 if self.layers is None else len(self.layers)
        at = min(count * done, count - 1e-9)
        return int(at), at % 1 < POLICY

    def at(self, done: float) -> Self:
        group, policy = self._phase(done)
        return replace(self, groups=group + 1, sample=policy)

    def companions(self) -> tuple[Any, ...]:
        return (replace(self, sample=False),) if self.sample else ()

    def reward(self, logits: Tensor, labels: Tensor, notes: Any) -> Tensor:
        """1 − (fraction of tokens kept)² where the class is right, −penalty where it is wrong; [B]. Of a mixed image, the
        label with the larger weight counts."""
        _, stays, _, prefix = notes[-1]
        wanted = labels if labels.ndim == 1 else labels.argmax(1)
        kept = stays[:, prefix:].float().mean(1)
        return torch.where(logits.argmax(1) == wanted, 1 - kept**2, torch.full_like(kept, -self.penalty))

    def loss(self, step: TrainingStep) -> Tensor:
        if not self.sample:
            return step.task
        ((greedy, greedy_notes),) = step.companions
        better = self.reward(step.logits, step.labels, step.notes) - self.reward(greedy, step.labels, greedy_notes)
        p, stays, alive, prefix = step.notes[-1]
        probability = torch.where(stays, p, 1 - p).clamp(min=1e-6)
        log = (probability.log() * alive)[:, prefix:].sum(1)
        return -(better.detach() * log).mean()

    def parameter_group(self, name: str) -> str:
        if name.startswith(MODULES):
            return f"interpreter {name.split('.')[1]}"
        return "backbone"

    def learning_rate_factor(self, group: str, done: float) -> float:
        number, policy = self._phase(done)
        return float(group == (f"interpreter {number}" if policy else "backbone"))
