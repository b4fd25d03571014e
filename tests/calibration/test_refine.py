"""When fewer merging layers are as good, and whether a neighbouring layer is better."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenmerge.calibration.refine import merging_layers, move_layers, same_loss


def test_losses_are_the_same_where_the_images_cannot_tell() -> None:
    least = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert same_loss(least, least)
    assert same_loss(least - 0.1, least)
    assert not same_loss(least + 0.1, least)  # little, but on every image
    assert same_loss(least + torch.tensor([2.0, -1.9, 2.0, -1.9]), least)  # on average more, but not reliably
    assert not same_loss(least + torch.tensor([2.0, 2.1, 2.0, -0.1]), least)


class Landscape:
    """A search whose loss is known: the pairs of each layer times the layer's price."""

    def __init__(self, prices: Sequence[float]) -> None:
        self.prices = prices
        self.layers = len(prices)
        self.fitted: list[tuple[float, ...]] = []

    def fit(self, pairs: Sequence[float], ratio: float) -> Any:
        self.fitted.append(tuple(pairs))
        return SimpleNamespace(pairs=tuple(pairs), distance=sum(p * c for p, c in zip(pairs, self.prices, strict=True)))

    def rank(self, ratio: float, trial: Any) -> tuple[bool, float]:
        return False, trial.distance

    def improve(self, trial: Any, ratio: float, among: Sequence[int]) -> Any:
        return trial


@pytest.mark.parametrize(
    ("prices", "start", "rounds", "expected"),
    [
        ((5, 4, 3, 2, 1, 2), (8, 0, 0, 0, 0, 0), 3, [4]),  # two at a time
        ((5, 4, 3, 2, 1, 2), (8, 0, 0, 0, 0, 0), 1, [2]),
        ((5, 4, 3, 2, 1, 2), (0, 0, 0, 0, 8, 0), 3, [4]),
        ((1, 9, 9, 9, 9, 1), (0, 6, 0, 0, 4, 0), 3, [0, 5]),
        ((9, 9, 0, 9, 9, 9), (6, 0, 0, 0, 0, 4), 3, [2, 5]),  # never two in one layer
    ],
)
def test_merging_layers_move_to_better_neighbours(
    prices: Sequence[float], start: Sequence[float], rounds: int, expected: list[int]
) -> None:
    search: Any = Landscape(prices)
    found = move_layers(search, search.fit(start, 0.7), 0.7, rounds)
    assert merging_layers(found) == expected
    assert sum(found.pairs) == sum(start)
    assert all(len(merging_layers(SimpleNamespace(pairs=tried))) == len(expected) for tried in search.fitted)  # type: ignore[arg-type]
