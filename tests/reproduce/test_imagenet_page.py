"""docs/imagenet.md: every command parses; on a folder of generated images in ImageNet's layout, they run."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from typer.main import get_command

from tests.conftest import ROOT
from tests.helpers import cli, embedded_class_folders, launch
from tokenmerge.cli import app
from tokenmerge.data.sources import imagenet_index

PAGE = (ROOT / "docs" / "imagenet.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """Every call of our program on the page, without what launches several processes."""
    blocks = "\n".join(re.findall(r"```\n(.*?)```", PAGE, re.DOTALL))
    found = [shlex.split(line) for line in blocks.splitlines()]
    return [words[words.index("tokenmerge") + 1 :] for words in found if "tokenmerge" in words]


def test_every_command_of_the_page_parses() -> None:
    names = {words[0] for words in commands()}
    assert names == {"reproduce", "evaluate", "tune"}
    assert len(commands()) >= 15
    group = get_command(app)
    for name, *args in commands():
        context = group.get_command(None, name).make_context(name, list(args))  # type: ignore[attr-defined, arg-type]
        assert context.params["class_folders"]
    assert sum(words[0] == "evaluate" for words in commands()) == 7, "one row of Table 2 for every backbone"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with imagenet/val, imagenet/train and weights: three classes, and DeiT-T with random weights."""
    root = tmp_path_factory.mktemp("machine")
    generator = torch.Generator().manual_seed(0)
    for part in ("val", "train"):
        for kind in list(imagenet_index())[::400]:
            folder = root / "imagenet" / part / kind
            folder.mkdir(parents=True)
            for i in range(2):
                pixels = torch.randint(0, 255, (40, 50, 3), generator=generator, dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).resize((320, 260)).save(folder / f"ILSVRC2012_{part}_{i:08}.JPEG")
    (root / "weights").mkdir()
    torch.manual_seed(0)
    state = timm.create_model("deit_tiny_patch16_224").state_dict()
    torch.save({"model": state}, root / "weights" / "deit_tiny_patch16_224-a1311bcf.pth")
    return root


def on(machine: Path, words: list[str]) -> list[str]:
    """A command of the page on this machine: its folders, no GPU."""
    folders = ("imagenet", "weights", "results", "sweep")
    return [
        str(machine / word) if word.startswith(folders) else {"cuda": "cpu", "8": "0", "500": "1"}.get(word, word)
        for word in words
    ]


def test_a_row_of_table_2_by_hand(machine: Path) -> None:
    (words,) = (words for words in commands() if words[:2] == ["evaluate", "deit_tiny_patch16_224"])
    done = cli(*on(machine, words), "--json")
    assert done.returncode == 0, done.stderr
    _, atm = json.loads(done.stdout)
    assert atm["method"] == "ATM(last_layer='prefix', alpha=0.985, beta=0.025, theta_min=0.885)"
    assert (atm["images"], atm["top1"] is None) == (6, False)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_table_of_the_page(machine: Path, processes: int) -> None:
    """Fine-tuning, too; another number of epochs in the same folder is another run."""
    words = on(machine, next(words for words in commands() if words[:2] == ["reproduce", "table4"]))
    run = launch(*words, "--epochs", processes, processes=processes)
    _, err = run.communicate(timeout=240)
    assert run.returncode == 0, err
    rows = list(csv.DictReader((machine / "results" / "table4.csv").read_text().splitlines()))
    assert float(rows[-1]["hours_here"]) > 0
    assert rows[-1]["epochs_here"] == str(processes)


@pytest.mark.slow
def test_two_processes_reproduce_what_one_does(tmp_path: Path) -> None:
    folder = embedded_class_folders(tmp_path / "images")
    args = ("reproduce", "tableA1", "fig6", "--model", "embedded", "--images", folder, "--class-folders")
    runs = [launch(*args, "--out", tmp_path / str(processes), processes=processes) for processes in (1, 2)]
    for run in runs:
        _, err = run.communicate(timeout=240)
        assert run.returncode == 0, err
    for name in ("tableA1", "fig6"):
        one, two = ((tmp_path / str(processes) / f"{name}.csv").read_text() for processes in (1, 2))
        assert one == two


@pytest.mark.slow
def test_the_commands_of_the_page_run(machine: Path) -> None:
    for words in commands():
        if words[0] == "evaluate" and words[1] != "deit_tiny_patch16_224":
            continue  # their weights are not here
        done = cli(*on(machine, words), *(["--epochs", "1"] if "--train-images" in words else []))
        assert done.returncode == 0, (words, done.stderr)
    assert len(list((machine / "results").glob("*.csv"))) == 16
