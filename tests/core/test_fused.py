"""The fused kernels against matching.py and tokens.py: the same decisions, values equal to rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenmerge.core import fused
from tokenmerge.core.attention import AttentionConfig, BlockAttention
from tokenmerge.core.matching import Ledger, ThresholdRule, TopRule, View
from tokenmerge.core.tokens import Assignment, Tokens, assign_kept, merge

pytestmark = pytest.mark.skipif(not fused.available(), reason="the CPU kernels need numba")

Rule = ThresholdRule | TopRule


def random(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_view(
    batch: int,
    patches: int,
    prefix: int,
    seed: int,
    *,
    heads: int = 3,
    width: int = 8,
    kv_heads: int | None = None,
    sizes: int = 1,
    lengths: bool = False,
    dtype: torch.dtype = torch.float32,
    similar: float = 0.5,
    proportional: bool = True,
    has_cls: bool = True,
) -> View:
    """A layer with tokens that are near each other, as real ones are, so that thresholds choose some of the pairs. With
    `lengths`, the images have lost different numbers of tokens before."""
    generator = torch.Generator().manual_seed(seed)
    n = prefix + patches
    centre = torch.randn(batch, 1, 24, generator=generator)
    x = centre + similar * torch.randn(batch, n, 24, generator=generator)
    size = torch.randint(1, sizes + 1, (batch, n), generator=generator).float()
    tokens = Tokens.start(x.to(dtype), size)._replace(merged=sizes > 1)
    if lengths:
        keep = torch.rand(batch, n, generator=generator) > 0.3
        keep[:, : max(prefix, 1)] = True
        decision = assign_kept(tokens, keep)
        tokens = tokens if decision is None else merge(tokens, decision)
    rows = tokens.x.shape[:2]
    qkv = torch.randn(*rows, 3, heads, width, generator=generator).to(dtype)
    qkv = qkv + 3 * torch.randn(1, 1, 3, heads, width, generator=generator).to(dtype)
    q, k, _ = qkv.permute(2, 0, 3, 1, 4)
    if kv_heads is not None:
        k = k[:, :kv_heads]
    config = AttentionConfig(enable_gqa=kv_heads is not None)
    attention = BlockAttention(tokens, config, prefix, has_cls and prefix > 0, proportional)
    return View(3, 12, prefix, tokens, k, attention, q)


def check(view: View, rule: Rule) -> None:
    with torch.no_grad():
        assert fused.applies(rule, view)
    check_same(view, rule, fused.select_and_merge)


def check_same(view: View, rule: Any, select_and_merge: Callable[[Any, View], tuple[Tokens, Assignment | None]]) -> None:
    """The decision must be that of the reference."""
    with torch.no_grad():
        decision = rule(view)
        expected = view.tokens if decision is None else merge(view.tokens, decision)
        tokens, found = select_and_merge(rule, view)
    assert (found is None) == (decision is None)
    if found is None or decision is None:
        assert tokens is view.tokens
        return
    assert found.order.tolist() == decision.order.tolist()
    assert found.into.tolist() == decision.into.tolist()
    assert (found.length, found.lengths) == (decision.length, decision.lengths)
    assert tokens[4:] == expected[4:]  # merged, ragged, lengths, packed
    assert tokens.x.dtype == expected.x.dtype
    assert tokens.x.is_contiguous()
    tolerance = 1e-6 if view.tokens.x.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(tokens.x, expected.x, atol=tolerance, rtol=tolerance, equal_nan=True)
    assert torch.equal(tokens.size, expected.size)
    assert torch.equal(tokens.owner, expected.owner)
    assert tokens.origin.drops == expected.origin.drops


def rules() -> st.SearchStrategy[Rule]:
    matching: dict[str, Any] = {
        "kind": st.sampled_from(["keys", "tokens"]),
        "by_size": st.booleans(),
        "size_weight": st.sampled_from([0.0, 0.25, 0.5, 1.0]),
        "attention_weight": st.sampled_from([0.0, 0.5, 2.0]),
    }
    theta = st.floats(-2.0, 0.99)
    return st.one_of(
        st.builds(TopRule, r=st.integers(0, 20), **matching),
        st.builds(ThresholdRule, theta=theta, batch=st.sampled_from(["mean", "each"]), **matching),
    )


@settings(max_examples=400, deadline=None)
@given(
    rules(), st.integers(1, 5), st.integers(0, 33), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans(),
    st.integers(0, 2**31),
)  # fmt: skip
def test_every_rule(
    rule: Rule, batch: int, patches: int, prefix: int, sizes: int, proportional: bool, has_cls: bool, seed: int
) -> None:
    check(make_view(batch, patches, prefix, seed, sizes=sizes, proportional=proportional, has_cls=has_cls), rule)


@settings(max_examples=200, deadline=None)
@given(rules(), st.integers(2, 5), st.integers(1, 33), st.integers(0, 3), st.booleans(), st.integers(0, 2**31))
def test_packed_images(rule: Rule, batch: int, patches: int, prefix: int, proportional: bool, seed: int) -> None:
    view = make_view(batch, patches, prefix, seed, sizes=3, lengths=True, proportional=proportional)
    if view.tokens.ragged and (isinstance(rule, TopRule) or rule.batch == "mean"):
        assert not fused.applies(rule, view)  # the reference says what is wrong
    else:
        check(view, rule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["keys", "tokens"])
@pytest.mark.parametrize("lengths", [False, True])
def test_half_precision(dtype: torch.dtype, kind: Any, lengths: bool) -> None:
    for seed in range(20):
        view = make_view(3, 31, 1, seed, sizes=3, dtype=dtype, lengths=lengths)
        check(view, ThresholdRule(kind, seed % 2 == 0, 0.5, 0.5, theta=0.3, batch="each"))


def test_grouped_query_attention() -> None:
    for seed in range(5):
        check(make_view(2, 20, 1, seed, heads=4, kv_heads=2), TopRule("keys", attention_weight=1.0, r=6))


@pytest.mark.parametrize("kind", ["keys", "tokens"])
@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 6, 12, 16])
def test_ties(kind: Any, by_size: bool, heads: int) -> None:
    """Tokens that repeat: many cosines are 1, up to the last bit, and positions decide. So every bit must be the same."""
    view = make_view(3, 40, 1, 0, heads=heads, width=64)
    x = view.tokens.x[:, :5].repeat(1, 9, 1)[:, :41].contiguous()
    k = view.k[:, :, :5].repeat(1, 1, 9, 1)[:, :, :41]
    view = View(3, 12, 1, view.tokens._replace(x=x), k, view.attention, view.q)
    for r in (1, 3, 7, 20):
        check(view, TopRule(kind, by_size, r=r))
    for theta in (-0.5, 0.5, 0.9):
        check(view, ThresholdRule(kind, by_size, theta=theta, batch="each"))


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, 1e30, 1e-30])
@pytest.mark.parametrize("kind", ["keys", "tokens"])
def test_extreme_values(value: float, kind: Any) -> None:
    view = make_view(3, 30, 1, 1)
    for position in (1, 2, 7):
        view.tokens.x[1, position] = value
        view.k[1, :, position] = value
    for weight in (0.0, 0.5):
        check(view, TopRule(kind, size_weight=weight, attention_weight=weight, r=6))
        check(view, ThresholdRule(kind, attention_weight=weight, theta=0.5, batch="each"))
        check(view, ThresholdRule(kind, True, weight, theta=0.5))
    view.tokens.x[2] = value  # a whole image
    view.k[2] = value
    for by_size in (False, True):
        check(view, TopRule(kind, by_size, r=6))
        check(view, ThresholdRule(kind, by_size, 0.5, theta=0.5, batch="each"))


def test_large_batches_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "MAX_COSINES", 500)
    for batch in (1, 4, 9):
        check(make_view(batch, 40, 1, batch, sizes=3), ThresholdRule("tokens", False, 0.5, 0.5, theta=0.4))
        check(make_view(batch, 40, 1, batch, sizes=3), TopRule("keys", r=9))


def test_large_batches_of_cheap_rules_are_left_to_pytorch() -> None:
    """The kernels run in one thread: with weights they are faster all the same."""
    view = make_view(8, 196, 1, 0)
    wide = view.tokens._replace(x=torch.empty(8, 197, 1536))
    view = View(3, 12, 1, wide, view.k, view.attention, view.q)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert not fused.applies(TopRule("keys", r=8), view)
        assert fused.applies(TopRule("keys", size_weight=0.5, r=8), view)
        assert fused.applies(ThresholdRule("keys", theta=0.9, batch="each"), view)
    finally:
        torch.set_num_threads(threads)


def test_keys_of_any_layout() -> None:
    view = make_view(2, 30, 1, 0)
    layouts: list[Callable[[Tensor], Tensor]] = [
        Tensor.contiguous,
        lambda k: k.transpose(2, 3).contiguous().transpose(2, 3),
        lambda k: k.contiguous()[:, :, :, :4],
    ]
    for change in layouts:
        q, k = change(view.q), change(view.k)  # type: ignore[arg-type]
        check(View(3, 12, 1, view.tokens, k, view.attention, q), TopRule("keys", attention_weight=0.5, r=5))


def test_the_trace_gets_the_same() -> None:
    rule = ThresholdRule("keys", True, 0.5, 0.5, theta=0.2, batch="each")
    for lengths in (False, True):
        view = make_view(3, 20, 1, 5, sizes=2, lengths=lengths)
        ledgers = Ledger(), Ledger()
        views = [View(3, 12, 1, view.tokens, view.k, view.attention, view.q, ledger=ledger) for ledger in ledgers]
        with torch.no_grad():
            rule(views[0])
            fused.select_and_merge(rule, views[1])
        expected, found = ledgers
        assert [m.tolist() for m in found.macs] == [m.tolist() for m in expected.macs]
        assert found.pairs is not None
        assert expected.pairs is not None
        shown = found.pairs.score > -torch.inf
        assert torch.equal(shown, expected.pairs.score > -torch.inf)
        assert torch.equal(found.pairs.target[shown], expected.pairs.target[shown])
        torch.testing.assert_close(found.pairs.score, expected.pairs.score, atol=1e-6, rtol=1e-6)
