"""The paper's rows."""

from __future__ import annotations

import pytest

import tokenmerge as tm
from tokenmerge.methods.presets import paper_rows, rows_of


def test_all_rows_are_there_and_in_the_papers_ranges() -> None:
    rows = paper_rows()
    counts = {name: sum(r.model == name and r.table != "A3" for r in rows) for name in {r.model for r in rows}}
    assert counts == {
        "deit_tiny_patch16_224": 14,
        "deit_small_patch16_224": 16,
        "deit_base_patch16_224": 15,
        "lvvit_t": 14,
        "lvvit_s": 14,
        "lvvit_m": 16,
        "t2t_vit_t_14": 15,
        "t2t_vit_t_19": 18,
        "vit_base_patch16_224.mae": 19,
    }
    assert sum(r.table == "A3" for r in rows) == 45
    for row in rows:
        if not row.is_baseline:
            assert row.alpha is not None
            assert row.beta is not None
            assert row.theta_min is not None
            assert 0.945 <= row.alpha <= 1
            assert 0.015 <= row.beta <= 0.05
            assert 0.8 <= row.theta_min <= 0.945
            baseline = rows_of(row.model, row.table)[0]
            assert baseline.is_baseline
            assert row.gmacs < baseline.gmacs


def test_preset_takes_the_nearest_row_at_or_below() -> None:
    assert tm.ATM.preset("deit_small_patch16_224", gmacs=3.0) == tm.ATM(1, 0.05, 0.855)
    assert tm.ATM.preset("deit_small_patch16_224", gmacs=3.04) == tm.ATM(0.99, 0.04, 0.86)
    assert tm.ATM.preset("deit_tiny_patch16_224", gmacs=0.9) == tm.ATM(1, 0.035, 0.88)


def test_lossless_at_the_printed_precision_is_table_1() -> None:
    """0.93, 3.23 and 13.89 GMACs, which Table 1 prints as 0.9, 3.2 and 13.9."""
    assert tm.ATM.preset("deit_tiny_patch16_224", lossless=True) == tm.ATM(0.985, 0.025, 0.885)
    assert tm.ATM.preset("deit_small_patch16_224.fb_in1k", lossless=True) == tm.ATM(0.985, 0.045, 0.88)
    assert tm.ATM.preset("deit_base_patch16_224", lossless=True) == tm.ATM(1, 0.025, 0.89)


def test_lossless_with_two_decimals() -> None:
    def strict(model: str) -> tm.ATM:
        return tm.ATM.preset(model, lossless=True, tolerance=0)

    assert strict("deit_tiny_patch16_224") == tm.ATM(0.995, 0.025, 0.895)
    assert strict("deit_small_patch16_224.fb_in1k") == tm.ATM(0.99, 0.02, 0.875)
    assert strict("deit_base_patch16_224") == tm.ATM(0.995, 0.015, 0.89)
    assert strict("t2t_vit_t_19") == tm.ATM(0.985, 0.045, 0.94)


def test_mae_goes_without_proportional_attention_and_last_layer_trick() -> None:
    assert tm.ATM.preset("vit_base_patch16_224.mae", gmacs=11.5) == tm.ATM(
        0.96, 0.03, 0.82, prop_attn=False, last_layer="full"
    )


def test_mae_by_our_name_is_mae_by_timms() -> None:
    same = tm.ATM.preset("vit_base_patch16_224.mae", gmacs=11.5)
    assert tm.ATM.preset("mae_vit_base_patch16", gmacs=11.5) == same
    assert not same.prop_attn


def test_options_pass_through() -> None:
    assert tm.ATM.preset("lvvit_s", gmacs=4, batch="each").batch == "each"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: tm.ATM.preset("resnet50", gmacs=1), "deit_tiny_patch16_224"),
        (lambda: tm.ATM.preset("deit_tiny_patch16_224", gmacs=0.5), "the lowest has 0.71"),
        (lambda: tm.ATM.preset("deit_tiny_patch16_224"), "either"),
        (lambda: tm.ATM.preset("deit_tiny_patch16_224", gmacs=1, lossless=True), "either"),
        (lambda: tm.ATM.preset("vit_base_patch16_224.mae", lossless=True, tolerance=0), "the nearest is 83.67"),
    ],
)
def test_errors_say_what_to_do(call, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
