"""Evo-ViT: tokens with low CLS attention wait while the others go through a few blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from ..core.matching import InputView, View
from ..core.state import Update, park, recall
from .base import InputRule, Rule, WithModules, register
from .learning import ModelFacts, TrainingStep

_RENAMED = {"norms": "blocks.{}.norm1", "projs": "blocks.{}.attn.proj", "norm": "fc_norm"}  # in released weights
LAYER_TO_STAGE = 2 / 3  # of the run: 200 of 300 epochs in which every block selects by itself


@register
@dataclass(frozen=True, repr=False)
class EvoViT(WithModules):
    """Slow-Fast Token Evolution (AAAI 2022), as in the authors' code for DeiT. In the last two thirds of the blocks, stages
    of a third each, only the ⌊keep · patches⌋ with the highest CLS attention go through the blocks. The others are set
    aside and come back, unchanged, after the stage. The CLS attention of a token is a running mean with weight ½, summed
    over heads.

    `stage_length`: blocks of a stage; None: a third of the depth. With 1, as in the first part of the training, every
    block selects by itself."""

    summary = "tokens with low CLS attention wait for the end of a stage"
    paper = "AAAI 2022"
    parks = True
    needs_tokens = True

    keep: float = 0.5
    stage_length: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_range("keep", 0.0, 1.0)
        if self.stage_length is not None:
            self._check_count("stage_length")
            if self.stage_length < 1:
                raise self._error("stage_length must be 1 or more")

    def _starts(self, depth: int) -> range:
        """The layers that select."""
        third = max(depth // 3, 1)
        return range(third + 1, depth + 1, self.stage_length or third)

    def modules(self, facts: ModelFacts) -> nn.ModuleDict | None:
        """A second head on the CLS token, for training, where the first reads the patches."""
        if facts.cls_head or not facts.has_cls or not facts.classes:
            return None
        return nn.ModuleDict(
            {"norm_cls": nn.LayerNorm(facts.width, eps=1e-6), "head_cls": nn.Linear(facts.width, facts.classes)}
        )

    @classmethod
    def from_released(cls, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """qks.i and vs.i are parts of timm's qkv; the final norm comes after the mean, as timm's `fc_norm` does."""
        own: dict[str, Tensor] = {}
        modules: dict[str, Tensor] = {}
        for key, value in state.items():
            part, *rest = key.split(".")
            if part in ("norm_cls", "head_cls"):
                modules[key] = value
            elif part == "qks":
                layer, kind = rest[0], rest[-1]
                other = f"vs.{layer}.v.{kind}"
                if other not in state:
                    raise ValueError(f"not Evo-ViT's released layout: it has {key}, but no {other}")
                own[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat((value, state[other]))
            elif part != "vs":
                own[".".join((_RENAMED[part].format(*rest), rest[-1])) if part in _RENAMED else key] = value
        return own, modules

    def rule(self, layer: int, depth: int) -> Rule | None:
        """The running CLS attention, where a later layer reads it."""
        starts = self._starts(depth)
        if self.keep == 1 or not starts.start - 1 <= layer < max(starts, default=0):
            return None
        return self._first if layer < starts.start else self._remember

    def input_rule(self, layer: int, depth: int) -> InputRule | None:
        return self._select if self.keep < 1 and layer in self._starts(depth) else None

    def _first(self, view: View) -> Update:
        return Update(extra=view.cls_attention().sum(1).unsqueeze(-1))

    def _remember(self, view: View) -> Update:
        assert view.tokens.extra is not None
        return Update(extra=0.5 * (view.tokens.extra + view.cls_attention().sum(1).unsqueeze(-1)))

    def _select(self, view: InputView) -> Update:
        tokens = recall(view.tokens)
        assert tokens.extra is not None
        attention = tokens.extra[:, view.prefix :, 0]
        slow = max(int(attention.shape[1] * self.keep), 1)
        order = attention.argsort(dim=1, descending=True, stable=True) + view.prefix
        return Update(park(tokens, view.keep(order[:, :slow]), order[:, slow:]), recall=True)

    def at(self, done: float) -> Self:
        return replace(self, stage_length=1) if done < LAYER_TO_STAGE else self

    def loss(self, step: TrainingStep) -> Tensor:
        """Half of the cross-entropy is that of the second head."""
        if step.modules is None or step.tokens is None:
            return step.task
        cls = step.modules["head_cls"](step.modules["norm_cls"](step.tokens[:, 0]))
        return 0.5 * (step.task + step.cross_entropy(cls.float()))
