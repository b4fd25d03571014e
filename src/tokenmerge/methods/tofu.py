"""ToFu, Token Fusion: prune while a layer is far from linear, merge without losing length when it is near."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..tokens import Move
from .base import Counted, View, as_lists


@dataclass(frozen=True, repr=False)
class ToFu(Counted):
    """Token Fusion (WACV 2024). ToMe's matching; up to layer `switch` (None: half of the depth and one more, as the public
    ports have it) the r sources of the most similar pairs are dropped. From then on they merge by MLERP: the direction of
    the mean, the norm of the longest."""

    switch: int | None = None
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.switch is not None:
            self._check_count("switch")

    def __call__(self, view: View) -> Move | None:
        move = as_lists(view.top(self.count(view.layer)))
        if move is None:
            return None
        if view.layer <= (view.depth // 2 + 1 if self.switch is None else self.switch):
            return replace(move, order=move.kept, into=move.into[:0])
        ones = view.tokens.size.new_ones(move.order.shape[0])
        return replace(move, weight=ones, blend="longest")
