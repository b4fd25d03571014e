"""The CUDA kernels against matching.py and tokens.py. test_triton.py runs this file in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.core.test_fused import check_same, make_view
from tokenmerge.core.matching import PairRule, ThresholdRule, TopRule

RULES: list[PairRule] = [
    TopRule("keys", r=5),
    TopRule("tokens", True, 0.5, 0.5, r=7),
    TopRule("keys", False, 1.0, 0.0, r=40),
    ThresholdRule("keys", theta=0.5),
    ThresholdRule("tokens", True, 0.25, 1.0, theta=0.1),
    ThresholdRule("tokens", theta=0.7, batch="each"),
    ThresholdRule("keys", True, 0.5, 0.5, theta=0.2, batch="each"),
    ThresholdRule("tokens", False, 0.25, 0.5, theta=0.6, batch="each"),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def cuda() -> Any:
    return import_module("tokenmerge.core.kernels.cuda")


def merges_per_image(rule: PairRule) -> bool:
    return isinstance(rule, ThresholdRule) and rule.batch == "each"


@pytest.mark.parametrize(
    ("rule", "lengths"), [(rule, lengths) for rule in RULES for lengths in {False, merges_per_image(rule)}], ids=repr
)
def test_equals_the_reference(rule: PairRule, lengths: bool) -> None:
    for seed, (batch, patches, prefix) in enumerate([(1, 33, 1), (3, 21, 2), (2, 4, 0), (4, 1, 1)]):
        view = make_view(batch, patches, prefix, seed, sizes=3, lengths=lengths)
        check_same(view, rule, cuda().select_and_merge)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    for seed, rule in enumerate(RULES):
        view = make_view(2, 17, 1, seed, sizes=3, dtype=dtype, lengths=merges_per_image(rule))
        check_same(view, rule, cuda().select_and_merge)


def test_nan_and_repeated_tokens() -> None:
    view = make_view(3, 30, 1, 1)
    for position in (1, 2, 7):
        view.tokens.x[1, position] = math.nan
    view.tokens.x[2, 3:] = view.tokens.x[2, 3]
    view.tokens.x[0, 3:9] = 0
    check_same(view, ThresholdRule("tokens", theta=0.5, batch="each"), cuda().select_and_merge)
    check_same(view, ThresholdRule("tokens", theta=2.0, batch="each"), cuda().select_and_merge)  # nothing merges


def test_rope_and_no_cls_token() -> None:
    view = make_view(2, 16, 1, 0, has_cls=False)
    check_same(view, TopRule("keys", attention_weight=0.5, r=4), cuda().select_and_merge)


@every_rule
def test_at_most_eight_launches_and_one_sync(rule: PairRule, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = cuda()
    launches: list[str] = []
    syncs: list[int] = []
    launch, on_host = kernels.launch, kernels.on_host
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, *a, **k: (launches.append(kernel.__name__), launch(kernel, *a, **k))
    )
    monkeypatch.setattr(kernels, "on_host", lambda counts: (syncs.append(1), on_host(counts))[1])
    view = make_view(3, 21, 1, 4, sizes=3, lengths=merges_per_image(rule))
    with torch.no_grad(), torch.profiler.profile() as profile:
        _, decision = kernels.select_and_merge(rule, view)
    assert decision is not None
    products = [e.name for e in profile.events() if e.name == "aten::bmm"]
    assert len(products) == 1
    assert len(launches) + len(products) <= 8
    assert len(set(launches)) == len(launches)
    assert len(syncs) == (0 if isinstance(rule, TopRule) else 1)
