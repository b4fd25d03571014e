"""Evaluation in one process and in two, stopped and started again, from every source."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
import tarfile
from itertools import chain
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import tokenmerge as tm
from tests.helpers import cli, kill_after, launch
from tokenmerge.data import embedded
from tokenmerge.engine.features import Outputs
from tokenmerge.engine.patch import plan_of
from tokenmerge.evaluation.evaluate import BaselineOutputs
from tokenmerge.evaluation.reference import FULL, observe
from tokenmerge.utils.distributed import ProcessGroup

EACH = "ATM(0.98, 0.04, 0.84, batch='each')"
MEAN = "ATM(0.98, 0.04, 0.84)"
COMMAND = ("evaluate", "embedded", "embedded", "--limit", "44", "--batch-size", "8", "--method", EACH, "--method", MEAN)


def same(a: list[dict[str, object]], b: list[dict[str, object]]) -> bool:
    """To the last digit, but for the speed."""
    return [{k: v for k, v in row.items() if k != "images_per_second"} for row in a] == [
        {k: v for k, v in row.items() if k != "images_per_second"} for row in b
    ]


def test_two_processes_are_one_to_the_last_digit() -> None:
    one = json.loads(cli(*COMMAND, "--json").stdout)
    both = launch(*COMMAND, "--json", processes=2)
    out, err = both.communicate(timeout=240)
    assert both.returncode == 0, err
    assert same(json.loads(out), one)


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """Finished batches are not repeated, the figures are those of an undisturbed run, also with another number of
    processes."""
    folder = tmp_path / "batches"
    args = ("evaluate", "embedded", "embedded", "--limit", "96", "--batch-size", "4", "--method", EACH)
    run = launch(*args, "--resume", folder)
    file = folder / "batches-0.jsonl"
    kill_after(run, file, 5)
    before = file.read_text().splitlines()[1:]
    assert 4 <= len(before) < 24
    file.write_text(file.read_text() + '{"batch": 23, "na')  # a line that was being written

    ran: list[int] = []

    def progress(what: str, done: int = 1, total: int | None = None) -> None:
        assert (what, total) == ("images", 96 - 4 * len(before))
        ran.append(done)

    model, images = embedded.load_model(), embedded.load_images("test", 96)
    results = tm.evaluate(
        model, images, [tm.parse(EACH)], batch_size=4, resume=folder, progress=progress, group=ProcessGroup(0, 1)
    )
    assert sum(ran) == 96 - 4 * len(before)
    undisturbed = tm.evaluate(model, images, [tm.parse(EACH)], batch_size=4)
    assert same([r.row() for r in results], [r.row() for r in undisturbed])
    assert [row["batch"] for row in map(json.loads, file.read_text().splitlines()[1:])] == list(range(24))
    with pytest.raises(ValueError, match="of another model, other images or options"):
        tm.evaluate(model, images, [tm.ToMe(4)], batch_size=4, resume=folder)


def test_calls_that_share_the_baseline_run_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = embedded.load_model(), embedded.load_images("test", 6)
    first, second = tm.ATM(0.98, 0.04, 0.84), tm.ToMe(8)
    alone = [tm.evaluate(model, images, [method], batch_size=4) for method in (first, second)]
    traced: list[tm.Method] = []

    def count(model: nn.Module, x: torch.Tensor) -> tuple[Outputs, tm.Trace]:
        traced.append(plan_of(model).method)
        return observe(model, x)

    monkeypatch.setattr("tokenmerge.evaluation.evaluate.observe", count)
    shared: BaselineOutputs = {}
    together = [
        tm.evaluate(model, images, [method], batch_size=4, baseline_outputs=shared, timed_batches=1)
        for method in (first, second)
    ]
    assert traced.count(FULL) == 2, "one per batch"
    assert [same([a.row()], [b.row()]) for a, b in zip(chain(*alone), chain(*together), strict=True)] == [True] * 4
    assert all(result.images_per_second > 0 for results in together for result in results)


def test_another_model_as_the_baseline() -> None:
    """As after fine-tuning: distance and agreement are those to the other model, not to the model's own baseline."""
    images = embedded.load_images("test", 40)
    original, changed = embedded.load_model(), embedded.load_model()
    with torch.no_grad():
        changed.blocks[5].mlp.fc2.weight.add_(1.5 * torch.randn(64, 256, generator=torch.Generator().manual_seed(0)))  # type: ignore[index, union-attr, operator]
    method = tm.ToMe(8)
    base, found = tm.evaluate(changed, images, {"changed": method}, baseline=original)
    own_base, own = tm.evaluate(changed, images, {"changed": method})
    plain, _ = tm.evaluate(original, images, {"changed": method})
    assert base.top1 == plain.top1 != own_base.top1
    assert found.top1 == own.top1
    assert found.ratio == pytest.approx(own.ratio)
    assert found.distance > 2 * own.distance
    assert base.per_image is not None
    assert found.per_image is not None
    agrees = (found.per_image.prediction == base.per_image.prediction).double().mean()
    assert found.agreement == pytest.approx(float(agrees))


