"""Every number that we took from the paper, against its LaTeX: presets, Tables 1 to 4, A1 to A5."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.conftest import ROOT
from tests.reproduce.latex import Table, printed_tables
from tokenmerge.methods.presets import SAME_WEIGHTS, paper_rows
from tokenmerge.reproduce import find
from tokenmerge.reproduce.published import PUBLISHED

LATEX = ROOT.parent / "shared" / "paper" / "adaptive-token-merging.tex"
MODEL = {
    "DeiT-T": "deit_tiny_patch16_224",
    "DeiT-S": "deit_small_patch16_224",
    "DeiT-B": "deit_base_patch16_224",
    "LV-ViT-T": "lvvit_t",
    "LV-ViT-S": "lvvit_s",
    "LV-ViT-M": "lvvit_m",
    "T2T-ViTt-14": "t2t_vit_t_14",
    "T2T-ViTt-19": "t2t_vit_t_19",
    "MAE": "mae_vit_base_patch16",
}
METHOD = {"Zero-TP": "ZeroTPrune"}


@pytest.fixture(scope="module")
def tables() -> dict[str, Table]:
    if not LATEX.is_file():
        pytest.skip("the paper's LaTeX is not next to the checkout (../shared/paper)")
    return printed_tables(LATEX.read_text(encoding="utf-8"))


def by_model(table: Table, name_column_is_last: bool) -> Iterator[tuple[str, list[str]]]:
    """(model, cells) of each row. A model's name is in the first or in the last of its rows, where LaTeX's multirow is."""
    group: list[list[str]] = []
    name = ""
    for cells in table:
        if name_column_is_last:
            group.append(cells)
            if cells[0]:
                yield from ((MODEL[cells[0]], row) for row in group)
                group = []
        else:
            name = cells[0] or name
            yield MODEL[name], cells


def test_the_numbering_is_that_of_print(tables: dict[str, Table]) -> None:
    assert list(tables) == ["1", "2", "3", "4", "A1", "A2", "A3", "A4", "A5"]
    head = {number: " ".join(table[0]) for number, table in tables.items()}
    assert "Params (M) Top-1 Acc. (%) GFLOPs" in head["1"]
    assert "ls 0 1 2" in head["3"]
    assert "Training Time (hours)" in head["4"]
    assert "Batch Size 1 2 4" in head["A1"]
    assert tables["A3"][1][0] == "DeiT-T"


@pytest.mark.parametrize("number", ["A2", "A3", "A4", "A5"])
def test_full_results(tables: dict[str, Table], number: str) -> None:
    ours = [row for row in paper_rows() if row.table == number]
    printed = list(by_model(tables[number][1:], name_column_is_last=False))
    assert len(printed) == len(ours)
    for (model, cells), row in zip(printed, ours, strict=True):
        assert SAME_WEIGHTS.get(model, model) == row.model
        parameters = [None if cell == "-" else float(cell) for cell in cells[1:4]]
        assert parameters == [row.alpha, row.beta, row.theta_min], cells
        assert [float(cells[4]), float(cells[5])] == [row.gmacs, row.top1], cells


def baselines(model: str) -> tuple[float, float]:
    """GMACs and top-1 of the baseline."""
    row = next(row for row in paper_rows() if row.model == SAME_WEIGHTS.get(model, model) and row.is_baseline)
    return row.gmacs, row.top1


def paper_of(name: str) -> ModuleType:
    return find(name)


def test_table_1(tables: dict[str, Table]) -> None:
    ours = paper_of("table1").PAPER
    seen: dict[str, dict[str, tuple[float, float]]] = {}
    for model, (_, method, params, top1, cost) in by_model(tables["1"][1:], name_column_is_last=True):
        gmacs, top1_here = baselines(model)
        assert float(params) == PUBLISHED[model].params
        assert float(top1) == pytest.approx(top1_here, abs=0.0501)  # nothing is lost at one decimal
        if method == "Baseline":
            assert float(cost) == pytest.approx(gmacs, abs=0.0501)
            continue
        match = re.fullmatch(r"([\d.]+) \((-\d+)%\)", cost)
        assert match, cost
        seen.setdefault(model, {})[METHOD.get(method, method)] = (float(match[1]), int(match[2]) / 100)
    assert seen == ours


def test_table_2(tables: dict[str, Table]) -> None:
    ours = paper_of("table2").PAPER
    seen: dict[str, dict[str, tuple[float, float]]] = {}
    lost: dict[tuple[str, str], str] = {}
    for model, (_, method, cost, params, top1) in by_model(tables["2"][1:], name_column_is_last=True):
        assert float(params) == PUBLISHED[model].params
        match = re.fullmatch(r"([\d.]+)(?: \((-[\d.]*)\))?", top1)
        assert match, top1
        if method == "Baseline":
            base = float(match[1])
            assert (float(cost), base) == pytest.approx(baselines(model), abs=0.0501)
            continue
        name = METHOD.get(method, method)
        seen.setdefault(model, {})[name] = (float(cost), float(match[1]))
        lost[model, name] = match[2]
    assert seen == ours
    # The change that is printed is the difference of the printed numbers, as our change_paper is.
    for (model, name), change in lost.items():
        base = round(baselines(model)[1] + 1e-9, 1)
        assert round(ours[model][name][1] - base, 1) == (0 if change == "-" else float(change))


@pytest.mark.parametrize(
    ("number", "name", "counts"), [("3", "table3", range(13)), ("A1", "tableA1", [2**i for i in range(11)])]
)
def test_sensitivity(tables: dict[str, Table], number: str, name: str, counts: list[int]) -> None:
    head, top1, gmacs = tables[number]
    assert [int(cell) for cell in head[1:]] == list(counts)
    assert [(float(a), float(b)) for a, b in zip(top1[1:], gmacs[1:], strict=True)] == list(paper_of(name).PAPER)
    # The one row of the full results with the accuracy and cost of the default has the parameters that we infer.
    alpha, beta, theta_min = paper_of("table3").CONFIG
    rows = [row for row in paper_rows() if row.table == "A2" and (row.top1, row.gmacs) == (79.76, 3.23)]
    assert [(row.alpha, row.beta, row.theta_min) for row in rows] == [(alpha, beta, theta_min)]
    assert (79.76, 3.23) in paper_of(name).PAPER


def test_table_4(tables: dict[str, Table]) -> None:
    module = paper_of("table4")
    ours = {name: (gmacs, top1, epochs, hours) for name, gmacs, top1, epochs, hours in module.OTHERS}
    seen = {}
    for method, cost, top1, epochs, hours in tables["4"][1:]:
        if "Baseline" in method:
            assert (float(cost), float(top1)) == pytest.approx(baselines("deit_small_patch16_224"), abs=0.0501)
            continue
        numbers = float(cost), float(top1.split(" ")[0])
        if method == "ATM":
            expected = module.TRAINING_FREE if epochs == "0" else module.FINETUNED
            assert numbers == expected
            assert (epochs, hours) == (("0", "-") if epochs == "0" else ("30", "11"))
            continue
        seen[method] = (*numbers, int(epochs), None if hours == "-" else int(hours))
    assert seen == ours


def test_a_wrong_digit_is_noticed(tables: dict[str, Table]) -> None:
    """The comparison itself works: digits that are transposed in one cell do not pass."""
    broken = {number: [list(row) for row in table] for number, table in tables.items()}
    assert broken["A2"][5][4] == "0.93"
    broken["A2"][5][4] = "0.39"
    with pytest.raises(AssertionError):
        test_full_results(broken, "A2")
