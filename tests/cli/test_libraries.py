"""Every command on a Hugging Face and a torchvision model, which have neither timm's attributes nor its methods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import open_clip
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import save_file
from torchvision.models._api import BUILTIN_MODELS  # torchvision has no public way to add a model

from tests import tiny_models as tiny
from tests.backbones.test_towers import randomised
from tests.helpers import cli, web_page
from tokenmerge.cli import app


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fourteen images, two for each of the seven classes."""
    root = tmp_path_factory.mktemp("images")
    generator = torch.Generator().manual_seed(0)
    for i in range(14):
        coarse = torch.rand(1, 3, 4, 4, generator=generator)
        pixels = torch.nn.functional.interpolate(coarse, 48, mode="bilinear")[0]
        path = root / f"class {i % 7}" / f"{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((pixels * 255).byte().permute(1, 2, 0).numpy()).save(path)
    return root


@pytest.fixture(scope="module")
def registered() -> Iterator[str]:
    """A tiny model that torchvision knows by name, as long as these tests run."""
    name = "vit_tiny_test"
    BUILTIN_MODELS[name] = tiny.torchvision_vit
    yield f"torchvision:{name}"
    del BUILTIN_MODELS[name]


@pytest.fixture(scope="module", params=["hf", "torchvision"])
def model(request: pytest.FixtureRequest, registered: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The model's name, and options to load it."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    if request.param == "hf":
        tiny.hugging_face(hf.ViTForImageClassification, hf.ViTConfig).save_pretrained(folder)  # type: ignore[operator]
        hf.ViTImageProcessor(size={"height": 40, "width": 40}).save_pretrained(folder)
        return (f"hf:{folder}",)
    save_file(tiny.torchvision_vit().state_dict(), folder / "w.safetensors")
    return (registered, "--weights", str(folder / "w.safetensors"), "--num-classes", "7")


COMMANDS: dict[str, tuple[str, ...]] = {
    "analyze": ("--sample", "4", "--theta", "0.9"),
    "bench": ("--batch-size", "2", "--timing-rounds", "1", "--method", "ToMe(2)"),
    "compare": ("--out", "OUT", "--method", "ToMe", "--gmacs", "0.8", "--sample", "2", "--timing-rounds", "1"),
    "evaluate": ("--method", "ToMe(2)", "--class-folders"),
    "finetune": ("--out", "OUT", "--method", "ToMe(2)", "--epochs", "1", "--batch-size", "4", "--micro-batch", "2", "--cpu"),
    "optimize": ("--out", "OUT", "--gmacs", "0.9", "--sample", "6"),
    "predict": ("--out", "OUT.parquet", "--method", "ToMe(2)"),
    "stress": ("--out", "OUT", "--method", "ToMe"),
    "tune": ("--out", "OUT", "--trials", "2"),
    "visualize": ("--out", "OUT", "--count", "2", "--method", "ToMe", "--method", "ATM(1.0, 0.1, 0.5)"),
    "export": ("--out", "OUT.pt2", "--to", "pt2", "--method", "ToMe(2)"),
    "prove": ("--method", "ToMe(2)"),
}


# What each prints, and a file that it writes.
EXPECTED: dict[str, tuple[str, str | None]] = {
    "analyze": ("cosine distance after merging in one layer only", None),
    "bench": ("ToMe(r=2)", None),
    "compare": ("ToMe", "compared.csv"),
    "evaluate": ("ToMe(r=2)", None),
    "finetune": ("", "steps.jsonl"),
    "optimize": ("ToMe at the same cost", "report.html"),
    "predict": ("14 images", "out.parquet"),
    "stress": ("the least GMACs without loss", "stress.csv"),
    "tune": ("2 trials", "tuned.csv"),
    "visualize": ("ATM: ATM(", "compared.png"),
    "export": ("ToMe(r=2); differs from the eager model", "out.pt2"),
    "prove": ("of predictions (top-1 class) unchanged, 95% confidence, 14 images", None),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")  # exporters'
def test_every_command_runs(command: str, model: tuple[str, ...], images: Path, tmp_path: Path) -> None:
    name, *options = model
    args = [arg.replace("OUT", str(tmp_path / "out")) for arg in COMMANDS[command]]
    data = ["--images", images] if command == "export" else [images]
    done = cli(command, name, *data, *options, *args)
    assert done.returncode == 0, done.stderr
    printed, written = EXPECTED[command]
    assert printed in done.stdout
    assert written is None or written in {p.name for p in tmp_path.rglob("*")}


def test_no_command_is_forgotten() -> None:
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    no_model = {
        "demo",
        "presets",
        "reproduce",
        "convert",
    }  # the embedded model, none at all, the paper's models, timm's alone
    assert commands - no_model - {"web"} == set(COMMANDS)


def test_an_input_size_that_cannot_be_changed_is_refused(model: tuple[str, ...], images: Path) -> None:
    name, *options = model
    for command in ("bench", "evaluate"):
        done = cli(command, name, images, *options, "--image-size", "64")
        assert done.returncode == 2
        assert "has a fixed input size" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("model", ["hf"], indirect=True)  # another process does not know the tiny torchvision model
def test_the_web_demo_serves_them(model: tuple[str, ...], images: Path, tmp_path: Path) -> None:
    name, *options = model
    with web_page(tmp_path, name, "--images", str(images), *options) as (address, _):
        assert address.startswith("http://127.0.0.1:")


def test_visualize_writes_maps_strips_and_counts(tmp_path: Path) -> None:
    """On the embedded model: a name is solved for the cost, a config is used as it is; repeated names are numbered."""
    done = cli(
        "visualize", "embedded", "embedded", "--out", tmp_path, "--count", 3, "--gmacs", 0.6, "--layers", "1,6,11",
        "--method", "tome", "--method", "ToMe(r=4)", "--method", "ATM(0.98, 0.04, 0.84)",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert {"tokens.csv", "compared.png", "compared.svg"} <= names
    assert len([name for name in names if name.startswith("strip_")]) == 2 * 3
    lines = (tmp_path / "tokens.csv").read_text().splitlines()
    assert len(lines) == 1 + 3 * 3 * 3  # three images, methods and layers
    fixed = [line for line in lines if ",ToMe 1," in line]
    assert {line.split(",", 2)[2] for line in fixed} == {"1,193", "6,173", "11,153"}
    assert "ToMe 1: ToMe(r=4)" in done.stdout
    bad = cli("visualize", "embedded", "embedded", "--out", tmp_path / "no", "--layers", "one")
    assert bad.returncode == 2
    assert "--layers takes 'all' or numbers" in bad.stderr
    assert not (tmp_path / "no").exists()


def test_json_is_json(model: tuple[str, ...], images: Path) -> None:
    name, *options = model
    rows = json.loads(cli("evaluate", name, images, *options, "--method", "ToMe(2)", "--json").stdout)
    assert [row["name"] for row in rows] == ["baseline", "ToMe(r=2)"]
    assert rows[1]["gmacs"] < rows[0]["gmacs"]


@pytest.fixture
def towers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A two-tower model with random weights: its name, and options to load it."""
    if request.param == "clip":
        config = hf.CLIPConfig(
            vision_config=tiny.HF | dict(projection_dim=16), text_config=dict(num_hidden_layers=1), projection_dim=16
        )
        randomised(hf.CLIPModel(config)).save_pretrained(tmp_path / "clip")
        size = {"height": 40, "width": 40}
        hf.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size=size).save_pretrained(tmp_path / "clip")
        yield (f"hf:{tmp_path / 'clip'}",)
        return
    vision = dict(layers=4, width=32, head_width=16, patch_size=8, image_size=40)
    text = dict(context_length=8, vocab_size=10, width=32, heads=2, layers=1)
    (tmp_path / "tiny-test.json").write_text(json.dumps(dict(embed_dim=16, vision_cfg=vision, text_cfg=text)))
    known = list(open_clip.factory._MODEL_CONFIG_PATHS)
    open_clip.add_model_config(tmp_path / "tiny-test.json")
    save_file(randomised(open_clip.create_model("tiny-test")).state_dict(), tmp_path / "w.safetensors")
    yield ("open_clip:tiny-test", "--weights", str(tmp_path / "w.safetensors"))
    open_clip.factory._MODEL_CONFIG_PATHS[:] = known
    del open_clip.factory._MODEL_CONFIGS["tiny-test"]


@pytest.mark.parametrize("towers", ["clip", "open_clip"], indirect=True)
def test_two_tower_models_are_optimised_on_photographs(towers: tuple[str, ...], photo_folder: Path, tmp_path: Path) -> None:
    """With text embeddings as classes, and without, for image search."""
    out = tmp_path / "out"
    save_file({"text": torch.randn(5, 16)}, tmp_path / "text.safetensors")
    name, *weights = towers
    command = ("optimize", name, str(photo_folder), *weights, "--gmacs", "0.8", "--sample", "6", "--limit", "14")
    result = cli(*command, "--out", str(out / "classes"), "--zero-shot", str(tmp_path / "text.safetensors"))
    assert "predictions (top-1 class) unchanged" in result.stdout
    assert "GMACs of the vision tower" in result.stdout
    result = cli(*command, "--out", str(out / "search"))
    assert "predictions (nearest neighbour) unchanged" in result.stdout
    for kind in ("classes", "search"):
        assert {"reduction.json", "report.html", "usage.py"} <= {path.name for path in (out / kind).iterdir()}
