"""What the paper says about each model and method, so that a departure from it cannot pass: transforms, batches,
conventions, options, rows, criteria."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import tokenmerge as tm
import tokenmerge.models
from tests.contract.table import batch, build
from tokenmerge.core.matching import PairRule
from tokenmerge.data import embedded
from tokenmerge.data.images import FileSource, Images
from tokenmerge.evaluation.evaluate import Result
from tokenmerge.evaluation.measurement import Measurement
from tokenmerge.methods.presets import find_preset, printed_row, rows_of
from tokenmerge.reproduce import EXPERIMENTS, Lab, fig5, find, reproduce, table2
from tokenmerge.reproduce.bench import Bench
from tokenmerge.reproduce.published import PUBLISHED

assert tokenmerge.models  # registers LV-ViT and T2T-ViT with timm


@pytest.mark.parametrize("last_layer", ["prefix", "query"])
def test_the_cls_only_last_layer_is_the_full_one_for_the_cls_token(last_layer: str) -> None:
    """With merged tokens, so that the last attention needs log size, too."""
    model, x = build("cls"), batch("cls")
    method = tm.ATM(thresholds=[0.3, 0.3, 0.3, 1.0], last_layer="full")

    def logits(method: tm.Method) -> torch.Tensor:
        with torch.inference_mode():
            return tm.apply(model, method)(x)

    full = logits(method)
    torch.testing.assert_close(logits(replace(method, last_layer=last_layer)), full, atol=1e-5, rtol=0)  # type: ignore[arg-type]
    # That would not notice log size missing in all of them: without it in the last layer alone, the logits are others.
    tm.apply(model, method)
    plain = model.blocks[-1]  # type: ignore[index]
    with torch.inference_mode():
        tokens = {}

        def keep(module: object, args: tuple[torch.Tensor, ...]) -> None:
            tokens["x"] = args[0]

        handle = plain.register_forward_pre_hook(keep)
        model(x)
        handle.remove()
        unweighted = model.forward_head(model.norm(tm.remove(model).blocks[-1](tokens["x"])))  # type: ignore[operator, index]
    assert float((unweighted - full).abs().max()) > 1e-2


def lab_of(tmp_path: Path, *names: str, **options: object) -> Lab:
    """The paper's models with random weights, and three images in a folder."""
    weights = tmp_path / "weights"
    weights.mkdir(exist_ok=True)
    for name in names:
        if not (weights / f"{name}.safetensors").exists():
            torch.manual_seed(0)
            save_file(timm.create_model(name).state_dict(), weights / f"{name}.safetensors")
    folder = tmp_path / "images"
    folder.mkdir(exist_ok=True)
    for i in range(3):
        pixels = torch.randint(0, 255, (64, 80, 3), generator=torch.Generator().manual_seed(i), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).resize((300, 260)).save(folder / f"{i}.png")
    return Lab(tmp_path / "out", str(folder), weights_dir=weights, models=names, **options)  # type: ignore[arg-type]


def bench_of(name: str, images: int = 1) -> Bench:
    """How the paper runs a model, with a small model and blank images in its place: none of them runs."""
    blank = Images.of(torch.zeros(images, 3, 2, 2))
    paper = name if name in PUBLISHED else "deit_tiny_patch16_224"
    return Bench(Lab(Path("unused"), "unused"), name, paper, build("mae-avg" if "mae" in name else "cls"), blank)


def test_the_transform_of_deit_is_resize_256_and_crop_224(tmp_path: Path) -> None:
    (bench,) = lab_of(tmp_path, "deit_tiny_patch16_224").benches(["deit_tiny_patch16_224"])
    source = bench.images.source
    assert isinstance(source, FileSource)
    assert "Resize(size=256, interpolation=bicubic" in source.preprocessing.description
    assert "CenterCrop(size=(224, 224))" in source.preprocessing.description
    assert [PUBLISHED[name].crop for name in PUBLISHED if name.startswith("deit")] == [0.875] * 3


