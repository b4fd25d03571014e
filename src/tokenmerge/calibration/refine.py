"""From a first allocation to the best one: move pairs between layers, merge in fewer layers, then in neighbouring ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from .search import Search, Trial

STEPS = (8, 6, 5, 4, 3, 2, 1)  # numbers of merging layers that are tried
MUCH_MORE = 1.5  # times the least loss: still fewer layers are not tried
REACH = 2  # how far a merging layer is moved in one step


def refine(searches: Sequence[Search], pairs: Sequence[float], ratio: float, rounds: int) -> tuple[Search, Trial]:
    """Equalise the loss per saving over the layers; every third round, check whether another candidate has become
    better. Stops early when nothing improves."""
    best: Trial | None = None
    for turn in range(rounds + 1):
        if turn % 3 == 0:
            tried = [(search.fit(best.pairs if best else pairs, ratio), search) for search in searches]
            best, search = min(tried, key=lambda pair: pair[1].rank(ratio, pair[0]))
        if turn == rounds or best is None:
            break
        better = search.improve(best, ratio)
        if better is best:
            break
        best = better
    assert best is not None
    return search, best


def merging_layers(trial: Trial) -> list[int]:
    """From 0."""
    return [layer for layer, pairs in enumerate(trial.pairs) if pairs > 0]


def same_loss(distances: Tensor, least: Tensor) -> bool:
    """Whether the images cannot tell two configs apart: the mean difference of their distances [n] is within its standard
    error."""
    difference = (distances - least).double()
    return bool(difference.mean() <= difference.std(correction=0) / len(difference) ** 0.5)


def fewer_layers(
    search: Search, best: Trial, ratio: float, rounds: int, least: int = 1, limit: float = MUCH_MORE
) -> list[Trial]:
    """The best trials with fewer and fewer merging layers, at the same cost: `best` first. Ends at `least` layers, or where
    the loss is `limit` times the least. The layers with the fewest pairs are taken away first."""
    found = [best]
    for count in [*(n for n in STEPS if n > least), least]:
        layers = sorted(merging_layers(best), key=lambda layer: best.pairs[layer], reverse=True)
        if len(layers) <= count:
            continue
        kept = layers[: count + 1]
        leaving = kept[-1:] if count > 5 else kept[-4:]
        tried = [
            search.fit([p if i in kept and i != gone else 0.0 for i, p in enumerate(best.pairs)], ratio) for gone in leaving
        ]
        best = min(tried, key=partial(search.rank, ratio))
        for _ in range(min(rounds, 2)):
            better = search.improve(best, ratio, merging_layers(best))
            if better is best:
                break
            best = better
        found.append(best)
        if best.distance > limit * min(trial.distance for trial in found):
            break
    return found


def move_layers(search: Search, best: Trial, ratio: float, rounds: int) -> Trial:
    """Merge in a neighbouring layer instead, as long as that loses less at the same cost. Taking layers away cannot find a
    layer that the first allocation left out."""
    for _ in range(rounds):
        tried = [best]
        for layer in merging_layers(best):
            for other in range(max(0, layer - REACH), min(search.layers, layer + REACH + 1)):
                if best.pairs[other] == 0:
                    moved = list(best.pairs)
                    moved[layer], moved[other] = 0.0, moved[layer]
                    tried.append(search.fit(moved, ratio))
        better = min(tried, key=partial(search.rank, ratio))
        if better is best:
            break
        best = search.improve(better, ratio, merging_layers(better))
    return best
