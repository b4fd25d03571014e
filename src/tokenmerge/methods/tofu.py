"""ToFu, Token Fusion: prune in early layers, merge with MLERP in late layers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ..core.matching import View
from ..core.tokens import Decision, as_lists
from .base import FixedR, register


@register
@dataclass(frozen=True, repr=False)
class ToFu(FixedR):
    """Token Fusion (WACV 2024). ToMe's matching. Up to layer `switch` (None: half of the depth plus one, as in the public
    ports) the r sources of the most similar pairs are dropped. In later layers they merge by MLERP: the direction of the
    mean, the norm of the longest."""

    summary = "drops in early layers, merges with preserved norm in late layers"
    paper = "WACV 2024"

    switch: int | None = None
    prop_attn: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.switch is not None:
            self._check_count("switch")

    @property
    def drops_tokens(self) -> bool:
        return True

    def select(self, view: View, r: int) -> Decision | None:
        merged = as_lists(view.top(r))
        if merged is None:
            return None
        if view.layer <= (view.depth // 2 + 1 if self.switch is None else self.switch):
            return replace(merged, order=merged.kept, into=merged.into[:0])
        ones = view.tokens.size.new_ones(merged.order.shape[0])
        return replace(merged, weight=ones, blend="longest")
