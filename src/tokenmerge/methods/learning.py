"""What a method may know of a model, and of a training step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

MODULES = "tokenmerge_modules"  # the child of a merged model with the modules of its method


@dataclass(frozen=True)
class ModelFacts:
    """What a method may know of a model before it sees an image."""

    depth: int
    width: int
    heads: int
    has_cls: bool
    cls_head: bool  # whether the head reads nothing but the CLS token
    classes: int


@dataclass(frozen=True)
class TrainingStep:
    """What a method's loss may read of a micro-batch."""

    task: Tensor  # cross-entropy of the logits
    logits: Tensor  # [B,K]
    labels: Tensor  # [B] int64, or [B,K] where images are mixed
    cross_entropy: Callable[[Tensor], Tensor]  # of other logits, with the same labels
    notes: Sequence[Any]  # what the rules noted, in order
    tokens: Tensor | None  # the output of the last block; all tokens [B,N,C] only if the method sets `needs_tokens`
    normed_tokens: Tensor | None  # the same after the final norm, for methods that distil tokens
    modules: nn.ModuleDict | None
    teacher_logits: Tensor | None  # of the model as it was, without the method
    teacher_tokens: Tensor | None  # [B,N,C], after its final norm, for methods that distil tokens
    companions: Sequence[tuple[Tensor, Sequence[Any]]]  # logits and notes of `Method.companions`
