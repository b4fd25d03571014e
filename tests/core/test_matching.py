"""Splits, pairs and batch rules, against plain loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import cosine, groups, slow_merge, slow_pairs
from tokenmerge.core.matching import Pairs, assign_each, assign_mean, assign_top, best_pairs, split_alternate, split_by_size
from tokenmerge.core.tokens import Tokens, merge


def sized_tokens(batch: int, n: int, seed: int, spread: int = 3) -> Tokens:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, n, 6, dtype=torch.float64, generator=generator)
    size = torch.randint(1, spread + 1, (batch, n), generator=generator).float()
    return Tokens.start(x, size)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 3), st.integers(1, 24), st.integers(0, 3), st.booleans(), st.integers(0, 12), st.integers(0, 2**31))
def test_matches_brute_force(batch: int, patches: int, prefix: int, by_size: bool, r: int, seed: int) -> None:
    tokens = sized_tokens(batch, prefix + patches, seed)
    metric = torch.randn(tokens.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 1))
    split = (split_by_size if by_size else split_alternate)(tokens, prefix)
    pairs = best_pairs(metric, split)
    if pairs is None:
        assert not all(groups(tokens.size[0].tolist(), prefix, by_size))
        return
    move = assign_top(tokens, prefix, pairs, r)
    merged = tokens if move is None else merge(tokens, move)
    for b in range(batch):
        size = tokens.size[b].tolist()
        slow = slow_pairs(metric[b], size, prefix, by_size)
        source = split.source.expand(batch, -1)[b].tolist()
        target = split.target.expand(batch, -1)[b]
        assert [(i, j) for _, i, j in slow] == list(zip(source, target[pairs.best[b]].tolist(), strict=True))
        torch.testing.assert_close(
            pairs.score[b].double(), torch.tensor([c for c, _, _ in slow]).double(), atol=1e-6, rtol=0
        )
        x, sizes, members = slow_merge(tokens.x[b], metric[b], size, [[i] for i in range(len(size))], prefix, by_size, r)
        torch.testing.assert_close(merged.x[b], x)
        assert merged.size[b].tolist() == sizes
        for place, group in enumerate(members):
            assert sorted((merged.owner[b] == place).nonzero()[:, 0].tolist()) == sorted(group)


def test_alternate_split_leaves_the_prefix_out() -> None:
    tokens = Tokens.start(torch.zeros(1, 9, 2))
    for prefix, source, target in (
        (0, [0, 2, 4, 6, 8], [1, 3, 5, 7]),
        (1, [2, 4, 6, 8], [1, 3, 5, 7]),
        (2, [2, 4, 6, 8], [3, 5, 7]),
    ):
        split = split_alternate(tokens, prefix)
        assert (split.source.tolist(), split.target.tolist()) == (source, target)
    split = split_alternate(tokens, 5)  # class token and four registers
    assert (split.source.tolist(), split.target.tolist()) == ([6, 8], [5, 7])


def test_size_split_breaks_ties_by_position() -> None:
    tokens = Tokens.start(torch.zeros(1, 8, 2), torch.tensor([[1.0, 2, 1, 1, 3, 1, 1, 2]]))
    split = split_by_size(tokens, 1)
    assert split.source.tolist() == [[2, 3, 5]]
    assert split.target.tolist() == [[6, 1, 7, 4]]
    many = Tokens.start(torch.zeros(1, 4098, 1))  # all alike: order must be the positions'
    split = split_by_size(many, 1)
    assert split.source[0].tolist() == list(range(1, 2049))
    torch.set_default_dtype(torch.bfloat16)  # must not coarsen the tie-break
    try:
        assert torch.equal(split_by_size(many, 1).source, split.source)
    finally:
        torch.set_default_dtype(torch.float32)


def test_threshold_is_strict_and_cosines_stop_at_one() -> None:
    x = torch.rand(1, 9, 5).repeat(1, 1, 1) + 0.1
    x[:, 2] = x[:, 1] * 3  # cosine 1, up to rounding
    tokens = Tokens.start(x)
    pairs = best_pairs(x, split_alternate(tokens, 1))
    assert pairs is not None
    assert float(pairs.score.max()) <= 1.0
    assert not pairs.above(1.0).any()
    value = float(pairs.score[0, 1])
    assert not pairs.above(value)[0, 1]


def test_mean_rule_floors_and_each_rule_does_not_look_around() -> None:
    score = torch.tensor([[0.9, 0.2, 0.8], [0.1, 0.95, 0.3]])  # two and one above 0.5: the mean 1.5 becomes 1
    tokens = Tokens.start(torch.zeros(2, 7, 2))
    split = split_alternate(tokens, 1)
    pairs = Pairs(split, torch.zeros(2, 3, dtype=torch.long), score)
    mean = assign_mean(tokens, 1, pairs, 0.5)
    assert mean is not None
    assert mean.length == 6
    # Sources stand at 2, 4, 6, targets at 1, 3, 5. Image 0 gives 2 to 1, image 1 gives 4 to 1.
    assert merge(tokens, mean).owner.tolist() == [[0, 3, 3, 4, 1, 5, 2], [0, 3, 1, 4, 3, 5, 2]]
    each = assign_each(tokens, 1, pairs, 0.5)
    assert each is not None
    assert each.length == 6
    assert merge(tokens, each).owner.tolist() == [[0, 2, 2, 3, 1, 4, 2], [0, 3, 1, 4, 3, 5, 2]]
    assert each.lengths == (5, 6)
    assert assign_mean(tokens, 1, pairs, 0.97) is None
    assert assign_each(tokens, 1, pairs, 0.97) is None


def test_each_rule_on_a_padded_batch_equals_each_image_alone() -> None:
    """Three rounds, both splits, images of very different redundancy, one of which merges nothing at first."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 22, 6, dtype=torch.float64, generator=generator)
    x[1, 1:] = x[1, 1:2] + 0.05 * torch.randn(21, 6, dtype=torch.float64, generator=generator)
    x[2, 5:] = x[2, 5:6] + 0.3 * torch.randn(17, 6, dtype=torch.float64, generator=generator)

    def go(x: torch.Tensor) -> Tokens:
        tokens = Tokens.start(x)
        for i in range(4):
            split = (split_by_size if i >= 2 else split_alternate)(tokens, 1)
            pairs = best_pairs(tokens.unpack(tokens.x), split)
            move = None if pairs is None else assign_each(tokens, 1, pairs, 0.8 - 0.1 * i)
            tokens = tokens if move is None else merge(tokens, move)
        return tokens

    together = go(x)
    assert len(set(together.num_tokens.tolist())) > 2
    for b in range(4):
        alone = go(x[b : b + 1])
        n = int(together.num_tokens[b])
        torch.testing.assert_close(together.unpack(together.x)[b, :n], alone.x[0])
        assert torch.equal(together.owner[b], alone.owner[0])
        assert torch.equal(together.size[b, :n], alone.size[0])


