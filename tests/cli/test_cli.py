"""The embedded model, the demo and the command line, as a user calls them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import tokenmerge as tm
from tests.conftest import ROOT
from tests.helpers import cli, embedded_class_folders
from tokenmerge.data import embedded
from tokenmerge.data.images import Images


def test_the_embedded_model_is_what_the_log_says() -> None:
    """≥ 90 % on all 10,000 test images is in the log of the training run; here, the embedded 2,000 of them."""
    rows = list(csv.DictReader((ROOT / "experiments" / "train_embedded.csv").read_text().splitlines()))
    assert int(rows[-1]["test_images"]) == 10_000
    assert float(rows[-1]["test_top1"]) >= 0.90
    model, images = embedded.load_model(), embedded.load_images("test", 500)
    assert (ROOT / "src/tokenmerge/data/embedded/vit.safetensors").stat().st_size <= 4_000_000
    (result,) = tm.evaluate(model, images, [], batch_size=100)
    assert result.images == 500
    assert result.top1 is not None
    assert result.top1 == pytest.approx(float(rows[-1]["test_top1"]), abs=0.04)
    assert embedded.load_images("test").size == 2000
    assert embedded.load_images("train").size == 500
    assert len(next(embedded.load_images("train").batches(7)).names) == 7


def test_evaluate_leaves_the_model_as_it_was() -> None:
    model, images = embedded.load_model().train(), embedded.load_images("test", 20)
    tm.apply(model, tm.ToMe(4))
    results = tm.evaluate(model, images, [tm.NoMerge(last_layer="full"), tm.ToMe(8)], batch_size=20)
    assert model.training
    with tm.trace(model) as t:
        model(next(images.batches(2)).images)
    assert t.tokens[0].tolist() == [193, 193]
    baseline, same, merged = results
    assert (same.agreement, same.distance) == (1.0, pytest.approx(0, abs=1e-9))
    assert same.gmacs == baseline.gmacs > merged.gmacs
    assert merged.gmacs_range == (merged.gmacs, merged.gmacs)
    assert merged.distance > 1e-4
    assert merged.tokens[:3] == (189, 181, 173)


def test_models_without_classes_and_in_half_precision() -> None:
    model = timm.create_model("test_vit", num_classes=0).to(torch.bfloat16)
    pixels = torch.randn(4, 3, 160, 160)
    images = Images.of(pixels)
    baseline, merged = tm.evaluate(model, images, [tm.ToMe(4)])
    assert baseline.agreement == 1  # of nearest neighbours
    assert merged.top1 is None
    alone, _ = tm.evaluate(model, images.take([0]), [tm.ToMe(4)])
    assert alone.agreement is None
    assert merged.distance > 0
    assert baseline.gmacs > merged.gmacs > 0


@pytest.mark.slow
def test_demo_optimizes_the_embedded_model(tmp_path: Path) -> None:
    done = cli("demo", "--images", "60", "--out", tmp_path / "out", "--json")
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    baseline, ours, tome = proof["results"][:3]
    assert baseline["name"] == "baseline"
    assert ours["gmacs_ratio"] == pytest.approx(0.4, rel=0.05)
    assert tome["gmacs_ratio"] == pytest.approx(ours["gmacs_ratio"], rel=0.05)
    assert ours["distance"] < tome["distance"]
    assert tm.load(tmp_path / "out" / "reduction.json") == tm.parse(ours["method"])


def test_evaluate_prints_a_table_and_writes_csv(tmp_path: Path) -> None:
    tm.save(tm.ToMe(4), tmp_path / "tome.json")
    done = cli(
        "evaluate", "--method", "ATM(0.98, 0.04, 0.84, batch='each')", "--method", tmp_path / "tome.json",
        "--limit", "30", "--out", tmp_path / "table.csv",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "baseline" in done.stdout
    assert "agreement" in done.stdout
    assert "cosine distance of the pre-logits features" in " ".join(done.stdout.split())
    assert len((tmp_path / "table.csv").read_text().splitlines()) == 4


def test_presets_list() -> None:
    done = cli("presets", "deit_tiny_patch16_224", "--json")
    assert len(json.loads(done.stdout)) == 14
    assert "0.875" in cli("presets", "deit_small_patch16_224").stdout
    assert cli("--version").stdout.strip() == tm.__version__


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["evaluate", "no_such_model"], "unknown model 'no_such_model'"),
        (["evaluate", "embedded", "/no/such/folder"], "no such folder"),
        (["evaluate", "--method", "ToMe(r=-1)"], "r must be an integer"),
        (["evaluate", "--method", "Magic()"], "unknown method 'Magic'"),
        (["evaluate", "--method", "ToMe(r=4, last_layer='all')"], "last_layer must be one of"),
        (["evaluate", "--limit", "4", "--convention", "flops", "--method", "ToMe(1)"], "unknown convention"),
        (["evaluate", "--weights", "x.safetensors"], "has its own weights"),
        (["evaluate", "--method", "[/red]"], "cannot read the method '[/red]'"),
        (["evaluate", "--limit", "2", "--out", "nodir/x.csv"], "no such folder to write into"),
        (["evaluate", "test_vit"], "cannot get pretrained weights of test_vit"),  # the hub is switched off, see conftest
        (["evaluate", "test_vit", "embedded", "--weights", "missing.safetensors"], "no such file"),
        (["presets", "resnet50"], "it has rows for deit_tiny_patch16_224"),
    ],
)
def test_bad_input_ends_with_one_clear_line(
    args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = cli(*args)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_local_weights_and_a_folder_with_bad_files(tmp_path: Path) -> None:
    model = timm.create_model("test_vit")
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    folder = tmp_path / "images"
    (folder / "deep").mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for i in range(5):
        pixels = (torch.rand(40, 50, 3, generator=generator) * 255).byte().numpy()
        Image.fromarray(pixels).save(folder / "deep" / f"{i}.png")
    Image.new("CMYK", (30, 30)).save(folder / "cmyk.jpg")
    Image.new("I;16", (30, 30), 40_000).save(folder / "deep16.png")
    Image.new("RGB", (1, 1)).save(folder / "pixel.png")
    (folder / "broken.jpg").write_bytes(b"not a picture")
    (folder / "notes.txt").write_text("not an image file")
    args = ["evaluate", "test_vit", folder, "--weights", tmp_path / "w.safetensors", "--method", "ToMe(4)", "--json"]
    done = cli(*args)
    assert done.returncode == 0, done.stderr
    assert "broken.jpg" in done.stderr
    assert [r["images"] for r in json.loads(done.stdout)] == [8, 8]

    # the embedded model takes grey pictures of 28 pixels; the embedded images fit no other model
    assert [r["images"] for r in json.loads(cli("evaluate", "embedded", folder, "--json").stdout)] == [8, 8]
    done = cli("evaluate", "test_vit", "embedded", "--weights", tmp_path / "w.safetensors")
    assert done.returncode == 2
    assert "the embedded images are (1, 28, 28)" in done.stderr
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), tmp_path / "three.safetensors")
    done = cli("evaluate", "test_vit", folder, "--weights", tmp_path / "three.safetensors")
    assert "give the number of classes with --num-classes" in " ".join(done.stderr.split())
    done = cli("evaluate", "test_vit", folder, "--weights", tmp_path / "three.safetensors", "--num-classes", "3", "--json")
    assert done.returncode == 0, done.stderr

    names = [p.name for p in folder.rglob("*") if p.suffix in (".png", ".jpg")]
    (tmp_path / "labels.csv").write_text("".join(f"{name},1\n" for name in names))
    done = cli(*args, "--labels", tmp_path / "labels.csv")
    assert json.loads(done.stdout)[0]["top1"] is not None
    (tmp_path / "labels.csv").write_text("0.png,1\n")
    assert "no label for" in cli(*args, "--labels", tmp_path / "labels.csv").stderr

    (tmp_path / "other.safetensors").write_bytes(b"junk")
    for weights, says in (("other.safetensors", "not a readable safetensors"), ("w.pth", "no such file")):
        done = cli("evaluate", "test_vit", folder, "--weights", tmp_path / weights)
        assert done.returncode == 2
        assert says in done.stderr
    done = cli("evaluate", "test_vit2", folder, "--weights", tmp_path / "w.safetensors")
    assert "does not fit test_vit2" in done.stderr

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no images below it" in cli("evaluate", "test_vit", empty, "--weights", tmp_path / "w.safetensors").stderr
    (empty / "x.png").write_bytes(b"")
    assert "none of its 1 images could be read" in cli(*args[:2], empty, *args[3:]).stderr


@pytest.mark.parametrize("name", ["test_vit", "torchvision:vit_b_16"])
def test_wrong_options_are_not_taken_for_missing_weights(name: str, tmp_path: Path) -> None:
    for weights in (None, tmp_path / "w.safetensors"):
        with pytest.raises(ValueError, match=r"does not take these options .*shape_of_things"):
            tm.load_model(name, weights, shape_of_things=3)


def test_evaluate_with_the_papers_presets(tmp_path: Path) -> None:
    """The paper's configs by their GMACs, for a model of the paper with local weights."""
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224")
    save_file(model.state_dict(), tmp_path / "deit.safetensors")
    for kind in ("n01440764", "n03888257"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        Image.new("RGB", (64, 64), "blue").save(tmp_path / "images" / kind / "0.png")
    weights = ("--weights", tmp_path / "deit.safetensors")
    args = ("evaluate", "deit_tiny_patch16_224", tmp_path / "images", "--class-folders", *weights)
    done = cli(*args, "--preset", 0.9, "--preset", 1.0, "--json")
    assert done.returncode == 0, done.stderr
    _, first, second = json.loads(done.stdout)
    assert first["method"] == "ATM(alpha=1.0, beta=0.035, theta_min=0.88)"
    assert second["method"] == "ATM(alpha=0.975, beta=0.025, theta_min=0.91)"
    assert first["top1"] is not None
    assert "the lowest has 0.71" in cli(*args, "--preset", 0.5).stderr
    assert "does not take these options" in cli(*args, "--head", "cls").stderr


def test_stress_and_tune_read_class_folders(tmp_path: Path) -> None:
    args = ("embedded", embedded_class_folders(tmp_path / "images"), "--class-folders")
    done = cli("stress", *args, "--method", "ToMe", "--tolerance", 0, "--out", tmp_path / "stress", "--json")
    assert done.returncode == 0, done.stderr
    baseline, tome = json.loads(done.stdout)
    assert tome["top1"] >= baseline["top1"] > 0
    done = cli("tune", *args, "--trials", 1, "--out", tmp_path / "tuned", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["accuracy"] is not None
