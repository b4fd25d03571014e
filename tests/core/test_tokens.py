"""The slot map and its invariants."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmerge.core.attention import group_mean
from tokenmerge.core.matching import assign_each, assign_mean, assign_top, best_pairs, split_alternate, split_by_size
from tokenmerge.core.tokens import DROPPED, Assignment, Tokens, merge, restore

shapes = st.tuples(st.integers(1, 4), st.integers(1, 23), st.integers(0, 3), st.integers(0, 2**31))


def random_tokens(batch: int, patches: int, prefix: int, seed: int, dtype: torch.dtype = torch.float64) -> Tokens:
    x = torch.randn(batch, prefix + patches, 8, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return Tokens.start(x)


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 4), st.sampled_from(["top", "mean", "each", "each-padded"]))
def test_invariants_over_several_merges(shape: tuple[int, int, int, int], rounds: int, rule: str) -> None:
    batch, patches, prefix, seed = shape
    tokens = random_tokens(batch, patches, prefix, seed)
    original = tokens.x
    for i in range(rounds):
        split = (split_by_size if i % 2 else split_alternate)(tokens, prefix)
        pairs = best_pairs(tokens.unpack(tokens.x), split)
        if pairs is None:
            break
        if rule == "top":
            move = assign_top(tokens, prefix, pairs, 1 + seed % 5)
        else:
            move = (assign_mean if rule == "mean" else assign_each)(tokens, prefix, pairs, 0.1)
        if move is None:
            continue
        tokens = merge(tokens, move, pack=rule != "each-padded")
        count = tokens.num_tokens
        # sizes are conserved, padding is at the end, and no image is longer than the batch
        assert torch.equal(tokens.size.sum(1), torch.full((batch,), float(prefix + patches)))
        assert torch.equal(tokens.size > 0, torch.arange(tokens.size.shape[1]) < count[:, None])
        assert int(count.max()) == tokens.size.shape[1]
        assert (tokens.lengths or (tokens.size.shape[1],) * batch) == tuple(count.tolist())
        assert tokens.packed == (tokens.lengths is not None and rule == "each")
        if tokens.packed:
            assert tokens.x.shape[:2] == (1, int(count.sum()))
        x = tokens.unpack(tokens.x)
        assert torch.equal(tokens.pack(x), tokens.x)
        # the prefix is untouched, bit for bit, and nobody joined it
        assert torch.equal(x[:, :prefix], original[:, :prefix])
        assert torch.equal(tokens.size[:, :prefix], torch.ones(batch, prefix))
        # a token is the mean of the originals that it owns, and sizes count them
        index = torch.nn.functional.one_hot(tokens.owner, tokens.size.shape[1]).to(original.dtype)
        assert torch.equal(index.sum(1).float(), tokens.size)
        mean = index.transpose(1, 2) @ original / tokens.size.clamp(min=1)[..., None]
        torch.testing.assert_close(x * (tokens.size > 0)[..., None], mean, atol=1e-9, rtol=0)


def test_restore_makes_the_plain_mean_the_weighted_mean() -> None:
    tokens = random_tokens(3, 20, 1, 0)
    pairs = best_pairs(tokens.x, split_alternate(tokens, 1))
    assert pairs is not None
    move = assign_top(tokens, 1, pairs, 7)
    assert move is not None
    merged = merge(tokens, move)
    full = restore(merged.x, merged.owner)
    assert full.shape == tokens.x.shape
    weighted = (merged.x * merged.size[..., None]).sum(1) / merged.size.sum(1, keepdim=True)
    torch.testing.assert_close(full.mean(1), weighted)
    torch.testing.assert_close(full.mean(1), tokens.x.mean(1))
    # attention over repeated keys is attention with + log size
    q, k = torch.randn(3, 5, 8, dtype=torch.float64), merged.x
    with_log = ((q @ k.transpose(1, 2)) + merged.size.log()[:, None]).softmax(-1) @ k
    repeated = (q @ full.transpose(1, 2)).softmax(-1) @ full
    torch.testing.assert_close(with_log, repeated)
    # and `first` undoes `restore`
    assert torch.equal(restore(full, merged.representative()), merged.x)
    assert torch.equal(merged.restore(merged.x, 1), full)


def test_group_mean_is_the_mean_of_each_group() -> None:
    owner = torch.tensor([[0, 1, 1, 2], [0, 0, 0, 1]])
    values = torch.arange(4.0).reshape(1, 1, 4, 1).expand(2, 1, 4, 1)
    got = group_mean(values, owner, 3)[:, 0, :, 0]
    assert torch.equal(got, torch.tensor([[0, 1.5, 3], [1, 3, 0]]))
    got = group_mean(values[:1], torch.tensor([[0, DROPPED, 1, 1]]), 2)[:, 0, :, 0]  # dropped tokens are in no group
    assert torch.equal(got, torch.tensor([[0, 2.5]]))


def small() -> Tokens:
    """Two images of a class token and four patches, x = 0, 1, 2, 3, 4 and 10 to 14, of one channel and a constant."""
    x = torch.stack((torch.arange(5.0), torch.arange(10.0, 15.0)))
    return Tokens.start(torch.stack((x, torch.ones_like(x)), 2), torch.tensor([[1.0, 1, 2, 3, 1], [1, 1, 1, 1, 1]]))


def test_dropped_tokens_have_no_owner_and_come_back_as_the_mean_of_the_others() -> None:
    tokens = merge(small(), Assignment(torch.tensor([0, 1, 4, 5, 6, 7]), torch.tensor([], dtype=torch.int64), 3))
    assert tokens.owner.tolist() == [[0, 1, DROPPED, DROPPED, 2], [0, 1, 2, DROPPED, DROPPED]]
    # Once more: the first image drops its first patch, the second merges its two.
    tokens = merge(tokens, Assignment(torch.tensor([0, 2, 3, 4, 5]), torch.tensor([3]), 2))
    assert tokens.owner.tolist() == [[0, DROPPED, DROPPED, DROPPED, 1], [0, 1, 1, DROPPED, DROPPED]]
    assert tokens.size.tolist() == [[1, 1], [1, 2]]
    assert tokens.x[..., 0].tolist() == [[0, 4], [10, 11.5]]
    full = tokens.restore(tokens.x, prefix=1)
    assert full[..., 0].tolist() == [[0, 4, 4, 4, 4], [10, 11.5, 11.5, 11.5, 11.5]]
    assert torch.equal(full, restore(tokens.x, tokens.owner, prefix=1))
    assert torch.equal(full.gather(1, tokens.representative().unsqueeze(-1).expand(-1, -1, 2)), tokens.x)
    assert tokens.original == 5


def test_dropping_in_images_of_different_lengths() -> None:
    move = Assignment(torch.tensor([0, 1, 2, 5, 9]), torch.tensor([], dtype=torch.int64), 3, (3, 2))
    tokens = merge(small(), move)
    assert tokens.packed
    assert tokens.x[0, :, 0].tolist() == [0, 1, 2, 10, 14]
    assert tokens.owner.tolist() == [[0, 1, 2, DROPPED, DROPPED], [0, DROPPED, DROPPED, DROPPED, 1]]
    assert tokens.restore(tokens.x, 1)[..., 0].tolist() == [[0, 1, 2, 1.5, 1.5], [10, 14, 14, 14, 14]]


def test_other_ways_to_become_one() -> None:
    keep, join, into = torch.tensor([0, 1, 2, 5, 6, 7]), torch.tensor([3, 9]), torch.tensor([2, 4])
    order = torch.cat((keep, join))

    def check(expected: list[list[float]], **options: object) -> None:
        x = merge(small(), Assignment(order, into, 3, **options)).x[..., 0]  # type: ignore[arg-type]
        torch.testing.assert_close(x, torch.tensor(expected))

    check([[0, 1, (2 * 2 + 3 * 3) / 5], [10, (11 + 14) / 2, 12]])
    check([[0, 1, (2 + 3 * 3) / 4], [10, (11 + 4 * 14) / 5, 12]], weight=torch.tensor([1.0, 1, 1, 1, 1, 1, 3, 4]))
    weight = torch.tensor([1.0, 1, 0.5, 1, 1, 1, 0.25, 2])
    check([[0, 1, 0.5 * 2 + 0.25 * 3], [10, 11 + 2 * 14, 12]], weight=weight, blend="sum")
    longest = merge(small(), Assignment(order, into, 3, weight=torch.ones(8), blend="longest")).x
    torch.testing.assert_close(longest.norm(dim=2)[:, 1:], torch.tensor([[2**0.5, 10**0.5], [197**0.5, 145**0.5]]))
    torch.testing.assert_close(longest[0, 2, 0] / longest[0, 2, 1], torch.tensor(2.5))
    assert torch.equal(longest[0, :2], small().x[0, :2])
    soft = merge(small(), Assignment(order, into, 3, gain=torch.tensor([1.0, 1, 1, 1, 1, 1, 0.5, 0.25])))
    assert soft.size.tolist() == [[1, 1, 2 + 1.5], [1, 1.25, 1]]


def test_dropped_fp16_tokens_come_back_finite() -> None:
    tokens = Tokens.start(torch.full((1, 300, 1), 400.0, dtype=torch.float16))
    tokens = merge(tokens, Assignment(torch.arange(250), torch.zeros(0, dtype=torch.int64), 250))
    assert torch.equal(tokens.restore(tokens.x, 1), torch.full((1, 300, 1), 400.0, dtype=torch.float16))


def test_fp16_does_not_overflow() -> None:
    """Σ x·n would: 60,000 × 150 is far beyond fp16; weighing first is not."""
    x = torch.full((1, 4, 2), 60_000.0, dtype=torch.float16)
    tokens = Tokens.start(x, torch.tensor([[1.0, 100, 50, 1]]))
    pairs = best_pairs(x, split_by_size(tokens, 1))
    assert pairs is not None
    move = assign_top(tokens, 1, pairs, 1)
    assert move is not None
    merged = merge(tokens, move)
    assert merged.x.dtype == torch.float16
    torch.testing.assert_close(merged.x, torch.full_like(merged.x, 60_000.0))


def test_sizes_count_beyond_what_half_precision_can() -> None:
    x = torch.ones(1, 3001, 2, dtype=torch.bfloat16)
    tokens = Tokens.start(x)
    for _ in range(14):
        pairs = best_pairs(tokens.x, split_alternate(tokens, 1))
        if pairs is None:
            break
        move = assign_top(tokens, 1, pairs, tokens.x.shape[1])
        if move is None:
            break
        tokens = merge(tokens, move)
    assert tokens.size.sum() == 3001
    assert tokens.size.max() > 2048
