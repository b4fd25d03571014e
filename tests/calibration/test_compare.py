"""All methods at one cost and the stress test, on the embedded model and images."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tokenmerge as tm
from tests.helpers import cli
from tokenmerge.calibration.cell import BASELINES
from tokenmerge.calibration.clock import Clock
from tokenmerge.calibration.compare import Comparison
from tokenmerge.engine.patch import is_applied, shared_weights_copy
from tokenmerge.evaluation import bench
from tokenmerge.evaluation.reference import Reference
from tokenmerge.methods import METHODS

SOLVABLE = [name for name, cls in METHODS.items() if cls.has_strength()]


def test_all_training_free_methods_but_the_baseline_can_be_solved() -> None:
    assert {name for name, cls in METHODS.items() if not cls.trained} - set(SOLVABLE) == {"NoMerge"}


@pytest.fixture(scope="module")
def embedded() -> tuple[nn.Module, tm.Images]:
    return tm.load_model("embedded"), tm.load_images("embedded", limit=40)


@pytest.mark.parametrize("name", SOLVABLE)
def test_every_method_meets_the_budget(embedded: tuple[nn.Module, tm.Images], name: str) -> None:
    """Within 1 % of the budget; the weakest config does little, the strongest a lot."""
    model, images = embedded
    comparison = Comparison(model, images, sample=4, batch_size=18)
    cell = comparison.at(name, 0.6)
    assert cell.ratio == pytest.approx(0.6, abs=0.006)
    assert cell.images == 36
    depth, tokens = comparison.reference.depth, comparison.reference.tokens
    weak, strong = (comparison.few.measure(METHODS[name].at_strength(s, depth, tokens)).ratio for s in (0.0, 1.0))
    assert strong < 0.5
    assert 0.85 < weak <= 1


def test_compare_is_the_same_images_and_can_be_resumed(embedded: tuple[nn.Module, tm.Images], tmp_path: Path) -> None:
    model, images = embedded
    asked: list[str] = []
    names = ["ToMe", "RandomMerge", "mine=ATM(1.0, 0.03, 0.9)"]
    options = {"sample": 4, "batch_size": 18, "resume": tmp_path}

    def progress(what: str, done: int = 1, total: int | None = None) -> None:
        asked.append(what)

    cells = tm.compare(model, images, names, [0.7, 0.5], progress=progress, **options)
    assert [c.name for c in cells] == [*BASELINES, "ToMe", "RandomMerge", "ToMe", "RandomMerge", "mine"]
    assert asked == [*BASELINES, "ToMe at 70%", "RandomMerge at 70%", "ToMe at 50%", "RandomMerge at 50%", "mine"]
    assert cells[0].ratio == 1
    assert cells[0].distance == pytest.approx(0, abs=1e-9)
    assert cells[0].agreement == cells[1].agreement == 1
    assert cells[2].distance < cells[3].distance, "chance should be worse than similarity"
    # What a cell says is what `evaluate` finds on the same images.
    _, unseen = images.split(4, seed=0)
    result = tm.evaluate(model, unseen, [cells[2].method], batch_size=18)[1]
    assert (result.gmacs_ratio, result.top1) == (pytest.approx(cells[2].ratio), pytest.approx(cells[2].top1))
    assert result.distance == pytest.approx(cells[2].distance, rel=1e-4)

    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    (tmp_path / "cells.jsonl").write_text("\n".join(lines[:-2]) + "\n" + lines[-1][:20])  # one lost, one half written
    asked.clear()
    assert tm.compare(model, images, names, [0.7, 0.5], progress=progress, **options) == cells
    assert asked == ["RandomMerge at 50%", "mine"]
    other = tm.load_images("embedded", limit=30)
    with pytest.raises(ValueError, match="another model, other images or options"):
        tm.compare(model, other, ["ToMe"], [0.7], **options)
    unlabelled = tm.Images.of(torch.cat([batch.images for batch in images.batches(40)]))
    with pytest.raises(ValueError, match="another model, other images or options"):
        tm.compare(model, unlabelled, ["ToMe"], [0.7], **options)


def test_a_budget_out_of_reach_is_said_so(embedded: tuple[nn.Module, tm.Images]) -> None:
    model, images = embedded
    few = {"sample": 4, "batch_size": 18, "measure": 6}
    cells = tm.compare(model, images, ["ToMe", "PPT"], [0.97, 0.2], **few)
    assert [c.met for c in cells] == [True, True, False, False, True, False]
    assert all(c.images == 6 for c in cells)
    assert cells[2].ratio == cells[1].ratio, "the weakest config is the CLS-only last layer"


def test_speedups_are_relative_to_the_unpatched_baseline(
    embedded: tuple[nn.Module, tm.Images], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that charges by GMACs, and 10 % more for a patched model: the baseline's speed-up is 1 by construction,
    and the others rank by their cost."""
    model, images = embedded
    monkeypatch.setattr(bench, "seconds_of", seconds_by_macs)
    baseline, cls_only, tome = tm.compare(model, images, ["ToMe"], [0.5], timing_rounds=2, sample=4, batch_size=18)
    assert baseline.speedup == 1
    assert baseline.images_per_second == pytest.approx(1 / baseline.gmacs, rel=0.01)
    assert cls_only.speedup == pytest.approx(1 / 1.1 / cls_only.ratio, rel=0.01)
    assert tome.speedup == pytest.approx(1 / 1.1 / tome.ratio, rel=0.01)