KINDS = ("bag", "coat", "dress", "hat", "jacket", "kilt", "loafer", "mitten", "pants", "shirt")  # all ten of the model


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for number, kind in enumerate(KINDS):
        (tmp_path / "set" / kind).mkdir(parents=True)
        for i in range(3 if number < 2 else 1):
            pixels = (torch.rand(28, 28, generator=generator) * 255).byte().numpy()
            Image.fromarray(pixels).save(tmp_path / "set" / kind / f"{i}.png")
    return tmp_path / "set"


def test_sources(class_folders: Path, tmp_path: Path) -> None:
    model = embedded.load_model()
    folder = next(tm.load_images(class_folders, model, classes=True).batches(14))
    assert folder.labels is not None
    assert folder.labels.tolist() == [0, 0, 0, 1, 1, 1, *range(2, 10)]
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for path in sorted(class_folders.rglob("*.png")):
            tar.add(path, path.relative_to(class_folders).as_posix())
    for source in (tmp_path / "set.tar", f"file://{class_folders}"):
        for workers in (0, 2):
            images = tm.load_images(source, model, classes=True, workers=workers)
            for _ in range(2):
                found = list(images.batches(4))
                assert torch.equal(torch.cat([batch.images for batch in found]), folder.images)
                assert torch.equal(torch.cat([batch.labels for batch in found if batch.labels is not None]), folder.labels)
    assert next(tm.load_images(tmp_path / "set.tar", model).batches(8)).labels is None
    few = next(tm.load_images(class_folders, model, classes=True, limit=2).batches(8))
    assert few.labels is not None
    assert few.labels.tolist() == [0, 0]
    (tmp_path / "bad.tar").write_bytes(b"no tar")
    with pytest.raises(ValueError, match="not a readable, uncompressed"):
        tm.load_images(tmp_path / "bad.tar", model)
    with pytest.raises(ValueError, match="no images in its 0"):
        tm.load_images("wds/no-such-folder", model)
    with pytest.raises(ValueError, match="have their own labels"):
        tm.load_images("embedded", model, classes=True)
    with pytest.raises(ValueError, match="timm cannot read it"):
        tm.load_images("hfds/no/such-set", model)
    (class_folders / "anorak").mkdir()
    with pytest.raises(ValueError, match="no images in the class folder 'anorak'"):
        tm.load_images(class_folders, model, classes=True)
    (class_folders / "anorak").rmdir()
    Image.new("L", (28, 28)).save(class_folders / "loose.png")
    with pytest.raises(ValueError, match=r"loose.png is in no class folder"):
        tm.load_images(class_folders, model, classes=True)