def test_nan_is_never_above_and_ranks_last() -> None:
    x = torch.rand(2, 9, 4) + 0.1
    x[0, 4] = torch.nan
    tokens = Tokens.start(x)
    pairs = best_pairs(x, split_alternate(tokens, 1))
    assert pairs is not None
    assert pairs.above(-1.0).tolist() == [[True, False, True, True], [True] * 4]
    move = assign_top(tokens, 1, pairs, 3)  # of the sources 2, 4, 6, 8
    assert move is not None
    assert sorted(move.order[-6:-3].tolist()) == [2, 6, 8]
    clean = best_pairs(x[1:], split_alternate(Tokens.start(x[1:]), 1))
    assert clean is not None
    assert torch.equal(clean.score[0], pairs.score[1])


def test_bfloat16_decisions_are_taken_in_float32() -> None:
    x = torch.randn(1, 197, 64).to(torch.bfloat16)
    tokens = Tokens.start(x)
    pairs = best_pairs(x, split_alternate(tokens, 1))
    with torch.autocast("cpu", torch.bfloat16):
        under = best_pairs(x, split_alternate(tokens, 1))
    exact = best_pairs(x.double(), split_alternate(tokens, 1))
    assert pairs is not None
    assert under is not None
    assert exact is not None
    assert pairs.score.dtype == torch.float32
    assert torch.equal(pairs.score, under.score)
    torch.testing.assert_close(pairs.score, exact.score, atol=1e-6, rtol=0)


