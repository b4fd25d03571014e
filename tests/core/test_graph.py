"""Merging in graphs against the lists that run eagerly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmerge.core.graph import graph_each, graph_mean, graph_top, rank
from tokenmerge.core.matching import assign_each, assign_mean, assign_top, best_pairs, split_alternate, split_by_size
from tokenmerge.core.tokens import Tokens, merge


def tokens_of(batch: int, count: int, seed: int, alike: bool = False) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, count, 5, generator=generator)
    if alike:  # many ties
        x = x[:, torch.randint(0, min(3, count), (count,), generator=generator)]
    return Tokens.start(x)


def same(eager: Tokens, graph: Tokens, matmul: bool = False) -> None:
    """To the last bit, so that later layers decide alike; a product by a matrix adds in an order of its own."""
    assert torch.equal(graph.size, eager.size)
    there = eager.size > 0
    close = 1e-5 if matmul else 0.0
    torch.testing.assert_close(graph.x[there], eager.unpack(eager.x)[there], atol=close, rtol=close)
    assert torch.equal(graph.owner, eager.owner)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4), st.integers(2, 17), st.integers(0, 3), st.floats(-1, 1), st.booleans(), st.booleans(),
    st.integers(0, 999),
)  # fmt: skip
def test_two_layers_are_those_of_the_lists(
    batch: int, count: int, prefix: int, theta: float, alike: bool, matmul: bool, seed: int
) -> None:
    count += prefix
    for rules in ((assign_mean, graph_mean), (assign_each, graph_each)):
        eager = graph = tokens_of(batch, count, seed, alike)
        for split in (split_alternate, split_by_size):
            metric = eager.unpack(eager.x)
            pairs = best_pairs(metric, split(eager, prefix), eager.size)
            if pairs is None:
                break
            move = rules[0](eager, prefix, pairs, theta)
            slots = rules[1](graph, prefix, best_pairs(metric, split(graph, prefix), graph.size), theta)  # type: ignore[arg-type]
            if move is None:
                assert slots.length == graph.size.shape[1]
                break
            eager, graph = merge(eager, move, pack=False), merge(graph, slots, matmul=matmul)
            same(eager, graph, matmul)
            if (eager.lengths is None) != (graph.lengths is None):  # a graph cannot know that all have as many
                break


@pytest.mark.parametrize("r", [1, 3, 8])
@pytest.mark.parametrize("by_size", [False, True])
def test_a_fixed_number(r: int, by_size: bool) -> None:
    tokens = tokens_of(3, 17, 0)
    pairs = best_pairs(tokens.x, (split_by_size if by_size else split_alternate)(tokens, 1))
    assert pairs is not None
    move = assign_top(tokens, 1, pairs, r)
    assert move is not None
    same(merge(tokens, move), merge(tokens, graph_top(tokens, 1, pairs, r)))


@given(st.lists(st.sampled_from([-torch.inf, -1.0, 0.5, 0.5000001, 1.0]), max_size=12))
def test_rank_is_the_place_in_a_stable_sort(scores: list[float]) -> None:
    score: Tensor = torch.tensor([scores], dtype=torch.float32)
    order = score.argsort(dim=1, descending=True, stable=True)
    assert torch.equal(rank(score).gather(1, order), torch.arange(len(scores)).unsqueeze(0))


def test_nothing_above_the_threshold_changes_nothing() -> None:
    tokens = tokens_of(2, 9, 1)
    pairs = best_pairs(tokens.x, split_alternate(tokens, 1))
    assert pairs is not None
    after = merge(tokens, graph_mean(tokens, 1, pairs, 1.0))
    assert torch.equal(after.x, tokens.x)
    assert torch.equal(after.owner, tokens.owner)
