"""All methods at one cost, the stress test, and a method of a stranger, on the embedded model and images."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tokenmerge as tm
from tests.contract import test_contract as contract
from tests.contract.table import HOSTS
from tokenmerge import methods as known
from tokenmerge.cli import app
from tokenmerge.comparing import BASES, Comparison, compare, stress
from tokenmerge.joining import arrange
from tokenmerge.methods.base import Method, View
from tokenmerge.tokens import Assignment

KNOBS = [name for name in known.METHODS if name != "NoMerge"]


@pytest.fixture(scope="module")
def embedded() -> tuple[nn.Module, tm.Images]:
    return tm.load_model("embedded"), tm.load_images("embedded", limit=40)


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_finds_the_budget(embedded: tuple[nn.Module, tm.Images], name: str) -> None:
    """Within 1 % of what was asked for; the weakest setting does little, the strongest a lot."""
    model, images = embedded
    comparison = Comparison(model, images, sample=4, batch_size=18)
    cell = comparison.at(name, 0.6)
    assert cell.ratio == pytest.approx(0.6, abs=0.006)
    assert cell.images == 36
    depth, tokens = comparison.reference.depth, comparison.reference.tokens
    weak, strong = (
        float(comparison.few.measure(known.METHODS[name].at_strength(s, depth, tokens)).ratio.mean()) for s in (0.0, 1.0)
    )
    assert strong < 0.5
    assert 0.85 < weak <= 1


def test_compare_is_the_same_images_and_can_be_resumed(embedded: tuple[nn.Module, tm.Images], tmp_path: Path) -> None:
    model, images = embedded
    asked: list[str] = []
    names = ["ToMe", "RandomMerge", "mine=ATM(1.0, 0.03, 0.9)"]
    options = {"sample": 4, "batch_size": 18, "folder": tmp_path}
    cells = compare(model, images, names, [0.7, 0.5], progress=asked.append, **options)
    assert [c.method for c in cells] == [*BASES, "ToMe", "RandomMerge", "ToMe", "RandomMerge", "mine"]
    assert asked == [*BASES, "ToMe at 70%", "RandomMerge at 70%", "ToMe at 50%", "RandomMerge at 50%", "mine"]
    assert cells[0].ratio == 1
    assert cells[0].distance == pytest.approx(0, abs=1e-9)
    assert cells[0].agreement == cells[1].agreement == 1
    assert cells[2].distance < cells[3].distance, "chance should be worse than similarity"
    # What a cell says is what `evaluate` finds on the same images.
    _, unseen = images.split(4, seed=0)
    result = tm.evaluate(model, unseen, [tm.parse(cells[2].setting)], batch_size=18)[1]
    assert (result.gmacs_ratio, result.top1) == (pytest.approx(cells[2].ratio), pytest.approx(cells[2].top1))
    assert result.distance == pytest.approx(cells[2].distance, rel=1e-4)

    lines = (tmp_path / "cells.jsonl").read_text().splitlines()
    (tmp_path / "cells.jsonl").write_text("\n".join(lines[:-2]) + "\n" + lines[-1][:20])  # one lost, one half written
    asked.clear()
    assert compare(model, images, names, [0.7, 0.5], progress=asked.append, **options) == cells
    assert asked == ["RandomMerge at 50%", "mine"]
    other = tm.load_images("embedded", limit=30)
    with pytest.raises(ValueError, match="another model, other images or options"):
        compare(model, other, ["ToMe"], [0.7], **options)
    unlabelled = tm.Images.of(torch.cat([batch.images for batch in images.batches(40)]))
    with pytest.raises(ValueError, match="another model, other images or options"):
        compare(model, unlabelled, ["ToMe"], [0.7], **options)


def test_a_budget_out_of_reach_is_said_so(embedded: tuple[nn.Module, tm.Images]) -> None:
    model, images = embedded
    few = {"sample": 4, "batch_size": 18, "measure": 6}
    cells = compare(model, images, ["ToMe", "PPT"], [0.97, 0.2], **few)
    assert [c.met for c in cells] == [True, True, False, False, True, False]
    assert all(c.images == 6 for c in cells)
    assert cells[2].ratio == cells[1].ratio, "the weakest setting is the free last layer"


def test_timed_cells_have_a_speed(embedded: tuple[nn.Module, tm.Images]) -> None:
    model, images = embedded
    cells = compare(model, images, ["ToMe"], [0.5], speed_rounds=2, sample=4, batch_size=18)
    assert all(c.speedup is not None and c.speedup > 0 and c.images_per_second for c in cells)


def test_stress_finds_the_edge(embedded: tuple[nn.Module, tm.Images]) -> None:
    """With labels, top-1 does not fall; without, answers do not change. Chance loses sooner than similarity."""
    model, images = embedded
    base, tome, control = stress(model, images, ["ToMe", "RandomMerge"], sample=1, batch_size=20)
    assert base.top1 is not None
    assert tome.top1 is not None
    assert tome.top1 >= base.top1
    assert tome.ratio < 0.9
    assert control.ratio > tome.ratio, "chance should lose sooner"
    unlabelled = tm.Images.of(torch.cat([batch.images for batch in images.batches(40)]))
    _, kept = stress(model, unlabelled, ["ToMe"], keep=1.0, sample=1, batch_size=20)
    assert kept.agreement == 1
    assert kept.top1 is None


def test_bad_input(embedded: tuple[nn.Module, tm.Images]) -> None:
    model, images = embedded
    with pytest.raises(ValueError, match="unknown method 'Tome'"):
        compare(model, images, ["Tome"], [0.7])
    with pytest.raises(ValueError, match="no knob"):
        compare(model, images, ["NoMerge"], [0.7])
    with pytest.raises(ValueError, match="no search is known for 'ToMe'"):
        compare(model, images, ["calibrated ToMe"], [0.7])
    with pytest.raises(ValueError, match=r"fractions of the unmerged GMACs, in \(0, 1\], not 70"):
        compare(model, images, ["ToMe"], [70.0])
    with pytest.raises(ValueError, match="cannot read the method 'import os'"):
        compare(model, images, ["mine=import os"], [0.7])
    with pytest.raises(ValueError, match=r"unknown method 'ToMe\(r=8\)'"):
        compare(model, images, ["ToMe(r=8)"], [0.7])


@pytest.mark.slow
def test_rates_of_diffrate_are_found(embedded: tuple[nn.Module, tm.Images]) -> None:
    """The search beats the plain schedule at the same cost, on images that it did not see."""
    model, images = embedded
    comparison = Comparison(model, images, sample=12, batch_size=14, rounds=1)
    plain, found = comparison.at("DiffRate", 0.6), comparison.at("calibrated DiffRate", 0.6)
    assert found.ratio == pytest.approx(0.6, abs=0.01)
    assert found.distance < plain.distance
    assert isinstance(tm.parse(found.setting), tm.DiffRate)


def test_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke
    base = ["embedded", "embedded", "--limit", "20", "--batch-size", "10"]
    out = tmp_path / "a"
    done = run(app, ["compare", *base, "--out", str(out), "--method", "ToMe", "--gmacs", "0.6", "--speed-rounds", "1"])
    assert done.exit_code == 0, done.output
    assert "ToMe" in done.output
    rows = list(csv.DictReader((out / "compared.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == [*BASES, "ToMe"]
    assert (out / "compared.png").stat().st_size > 5000
    done = run(app, ["stress", *base, "--out", str(tmp_path / "b"), "--method", "ToMe", "--json"])
    assert done.exit_code == 0, done.output
    assert [row["method"] for row in json.loads(done.stdout)] == ["unmerged", "ToMe"]
    done = run(app, ["compare", *base, "--out", str(tmp_path / "c"), "--method", "ToMee"])
    assert done.exit_code == 2
    assert not (tmp_path / "c").exists()


@dataclass(frozen=True, repr=False)
class KeepFirst(Method):
    """A stranger's method, all of it: keeps the first patches."""

    keep: int

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(round((1 - strength) * tokens))

    def __call__(self, view: View) -> Assignment | None:
        if self.keep >= view.patches:
            return None
        stay = view.tokens.index[: view.prefix + self.keep].expand(len(view.tokens.size), -1)
        return arrange(view.tokens, stay)