@pytest.mark.parametrize("grid", [1, 700, 5000])
def test_large_grids_are_compared_in_parts(grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 61, 8)
    tokens = Tokens.start(x, lengths=(61, 50, 40))
    tokens.size[1, 50:] = tokens.size[2, 40:] = 0
    for split in (split_alternate(tokens, 1), split_by_size(tokens, 1)):
        whole = best_pairs(x, split)
        monkeypatch.setattr("tokenmerge.core.matching.MAX_COSINES", grid)
        parts = best_pairs(x, split)
        monkeypatch.undo()
        assert whole is not None
        assert parts is not None
        torch.testing.assert_close(parts.score, whole.score)
        assert torch.equal(parts.best[whole.score > -1], whole.best[whole.score > -1])


@pytest.mark.parametrize("power", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("grid", [1, 2**22])
def test_size_weight_makes_large_tokens_harder_to_merge(power: float, grid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmerge.core.matching.MAX_COSINES", grid)
    tokens = sized_tokens(2, 13, seed=5, spread=9)
    split = split_alternate(tokens, 1)
    pairs = best_pairs(tokens.x, split, tokens.size, power)
    assert pairs is not None
    unit = torch.nn.functional.normalize(tokens.x, dim=-1)
    for b in range(2):
        n = tokens.size[b].double()
        for s, i in enumerate(split.source.tolist()):
            scores = [
                1 - float(2 * n[i] * n[j] / (n[i] + n[j])) ** power * (1 - float(unit[b, i] @ unit[b, j]))
                for j in split.target.tolist()
            ]
            assert float(pairs.score[b, s]) == pytest.approx(max(scores), abs=1e-5)
            assert int(pairs.best[b, s]) == scores.index(max(scores))


def test_top_rule_takes_unequal_images_and_at_most_half_of_each() -> None:
    valid = torch.tensor([[1.0] * 9, [1.0] * 5 + [0.0] * 4])
    tokens = Tokens.start(torch.rand(2, 9, 2, generator=torch.Generator().manual_seed(0)), valid, lengths=(9, 5))
    pairs = best_pairs(tokens.x, split_alternate(tokens, 1))
    assert pairs is not None
    for r, left in ((1, [8, 4]), (3, [6, 3]), (9, [5, 3])):  # of 8 and 4 patches
        decision = assign_top(tokens, 1, pairs, r)
        assert decision is not None
        assert merge(tokens, decision).num_tokens.tolist() == left


def test_empty_batch_has_no_pairs() -> None:
    tokens = Tokens.start(torch.zeros(0, 9, 4))
    assert best_pairs(tokens.x, split_alternate(tokens, 1)) is None


def test_tokens_that_are_looked_at_must_be_more_alike() -> None:
    """1 − (2nm/(n+m))^p · f_i f_j · (1 − cos), by loops; in parts as in one."""
    generator = torch.Generator().manual_seed(3)
    x, size = torch.randn(2, 9, 5, generator=generator), torch.randint(1, 5, (2, 9), generator=generator).float()
    factor = torch.rand(2, 9, generator=generator) + 0.5
    split = split_alternate(Tokens.start(x), 1)
    for p in (0.0, 0.5):
        pairs = best_pairs(x, split, size, p, factor)
        assert pairs is not None
        for b in range(2):
            for row, i in enumerate(split.source.tolist()):
                scores = []
                for j in split.target.tolist():
                    n, m = float(size[b, i]), float(size[b, j])
                    weight = (2 * n * m / (n + m)) ** p * float(factor[b, i] * factor[b, j])
                    scores.append(1 - weight * (1 - cosine(x[b, i], x[b, j])))
                assert float(pairs.score[b, row]) == pytest.approx(max(scores), abs=1e-5)
                assert int(pairs.best[b, row]) == scores.index(max(scores))