def test_shards_are_one_numbered_set(class_folders: Path, tmp_path: Path) -> None:
    model = tm.load_model("embedded")
    folder = next(tm.load_images(class_folders, model, classes=True).batches(32))
    assert folder.labels is not None
    shards = tmp_path / "shards"
    shards.mkdir()
    for number, (name, label) in enumerate(zip(folder.names, folder.labels.tolist(), strict=True)):
        with tarfile.open(shards / f"{number % 2}.tar", "a") as tar:
            tar.add(class_folders / name, f"{number:03d}{Path(name).suffix}")
            data = str(label).encode()
            info = tarfile.TarInfo(f"{number:03d}.cls")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    order = [i for start in (0, 1) for i in range(start, len(folder.names), 2)]  # shard after shard
    for workers in (0, 2):
        found = next(tm.load_images(f"wds/{shards}", model, workers=workers).batches(32))
        assert found.labels is not None
        assert torch.equal(found.labels, folder.labels[order])
        assert torch.equal(found.images, folder.images[order])
        assert found.names[0] == f"0.tar/000{Path(folder.names[0]).suffix}"


def test_an_unreadable_image_moves_no_other(class_folders: Path) -> None:
    """Batches are cut by number, so that the mean rule meets the same neighbours."""
    model = embedded.load_model()
    (class_folders / "bag" / "1.png").write_bytes(b"broken")
    images = tm.load_images(class_folders, model, classes=True)
    with pytest.warns(UserWarning, match="skipped bag/1.png"):
        sizes = [(number, batch.names) for number, batch in images.parts(3, lambda i: True)]
    assert [(number, len(names)) for number, names in sizes] == [(0, 2), (1, 3), (2, 3), (3, 3), (4, 2)]


def test_labels_that_do_not_fit_the_head(class_folders: Path, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("".join(f"{k}/{i}.png,{77}\n" for k in KINDS for i in range(3)))
    done = cli("evaluate", "embedded", class_folders, "--labels", tmp_path / "labels.csv")
    assert done.returncode == 2
    assert "label 77" in done.stderr
    assert "10 classes" in done.stderr


def test_csv_has_the_columns_of_timm(tmp_path: Path) -> None:
    done = cli("evaluate", "--limit", "16", "--method", "ToMe(4)", "--amp", "bfloat16", "--out", tmp_path / "t.csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    theirs = ["model", "top1", "top1_err", "top5", "top5_err", "param_count", "img_size", "crop_pct", "interpolation"]
    assert list(rows[0])[: len(theirs)] == theirs
    assert float(rows[0]["top1"]) + float(rows[0]["top1_err"]) == pytest.approx(100)
    assert float(rows[0]["top5"]) >= float(rows[0]["top1"])
    assert "--amp takes" in cli("evaluate", "--limit", "4", "--amp", "int8").stderr


def test_a_full_disk_leaves_no_half_written_table(tmp_path: Path) -> None:
    """A quota of 0 bytes for files."""
    command = f"ulimit -f 0; {sys.executable} -m tokenmerge evaluate --limit 4 --out {tmp_path / 'table.csv'}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: [Errno 27] File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_models_are_left_alone() -> None:
    model: nn.Module = embedded.load_model()
    tm.apply(model, tm.ToMe(3))
    tm.evaluate(model, embedded.load_images("test", 4), [tm.NoMerge()])
    assert plan_of(model).method == tm.ToMe(3)
    with pytest.raises(ValueError, match="'baseline' is the name of the unmodified model"):
        tm.evaluate(model, embedded.load_images("test", 4), {"baseline": tm.ToMe(3)})


def test_what_was_kept_for_other_images_is_not_taken(tmp_path: Path) -> None:
    model, x = embedded.load_model(), next(embedded.load_images("test", 8).batches(8)).images
    tm.evaluate(model, x, [tm.ToMe(8)], resume=tmp_path)
    with pytest.raises(ValueError, match="other images"):
        tm.evaluate(model, x.flip(0), [tm.ToMe(8)], resume=tmp_path)