@pytest.mark.parametrize("host", [name for name in HOSTS if name in ("cls", "mae-avg", "eva02", "registers")])
def test_a_new_method_is_one_class_and_one_row(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is needed for the contract suite, `parse`, `save` and `compare`."""
    monkeypatch.setitem(contract.SETTINGS, "keep-first", KeepFirst(9))
    monkeypatch.setattr(contract, "DROPS", (*contract.DROPS, "keep-first"))
    contract.test_merging_keeps_prefix_sizes_and_shapes(host, "keep-first")
    for entry in ("forward", "forward_features", "forward_intermediates"):
        contract.test_counted_macs_agree_with_torch(host, "keep-first", entry)
    for size in (1, 3):
        contract.test_batch_sizes(host, "keep-first", size)
    contract.test_deepcopy_and_pickle(host, "keep-first")
    contract.test_gradient_and_checkpointing(host, "keep-first")
    contract.test_half_precision_and_autocast(host, "keep-first", torch.bfloat16)
    contract.test_forward_features_and_intermediates_are_whole(host, "keep-first")
    monkeypatch.setitem(known.METHODS, "KeepFirst", KeepFirst)
    assert tm.parse("KeepFirst(keep=9)") == KeepFirst(9)
    if host == "cls":
        contract.test_threads_share_one_model("keep-first")
        model, images = tm.load_model("embedded"), tm.load_images("embedded", limit=12)
        assert Comparison(model, images, sample=2, batch_size=10).at("KeepFirst", 0.6).ratio == pytest.approx(0.6, abs=0.006)
