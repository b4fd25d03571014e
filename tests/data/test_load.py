"""What users have in their hands: a tensor, a loader, a folder."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import EpsImagePlugin, Image
from torch.utils.data import DataLoader, TensorDataset

import tokenmerge as tm
from tokenmerge.data import embedded
from tokenmerge.data.checkpoint import read_weights
from tokenmerge.data.load import as_images


def test_a_tensor_and_loaders_are_the_same_images() -> None:
    images = embedded.load_images("test", 12)
    batch = next(images.batches(12))
    assert batch.labels is not None
    model, methods = embedded.load_model(), [tm.ToMe(8)]
    expected = tm.evaluate(model, images, methods, batch_size=5)[1]
    loader = DataLoader(TensorDataset(batch.images, batch.labels), batch_size=7)
    unlabelled = DataLoader(batch.images, batch_size=4)
    for source, labelled in ((batch.images, False), (unlabelled, False), (loader, True), (images, True)):
        found = tm.evaluate(model, source, methods, batch_size=5)[1]
        assert (found.images, found.gmacs, found.agreement) == (12, expected.gmacs, expected.agreement)
        assert found.distance == pytest.approx(expected.distance, rel=1e-6)
        assert found.top1 == (expected.top1 if labelled else None)
    setting = tm.calibrate(model, loader, gmacs=0.7, sample=6, rounds=0, batch_size=6)
    assert setting.images == 6


def test_bad_sources(tmp_path: Path) -> None:
    model = embedded.load_model()
    with pytest.raises(ValueError, match="a loader must give batches"):
        as_images([], model)
    with pytest.raises(ValueError, match="a loader must give batches"):
        as_images([torch.zeros(3, 4)], model)
    with pytest.raises(ValueError, match="no images below it"):
        as_images(tmp_path, model)


def folders(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), "red").save(root / name / "image.png")
    return root


def labels(source: Path, classes: int) -> list[int]:
    model = timm.create_model("test_vit", num_classes=classes)
    batch = next(tm.load_images(source, model, classes=True).batches(10))
    assert batch.labels is not None
    return batch.labels.tolist()


def test_class_folders_with_imagenets_names_have_its_labels(tmp_path: Path) -> None:
    """A subset, as Imagenette is: tench is 0, parachute 701."""
    source = folders(tmp_path, "n01440764", "n02102040", "n03888257")
    assert labels(source, 1000) == [0, 217, 701]
    assert tm.load_images(source, transform=lambda image: torch.zeros(3, 2, 2), classes=True).size == 3
    assert labels(source, 3) == [0, 1, 2], "a model of its own three classes"
    folders(tmp_path, "n99999999")
    with pytest.raises(ValueError, match="n99999999 is not one of ImageNet-1k's 1000 classes"):
        labels(source, 1000)


def test_other_class_folders_must_be_all_classes_of_the_model(tmp_path: Path) -> None:
    source = folders(tmp_path, "cat", "dog", "owl")
    assert labels(source, 3) == [0, 1, 2]
    with pytest.raises(ValueError, match="3 class folders, such as 'cat', for a model with 1000 classes"):
        labels(source, 1000)
    with pytest.raises(ValueError, match="or one folder for every class of the model"):
        labels(source, 4)


def test_options_of_a_training_script_do_no_harm(tmp_path: Path) -> None:
    """Official checkpoints keep an argparse.Namespace next to the weights; other objects stay refused."""
    state = {"weight": torch.ones(2)}
    options = argparse.Namespace(lr=0.1, model="deit_small", betas=(0.9, 0.999), nested=argparse.Namespace(epochs=300))
    torch.save({"model": state, "args": options}, tmp_path / "official.pth")
    assert torch.equal(read_weights(tmp_path / "official.pth")["weight"], state["weight"])
    torch.save({"model": state, "args": Path("x")}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="not a checkpoint of tensors alone"):
        read_weights(tmp_path / "other.pth")


def test_grey_models_read_grey_images_with_any_transform(tmp_path: Path) -> None:
    source = folders(tmp_path, "a")
    seen: list[str] = []

    def transform(image: Any) -> torch.Tensor:
        seen.append(image.mode)
        return torch.zeros(1, 28, 28)

    next(tm.load_images(source, embedded.load_model(), transform=transform).batches(1))
    next(tm.load_images(source, timm.create_model("test_vit"), transform=transform).batches(1))
    assert seen == ["L", "RGB"]


LAYOUTS = {
    "plain.pth": lambda state: state,
    "deit.pth": lambda state: {"model": state},
    "lvvit.pth.tar": lambda state: {
        "epoch": 3,
        "arch": "lvvit_t",
        "state_dict": {f"module.{k}": v for k, v in state.items()},
    },
    "t2t.pth.tar": lambda state: {
        "state_dict": {k: torch.zeros_like(v) for k, v in state.items()},
        "state_dict_ema": state,
        "metric": 81.7,
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["lvvit_t", "t2t_vit_t_14", "deit_tiny_patch16_224"])
def test_checkpoints_in_the_official_layouts_load_strictly(layout: str, name: str, tmp_path: Path) -> None:
    import tokenmerge.models  # noqa: F401, PLC0415 – registers two of them

    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32)
    torch.save(LAYOUTS[layout](model.state_dict()), tmp_path / layout)
    again = tm.load_model(name, tmp_path / layout, img_size=32)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> object:
            return Path.touch, (trace,)

    torch.save({"model": {"w": torch.zeros(1)}, "extra": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"not a checkpoint of tensors alone .* weights_only=False"):
        read_weights(tmp_path / "evil.pth")
    assert not trace.exists()
    (tmp_path / "broken.pth").write_bytes(b"not a file of torch's")
    with pytest.raises(ValueError, match="not a checkpoint of tensors alone"):
        read_weights(tmp_path / "broken.pth")
    torch.save({"optimizer": {"lr": 0.1}, "epoch": 3}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"no state dict found.*it has optimizer, epoch"):
        read_weights(tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"weights are read from \.safetensors files or checkpoints"):
        read_weights(Path(__file__))


def test_a_disguised_eps_file_starts_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow goes by content: an EPS file would start Ghostscript, whatever its name."""
    programs, folder, marker = tmp_path / "bin", tmp_path / "images", tmp_path / "started"
    programs.mkdir()
    folder.mkdir()
    stand_in = programs / "gs"
    stand_in.write_text(f"#!/bin/sh\ntouch {marker}\n")
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    lines = ("%!PS-Adobe-3.0 EPSF-3.0", "%%BoundingBox: 0 0 16 16", "%%EndComments", "showpage", "%%EOF", "")
    (folder / "a.jpg").write_bytes("\n".join(lines).encode())
    Image.new("RGB", (28, 28)).save(folder / "b.png")
    with pytest.raises(Exception, match=r".*"), Image.open(folder / "a.jpg") as opened:
        opened.load()
    assert marker.exists(), "the stand-in would be started"
    marker.unlink()
    images = tm.load_images(folder, timm.create_model("test_vit"))
    with pytest.warns(UserWarning, match=r"skipped a\.jpg .*cannot identify image file"):
        batches = list(images.batches(2))
    assert [name for batch in batches for name in batch.names] == ["b.png"]
    assert not marker.exists()