def seconds_by_macs(run: nn.Module, chunks: Sequence[Tensor], threads: int) -> float:
    """In place of `seconds_of`: a second per GMAC, and 10 % more for a patched model."""
    patched = is_applied(run)
    model = run if patched else tm.apply(shared_weights_copy(run), tm.NoMerge(last_layer="full"))
    with tm.trace(model, detail=False) as t:
        for chunk in chunks:
            model(chunk)
    return float(t.cost("paper").per_image.sum()) * (1.1 if patched else 1.0)


def test_methods_are_solved_for_time(
    embedded: tuple[nn.Module, tm.Images], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a clock on which time is the ratio of GMACs, squared, and at least a fifth."""
    model, images = embedded
    timed: list[tm.Method] = []

    def time_ratio(self: Clock, method: tm.Method) -> float:
        timed.append(method)
        assert (self.runtime, self.batch, self.chunks[0].shape[0]) == ("eager", 4, 4)
        return max(Reference(model, images.take(range(4))).measure(method).ratio ** 2, 0.2)

    monkeypatch.setattr(Clock, "time_ratio", time_ratio)
    options = {"sample": 8, "measure": 8, "batch": 4, "resume": tmp_path}
    *_, tome, evit = tm.compare(model, images, ["ToMe", "EViT"], times=[0.5], **options)
    for cell in (tome, evit):
        assert (cell.budget, cell.budget_in, cell.met) == (0.5, "time", True)
        assert cell.ratio == pytest.approx(0.5**0.5, abs=0.03)
    timed.clear()
    assert tm.compare(model, images, ["ToMe"], times=[0.5], **options)[-1] == tome
    assert not timed, "cells are kept"
    (*_, strong) = tm.compare(model, images, ["ToMe"], times=[0.02], **options)
    assert not strong.met


def test_stress_finds_the_edge(embedded: tuple[nn.Module, tm.Images]) -> None:
    """With labels, top-1 does not fall; without, predictions do not change. Chance loses sooner than similarity."""
    model, images = embedded
    base, tome, control = tm.stress(model, images, ["ToMe", "RandomMerge"], sample=1, batch_size=20)
    assert base.top1 is not None
    assert tome.top1 is not None
    assert tome.top1 >= base.top1
    assert tome.ratio < 0.9
    assert control.ratio > tome.ratio, "chance should lose sooner"
    unlabelled = tm.Images.of(torch.cat([batch.images for batch in images.batches(40)]))
    _, kept = tm.stress(model, unlabelled, ["ToMe"], min_agreement=1.0, sample=1, batch_size=20)
    assert kept.agreement == 1
    assert kept.top1 is None


def test_bad_input(embedded: tuple[nn.Module, tm.Images]) -> None:
    model, images = embedded
    with pytest.raises(ValueError, match="unknown method 'Tome'"):
        tm.compare(model, images, ["Tome"], [0.7])
    with pytest.raises(ValueError, match="no reduction strength"):
        tm.compare(model, images, ["NoMerge"], [0.7])
    with pytest.raises(ValueError, match="'ToMe' cannot be calibrated; known: ATM, DiffRate"):
        tm.compare(model, images, ["calibrated ToMe"], [0.7])
    with pytest.raises(ValueError, match=r"fractions of the baseline's GMACs or time, in \(0, 1\], not 70"):
        tm.compare(model, images, ["ToMe"], [70.0])
    with pytest.raises(ValueError, match="cannot read the method 'import os'"):
        tm.compare(model, images, ["mine=import os"], [0.7])
    with pytest.raises(ValueError, match=r"unknown method 'ToMe\(r=8\)'"):
        tm.compare(model, images, ["ToMe(r=8)"], [0.7])


@pytest.mark.slow
def test_rates_of_diffrate_are_found(embedded: tuple[nn.Module, tm.Images]) -> None:
    """The search beats the plain schedule at the same cost, on images that it did not see."""
    model, images = embedded
    comparison = Comparison(model, images, sample=12, batch_size=14, rounds=1)
    plain, found = comparison.at("DiffRate", 0.6), comparison.at("calibrated DiffRate", 0.6)
    assert found.ratio == pytest.approx(0.6, abs=0.01)
    assert found.distance < plain.distance
    assert isinstance(found.method, tm.DiffRate)


def test_command_line(tmp_path: Path) -> None:
    base = ("embedded", "embedded", "--limit", 20, "--batch-size", 10)
    out = tmp_path / "a"
    done = cli("compare", *base, "--out", out, "--method", "ToMe", "--gmacs", 0.6, "--timing-rounds", 1)
    assert done.returncode == 0, done.stderr
    assert "ToMe" in done.stdout
    rows = list(csv.DictReader((out / "compared.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == [*BASELINES, "ToMe"]
    assert (out / "compared.png").stat().st_size > 5000
    done = cli("stress", *base, "--out", tmp_path / "b", "--method", "ToMe", "--json")
    assert done.returncode == 0, done.stderr
    assert [row["method"] for row in json.loads(done.stdout)] == ["baseline", "ToMe"]
    done = cli("compare", *base, "--out", tmp_path / "c", "--method", "ToMee")
    assert done.returncode == 2
    assert not (tmp_path / "c").exists()