@pytest.mark.parametrize("name", PUBLISHED)
def test_batches_are_the_papers(name: str) -> None:
    assert bench_of(name, 2000).batch_size == (100 if name.startswith("t2t") else 1024)


def test_who_gets_the_cls_only_last_layer() -> None:
    """In the paper, ATM does; with --fair, everybody; on MAE, nobody, and attention is plain."""
    bench = bench_of("deit_small_patch16_224")
    assert bench.options("ATM") == {"last_layer": "prefix"}
    assert bench.options("TopR") == {"last_layer": "prefix"}, "a part of ATM"
    for name in ("ToMe", "EViT", "MCTF", "ZeroTPrune"):
        assert bench.options(name) == {"last_layer": "full"}
    bench.lab.fair = True
    assert bench.options("ToMe") == {"last_layer": "prefix"}
    mae = bench_of("mae_vit_base_patch16")
    mae.lab.fair = True
    for name in ("ATM", "ToMe"):
        assert mae.options(name) == {"last_layer": "full", "prop_attn": False}
    assert mae.atm(mae.rows()[1]).prop_attn is False


def test_conventions_are_those_that_give_the_papers_baselines() -> None:
    assert {name: bench_of(name).convention for name in PUBLISHED} == {
        name: "lvvit" if name.startswith("lvvit") else "paper" for name in PUBLISHED
    }


def test_lvvit_is_counted_and_headed_as_in_the_paper(tmp_path: Path) -> None:
    (bench,) = lab_of(tmp_path, "lvvit_t").benches(["lvvit_t"])
    base, cls_only = bench.measure([tm.NoMerge(**bench.options("ATM"))])
    assert base.gmacs == pytest.approx(2.867, abs=5e-4)
    assert bench.options("ATM") == {"last_layer": "prefix"}
    assert cls_only.gmacs < base.gmacs - 0.05
    assert bench.reference.gmacs == pytest.approx(base.gmacs), "methods are solved in the convention that measures them"
    (both,) = lab_of(tmp_path, "lvvit_t", head="cls+aux").benches(["lvvit_t"])
    assert both.options("ATM") == {"last_layer": "full"}, "the second head reads the patches"


def test_lvvit_s_keeps_the_cls_token_alone() -> None:
    model = tm.apply(timm.create_model("lvvit_s", head="cls").eval(), tm.NoMerge(last_layer="prefix"))
    with torch.inference_mode(), tm.trace(model) as t:
        model(torch.zeros(1, 3, 224, 224))
    assert t.cost("lvvit").gmacs == pytest.approx(6.396, abs=5e-4)
    assert t.cost("lvvit").baseline_gmacs == pytest.approx(6.572, abs=5e-4)


def test_figure_5_compares_alternate_matching_only() -> None:
    bench = Bench(
        Lab(Path("unused"), "embedded"),
        "embedded",
        "deit_small_patch16_224",
        embedded.load_model(),
        embedded.load_images("test", 4),
    )
    schedules = fig5.schedules(bench)
    assert list(schedules) == [
        "constant top-r",
        "increasing top-r",
        "decreasing top-r",
        "constant θ",
        "layer-dependent θ",
    ]
    for methods in schedules.values():
        assert len(methods) >= 4
        for method in methods:
            rules = [method.rule(layer, 12) for layer in range(1, 13)]
            assert not any(rule.by_size for rule in rules if isinstance(rule, PairRule))
            assert any(isinstance(rule, PairRule) for rule in rules)
    for rising, falling in zip(schedules["increasing top-r"], schedules["decreasing top-r"], strict=True):
        up, down = ([getattr(method.rule(layer, 12), "r", 0) for layer in range(1, 13)] for method in (rising, falling))
        assert up == down[::-1], "the same merges in the other order"
        assert all(after - before == 1 for before, after in pairwise(up) if before)
    assert len(schedules["increasing top-r"]) == len(fig5.TOTALS)


# The row of the full results that Table 2 prints, by GMACs.
TABLE_2 = {
    "deit_tiny_patch16_224": 0.93,
    "deit_small_patch16_224": 3.04,
    "lvvit_t": 2.02,
    "lvvit_s": 3.51,
    "t2t_vit_t_14": 4.12,
    "t2t_vit_t_19": 4.83,
    "mae_vit_base_patch16": 11.50,
}


