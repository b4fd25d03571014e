"""The paper's tables and figures, end to end: on the embedded model, and on the real DeiT-Tiny with labelled photographs."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import tokenmerge as tm
from tests.conftest import DEIT
from tests.helpers import cli, embedded_class_folders
from tokenmerge.cli import app
from tokenmerge.methods.presets import rows_of
from tokenmerge.reproduce import EXPERIMENTS, Lab, fig4, find
from tokenmerge.reproduce import reproduce as run

EMBEDDED = ("--model", "embedded", "--images", "embedded", "--train-images", "embedded", "--epochs", 1)


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.fixture(scope="session")
def labelled(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The 70 photographs whose names end with their class, and a file of the labels."""
    folder, lines = tmp_path_factory.mktemp("labelled"), []
    for path in sorted(p for kind in ("foolbox", "rvb") for p in (photo_folder / kind).iterdir()):
        (folder / path.name).symlink_to(path.resolve())
        lines.append(f"{path.name},{int(path.stem.rpartition('_')[2])}")
    labels = tmp_path_factory.mktemp("labels") / "labels.csv"
    labels.write_text("\n".join(lines) + "\n")
    return folder, labels


@pytest.fixture(scope="session")
def class_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedded_class_folders(tmp_path_factory.mktemp("classes"))


