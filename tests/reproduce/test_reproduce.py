"""The paper's tables and figures, end to end: on the embedded model, and on the real DeiT-Tiny with labelled photographs."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import tokenmerge as tm
from tests.conftest import DEIT
from tests.helpers import cli
from tokenmerge.cli import app
from tokenmerge.methods.presets import rows_of
from tokenmerge.reproduce import EXPERIMENTS, Lab, find
from tokenmerge.reproduce import reproduce as run

EMBEDDED = ("--model", "embedded", "--images", "embedded", "--train-images", "embedded", "--epochs", 1)
QUICK = ("table2", "fig6", "fig7", "batchsize")


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
    assert any(word in text for word in ("second", "minute", "as long", "hours", "weeks", "configs of"))


def test_the_numbers_of_the_docstrings_are_the_papers() -> None:
    """First and last of each model's rows, where a docstring of the full results quotes them."""
    quoted = {
        "tableA1": ("deit_tiny_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"),
        "tableA3": ("lvvit_t", "lvvit_s", "lvvit_m"),
        "tableA4": ("t2t_vit_t_14", "t2t_vit_t_19", "vit_base_patch16_224.mae"),
    }
    for name, models in quoted.items():
        said = " ".join(str(find(name).__doc__).split())
        for model in models:
            first, *_, last = rows_of(model)
            assert f"{first.gmacs:.2f}" in said
            assert f"{first.top1:.2f} %" in said
            assert f"{last.gmacs:.2f} at {last.top1:.2f} %" in said


def test_quick_ones_on_the_embedded_model(tmp_path: Path) -> None:
    done = cli("reproduce", *QUICK, *EMBEDDED, "--sample", 8, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in QUICK:
        for suffix in ("csv", "png", "html"):
            assert (tmp_path / f"{name}.{suffix}").stat().st_size > 0
        page = (tmp_path / f"{name}.html").read_text()
        assert "embedded stands in" in page
        assert f'href="{name}.html"' in (tmp_path / "index.html").read_text()
    # Fig. 6: both schedules cost the same, within the solver's accuracy, and what merged adds up to what is gone
    ratios = {row["schedule"]: float(row["ratio"]) for row in rows(tmp_path / "fig6.csv")}
    assert abs(ratios["constant θ"] - ratios["layer-dependent θ"]) < 0.02
    # Fig. 7: top-r leaves the same number everywhere, ATM does not; from simple to complex
    last = [row for row in rows(tmp_path / "fig7.csv") if row["layer"] == "12"]
    tome = [int(row["tokens"]) for row in last if row["method"] == "ToMe"]
    atm = [int(row["tokens"]) for row in last if row["method"] == "ATM"]
    assert set(tome) == {197 - 12 * 10}
    assert atm == sorted(atm)
    assert len(set(atm)) > 1
    # batch size: what a batch of one image merges is what each image merges by itself
    config = tm.ATM(0.985, 0.045, 0.88, batch="each", last_layer="prefix")
    images = tm.load_images("embedded", tm.load_model("embedded")).split(8, seed=0)[0]
    _, each = tm.evaluate(tm.load_model("embedded"), images, [config])
    first = rows(tmp_path / "batchsize.csv")[0]
    assert float(first["gmacs_here"]) == pytest.approx(each.gmacs, abs=1e-4)


def test_a_second_run_computes_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("reproduce", "batchsize", *EMBEDDED, "--sample", 4, "--out", tmp_path)
    assert cli(*args).returncode == 0
    before = (tmp_path / "batchsize.csv").read_text()
    runs: list[int] = []
    forward = torch.nn.Module.__call__

    def counted(self: torch.nn.Module, *inputs: object, **named: object) -> object:
        runs.append(type(self).__name__.endswith("VisionTransformer"))
        return forward(self, *inputs, **named)

    monkeypatch.setattr(torch.nn.Module, "__call__", counted)
    assert cli(*args).returncode == 0
    again, runs = sum(runs), []
    monkeypatch.undo()
    assert (tmp_path / "batchsize.csv").read_text() == before
    assert again < 10  # the reference that solves for costs; a full run takes 3 batch sizes × 2 models × traced and timed


def test_bad_input(tmp_path: Path) -> None:
    assert "unknown experiment 'table9'; the paper has table1" in cli("reproduce", "table9").stderr
    assert "--weights-dir" in cli("reproduce", "table1").stderr
    (tmp_path / "empty").mkdir()
    done = cli("reproduce", "table1", "--images", "embedded", "--weights-dir", tmp_path / "empty", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "DeiT-T: put deit_tiny_patch16_224….pth of facebookresearch/deit into" in done.stderr
    assert not (tmp_path / "out").exists()
    done = cli("reproduce", "table1", "--images", "embedded", "--weights-dir", tmp_path / "no")
    assert "no such folder of weights" in done.stderr
    assert "fig7" in cli("reproduce", "list").stdout


def test_without_a_training_set_tables_say_so(tmp_path: Path) -> None:
    done = cli("reproduce", "table3", "--model", "embedded", "--images", "embedded", "--sample", 4, "--out", tmp_path)
    assert done.returncode == 0
    assert "--train-images" in done.stderr
    assert "Not run: the training set" in (tmp_path / "table3.html").read_text()
    assert rows(tmp_path / "table3.csv")[-1]["gmacs_here"] == ""


@pytest.mark.slow
def test_all_on_the_embedded_model(tmp_path: Path) -> None:
    assert cli("reproduce", "all", *EMBEDDED, "--sample", 12, "--out", tmp_path).returncode == 0
    for name in EXPERIMENTS:
        assert rows(tmp_path / f"{name}.csv")
        assert (tmp_path / f"{name}.png").stat().st_size > 0


@pytest.mark.slow
def test_table_a1_on_labelled_photographs(tmp_path: Path, labelled: tuple[Path, Path], deit_tiny_weights: object) -> None:
    folder, labels = labelled
    lab = Lab(tmp_path, str(folder), labels, weights_dir=DEIT.parent, sample=70)
    run(["tableA1"], lab)
    found = rows(tmp_path / "tableA1.csv")
    assert len(found) == 14
    assert "Not run: DeiT-S" in (tmp_path / "tableA1.html").read_text()
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
