"""GMACs of the published methods on DeiT-T/S/B, as their authors print them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch

import tokenmerge as tm

T, S, B = "deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"
DIFFRATE_S = tm.DiffRate(  # the authors' rates for 2.9 and 11.5 GMACs
    [197, 196, 190, 168, 150, 139, 129, 117, 99, 78, 58, 3], [197, 194, 176, 156, 141, 133, 121, 107, 88, 64, 56, 3]
)
DIFFRATE_B = tm.DiffRate(
    [197, 197, 197, 188, 170, 154, 139, 123, 107, 72, 43, 3], [197, 197, 192, 178, 158, 145, 127, 111, 94, 50, 35, 3]
)
PUBLISHED = [
    *[(S, tm.EViT(keep), "paper", gmacs, 1) for keep, gmacs in ((0.9, 4.0), (0.8, 3.5), (0.7, 3.0), (0.6, 2.6), (0.5, 2.3))],
    *[(S, tm.ToMe(r), "paper", gmacs, 2) for r, gmacs in ((8, 3.42), (11, 2.99), (13, 2.70), (16, 2.29))],
    (T, tm.MCTF(16), "fvcore", 0.71, 2),
    (S, tm.MCTF(16), "fvcore", 2.60, 2),
    (S, tm.MCTF(0.35, layers=[4, 7, 10]), "fvcore", 2.76, 2),
    (S, tm.PPT(50), "paper", 2.94, 2),
    (S, DIFFRATE_S, "macs", 2.905, 3),
    (B, DIFFRATE_B, "macs", 11.517, 3),
    (B, tm.ToMe(1), "paper", 17.0, 1),
]


@pytest.mark.parametrize(("name", "method", "convention", "gmacs", "digits"), PUBLISHED)
def test_published_cost(name: str, method: tm.Method, convention: Any, gmacs: float, digits: int) -> None:
    """To the printed digit, the last layer in full, in the convention of who published it: fvcore sees the product that
    compares tokens, formulas leave it out. (Of ToMe's, the paper prints r = 13 as 2.7; the others are its formula.)"""
    model = tm.apply(timm.create_model(name).eval(), replace(method, last_layer="full"))
    with torch.inference_mode(), tm.trace(model, detail=False) as t:
        model(torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    cost = t.cost(convention)
    found = cost.gmacs - (0 if convention == "fvcore" else cost.matching_gmacs)
    if isinstance(method, tm.DiffRate):  # its formula embeds the class token as if it were a patch
        found += model.embed_dim * 768 / 1e9
    assert round(found, digits) == gmacs