@pytest.fixture(scope="module")
def lab(class_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = str(class_folders)
    out = tmp_path_factory.mktemp("reproduced")
    return Lab(out, folder, class_folders=True, models=["embedded"], train_images=folder, epochs=1)


# How many rows each has on the embedded model, which stands in for the first of the paper's models.
ROWS = {
    "table1": 6, "table2": 9, "table3": 13, "table4": 11, "tableA1": 5, "tableA2": 14, "tableA3": 14, "tableA4": 14,
    "tableA5": 15, "fig1": 80, "fig2": 44, "fig4": 22, "fig5": 29, "fig6": 22, "fig7": 192, "figA1": 192,
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_on_class_folders(name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fig4, "RATIOS", fig4.RATIOS[::3])  # each takes a second to solve for, and there are four methods
    run([name], lab)
    found = rows(lab.out / f"{name}.csv")
    promised = re.search(r"^Columns: (.*?)\.$", str(find(name).__doc__), re.DOTALL | re.MULTILINE)
    assert promised, "the docstring names the columns"
    assert list(found[0]) == " ".join(promised[1].split()).split(", ")
    assert len(found) == ROWS[name]
    assert (lab.out / f"{name}.png").stat().st_size > 0
    assert "embedded stands in" in (lab.out / f"{name}.html").read_text()
    assert f'href="{name}.html"' in (lab.out / "index.html").read_text()
    assert f'"{name}"' in (lab.out / "seconds.json").read_text()
    if "top1_here" in found[0]:
        measured = [row for row in found if row["gmacs_here"]]
        assert all(float(row["top1_here"]) % 10 == 0 for row in measured), "of ten labelled images"
        assert all(0 < float(row["distance"]) < 1 for row in measured if float(row.get("change_here") or 0))
    check = CHECKS.get(name)
    if check is not None:
        check(found)


def _table_1(found: list[dict[str, str]]) -> None:
    by_method = {row["method"]: row for row in found}
    assert list(by_method) == ["baseline", "EViT", "ToMe", "MCTF", "ZeroTPrune", "ATM"]
    assert (by_method["baseline"]["gmacs_paper"], by_method["baseline"]["top1_paper"]) == ("1.3", "72.1")
    assert (by_method["ATM"]["gmacs_paper"], by_method["ATM"]["reduction_paper"]) == ("0.9", "-0.31")
    assert float(by_method["ATM"]["reduction_row"]) == pytest.approx(0.93 / 1.25 - 1)
    assert all(float(row["change_here"]) >= 0 for row in found)
    assert all(row["params_paper"] == "5" and float(row["params_here"]) == 0.61 for row in found)
    assert by_method["ToMe"]["config"].startswith("ToMe(last_layer='full'")


def _table_2(found: list[dict[str, str]]) -> None:
    blocks = {block: [row for row in found if row["block"] == block] for block in ("as printed", "equal GMACs")}
    assert [row["method"] for row in blocks["as printed"]] == ["EViT", "ToMe", "MCTF", "ATM"]
    (atm,) = (row for row in blocks["as printed"] if row["method"] == "ATM")
    assert "alpha=0.985, beta=0.025, theta_min=0.885" in atm["config"], "0.93 / 72.08 rounds to 0.9 / 72.1"
    assert (atm["gmacs_paper"], atm["top1_paper"], float(atm["change_paper"])) == ("0.9", "72.1", 0)
    equal = [float(row["gmacs_here"]) for row in blocks["equal GMACs"]]
    assert max(equal) / min(equal) < 1.02, "each within 1 % of the same cost"
    assert all(abs(float(row["ratio_here"]) / (0.9 / 1.25) - 1) < 0.01 for row in blocks["equal GMACs"])
    assert not any(row["top1_paper"] for row in blocks["equal GMACs"])


def _table_4(found: list[dict[str, str]]) -> None:
    assert [row["method"] for row in found][-2:] == ["ATM, training-free", "ATM"]
    assert (found[-1]["epochs_paper"], found[-1]["epochs_here"], found[-1]["hours_paper"]) == ("30", "1", "11")
    assert 0 < float(found[-1]["hours_here"]) < 0.1
    assert found[-1]["top1_here"]
    assert 0 < float(found[-1]["distance"]) < 1
    trained = {row["method"]: row for row in found[1:-2]}
    assert {name: int(row["epochs_here"]) for name, row in trained.items()} == {
        "DynamicViT": 1, "IA-RED²": 3, "Evo-ViT": 10, "EViT": 1, "A-ViT": 3, "ToMe": 10, "BAT": 1, "MCTF": 1,
    }  # fmt: skip
    assert all(float(row["hours_here"]) > 0 and row["top1_here"] for row in trained.values())
    assert float(trained["DynamicViT"]["ratio_here"]) < 0.75


def _table_a1(found: list[dict[str, str]]) -> None:
    assert [row["batch_size"] for row in found] == ["1", "2", "4", "8", "16"]


def _fig_6(found: list[dict[str, str]]) -> None:
    """Both schedules cost 33 % less, and what merged adds up to what is gone."""
    ratios = {row["schedule"]: float(row["ratio"]) for row in found}
    assert ratios == pytest.approx({"constant θ": 0.67, "layer-dependent θ": 0.67}, abs=0.007)
    assert all(sum(float(row["merged"]) for row in found if row["schedule"] == name) > 40 for name in ratios)


def _fig_7(found: list[dict[str, str]]) -> None:
    """Top-r leaves the same number everywhere, ATM does not; from simple to complex."""
    last = [row for row in found if row["layer"] == "12"]
    tome = [int(row["tokens"]) for row in last if row["method"] == "ToMe"]
    atm = [int(row["tokens"]) for row in last if row["method"] == "ATM"]
    assert set(tome) == {197 - 12 * 10}
    assert atm == sorted(atm)
    assert len(set(atm)) > 1
    before = [int(row["tokens"]) for row in found if row["layer"] == "11" and row["method"] == "ATM"]
    assert atm == before, "ATM's last layer does not merge"


CHECKS = {
    "table1": _table_1, "table2": _table_2, "table4": _table_4, "tableA1": _table_a1, "fig6": _fig_6, "fig7": _fig_7,
}  # fmt: skip


def test_a_batch_of_one_merges_what_each_image_does(lab: Lab) -> None:
    run(["tableA1"], lab)
    (bench,) = lab.benches(("deit_small_patch16_224",))
    config = tm.ATM(0.985, 0.045, 0.88, batch="each", last_layer="prefix")
    _, each = tm.evaluate(bench.model, bench.images, [config])
    assert float(rows(lab.out / "tableA1.csv")[0]["gmacs_here"]) == pytest.approx(each.gmacs, abs=1e-4)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_of_every_docstring_is_valid(name: str) -> None:
    """Each docstring holds a command that the real command line accepts, and the expected time or effort."""
    text = str(find(name).__doc__).replace("\\\n", " ")
    (line,) = (line.strip() for line in text.splitlines() if line.strip().startswith("tokenmerge reproduce"))
    _, command, *args = line.split()
    parsed = get_command(app).get_command(None, command).make_context(command, args)  # type: ignore[attr-defined, arg-type]
    assert parsed.params["names"] == [name]
    assert parsed.params["images"] is not None
    assert parsed.params["weights_dir"] == Path("weights")
    assert any(word in text for word in ("second", "minute", "as long", "hours", "weeks"))


def test_the_numbers_of_the_docstrings_are_the_papers() -> None:
    """First and last of each model's rows, where a docstring of the full results quotes them."""
    quoted = {
        "tableA2": ("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"),
        "tableA4": ("lvvit_t", "lvvit_s", "lvvit_m"),
        "tableA5": ("t2t_vit_t_14", "t2t_vit_t_19", "vit_base_patch16_224.mae"),
    }
    for name, models in quoted.items():
        said = " ".join(str(find(name).__doc__).split())
        for model in models:
            first, *_, last = rows_of(model)
            assert f"{first.gmacs:.2f}" in said
            assert f"{first.top1:.2f} %" in said
            assert f"{last.gmacs:.2f} at {last.top1:.2f} %" in said


def test_a_second_run_computes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("reproduce", "tableA1", *EMBEDDED, "--sample", 4, "--out", tmp_path)
    assert cli(*args).returncode == 0
    before = (tmp_path / "tableA1.csv").read_text()
    runs: list[int] = []
    forward = torch.nn.Module.__call__

    def counted(self: torch.nn.Module, *inputs: object, **named: object) -> object:
        runs.append(type(self).__name__.endswith("VisionTransformer"))
        return forward(self, *inputs, **named)

    monkeypatch.setattr(torch.nn.Module, "__call__", counted)
    assert cli(*args).returncode == 0
    again, runs = sum(runs), []
    monkeypatch.undo()
    assert (tmp_path / "tableA1.csv").read_text() == before
    assert again < 10  # the reference that solves for costs; a full run takes 3 batch sizes × 2 models × traced and timed


def test_bad_input(tmp_path: Path) -> None:
    assert "unknown experiment 'table9'; the paper has table1" in cli("reproduce", "table9").stderr
    assert "--weights-dir" in cli("reproduce", "table1", "--images", "embedded").stderr
    (tmp_path / "empty").mkdir()
    args = ("--images", "embedded", "--weights-dir", tmp_path / "empty", "--out", tmp_path / "out")
    done = cli("reproduce", "table1", *args)
    assert done.returncode == 2
    assert "DeiT-T: put deit_tiny_patch16_224-a1311bcf.pth of facebookresearch/deit into" in done.stderr
    assert (
        "--head is cls or cls+aux, the heads of LV-ViT, not 'aux'"
        in cli("reproduce", "table1", *args, "--head", "aux").stderr
    )
    assert not (tmp_path / "out").exists()
    done = cli("reproduce", "table1", "--images", "embedded", "--weights-dir", tmp_path / "no")
    assert "no such folder of weights" in done.stderr
    listed = cli("reproduce", "list").stdout
    assert "Table 3: sensitivity to the splitting layer" in listed
    assert "Table A1: sensitivity to the batch size" in listed


def test_the_embedded_model_and_images_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labs: list[Lab] = []
    monkeypatch.setattr("tokenmerge.reproduce.reproduce", lambda names, lab: labs.append(lab) or [])
    done = cli("reproduce", "table4", "--out", tmp_path)
    assert done.returncode == 0
    assert "the embedded ones show how it works" in done.stderr
    (lab,) = labs
    assert (lab.models, lab.images, lab.train_images, lab.epochs) == (["embedded"], "embedded", "embedded", 1)
    assert "give ImageNet's validation images" in cli("reproduce", "table4", "--model", "embedded").stderr


def test_without_a_training_set_tables_say_so(tmp_path: Path) -> None:
    done = cli("reproduce", "table4", "--model", "embedded", "--images", "embedded", "--sample", 4, "--out", tmp_path)
    assert done.returncode == 0
    assert "--train-images" in done.stderr
    assert "Not run: the training set" in (tmp_path / "table4.html").read_text()
    assert rows(tmp_path / "table4.csv")[-1]["gmacs_here"] == ""


@pytest.mark.slow
def test_full_results_on_labelled_photographs(
    tmp_path: Path, labelled: tuple[Path, Path], deit_tiny_weights: object
) -> None:
    folder, labels = labelled
    lab = Lab(tmp_path, str(folder), labels, weights_dir=DEIT.parent, sample=70)
    run(["tableA2"], lab)
    found = rows(tmp_path / "tableA2.csv")
    assert len(found) == 14
    assert "Not run: DeiT-S" in (tmp_path / "tableA2.html").read_text()
    differences = [abs(float(row["gmacs_difference"])) for row in found]
    assert differences[0] < 0.01
    assert max(differences) < 0.05  # on 70 photographs; on images of ImageNet within 2 %, see docs/reproduction.md
    assert all(float(row["agreement"]) > 0.9 for row in found)


@pytest.mark.slow
def test_all_on_labelled_photographs(tmp_path: Path, labelled: tuple[Path, Path], deit_tiny_weights: object) -> None:
    folder, labels = labelled
    data = ("--images", folder, "--labels", labels, "--train-images", folder, "--train-labels", labels)
    args = (*data, "--weights-dir", DEIT.parent, "--sample", 12, "--epochs", 1)
    assert cli("reproduce", "all", *args, "--out", tmp_path).returncode == 0
    for name in EXPERIMENTS:
        assert rows(tmp_path / f"{name}.csv")
        assert (tmp_path / f"{name}.png").stat().st_size > 0