def test_table_2_has_the_rows_that_round_to_both_numbers() -> None:
    assert {name: printed_row(name, *methods["ATM"]).gmacs for name, methods in table2.PAPER.items()} == TABLE_2


def test_table_1_has_the_papers_rows_at_the_printed_precision() -> None:
    cheapest = {name: find_preset(name, lossless=True).gmacs for name in PUBLISHED if name.startswith("deit")}
    assert list(cheapest.values()) == [0.93, 3.23, 13.89]
    strict = [find_preset(name, lossless=True, tolerance=0).gmacs for name in cheapest]
    assert [round(1 - gmacs / rows_of(name)[0].gmacs, 2) for name, gmacs in zip(cheapest, strict, strict=True)] == [
        0.23,
        0.27,
        0.19,
    ]


@pytest.mark.parametrize(
    ("top1", "tolerance", "kept"),
    [
        (72.14, 0.1, True),
        (72.08, 0.1, True),  # prints as 72.1
        (72.04, 0.1, False),
        (71.14, 0.1, False),  # one point
        (72.08, 0.0, False),
        (72.14, 0.0, True),
        (71.6, 1.0, True),
    ],
)
def test_the_stress_test_allows_no_loss(top1: float, tolerance: float, kept: bool) -> None:
    bench = bench_of("deit_tiny_patch16_224")
    bench.lab.tolerance = tolerance

    def result(value: float) -> Result:
        return Result("", tm.NoMerge(), Measurement(50000, 1.0, 1.0, 0.0, 0.9, top1=value / 100), 1.0)

    assert bench.keeps(result(top1), result(72.14)) is kept


def test_without_labels_no_prediction_may_change() -> None:
    bench = bench_of("deit_tiny_patch16_224")

    def result(agreement: float) -> Result:
        return Result("", tm.NoMerge(), Measurement(100, 1.0, 1.0, 0.0, agreement), 1.0)

    assert bench.keeps(result(1.0), result(1.0))
    assert not bench.keeps(result(0.99), result(1.0))


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_model_has_a_place_in_every_experiment(name: str, experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either it is one of the paper's models there, or it stands in for the first of them: the paper's rows exist."""
    asked: list[list[str]] = []

    def stop(lab: Lab, wanted: list[str]) -> list[Bench]:
        asked.append(list(wanted))
        raise InterruptedError

    monkeypatch.setattr(Lab, "benches", stop)
    with pytest.raises(InterruptedError):
        find(experiment).run(Lab(Path("unused"), "unused"))
    (wanted,) = asked
    paper = name if name in wanted else wanted[0]
    assert rows_of(paper)[0].is_baseline
    module = find(experiment)
    if experiment in ("table1", "table2"):
        assert "ATM" in module.PAPER[paper]


@pytest.mark.parametrize("experiment", ["table4", "tableA1"])
def test_another_of_the_papers_models_stands_in(experiment: str, tmp_path: Path) -> None:
    """DeiT-T in a table of DeiT-S: ratios, never another model's absolute numbers next to its own."""
    lab = lab_of(tmp_path, "deit_tiny_patch16_224")
    reproduce([experiment], lab)
    page = (lab.out / f"{experiment}.html").read_text()
    assert "The paper ran DeiT-S; here DeiT-T stands in" in page
    rows = list(csv.DictReader((lab.out / f"{experiment}.csv").read_text().splitlines()))
    assert all(float(row["ratio_paper"]) <= 1 for row in rows)
    assert not any(row["gmacs_difference"] for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_model_runs_every_table(name: str, tmp_path: Path) -> None:
    lab = lab_of(tmp_path, name)
    reproduce(["table1", "table2", "table3", "table4", "tableA1", "tableA2", "tableA4", "tableA5", "fig6", "fig7"], lab)
    assert len(list(lab.out.glob("*.csv"))) == 10
