"""Shared fixtures. Two workers on two cores: one torch thread each."""

from __future__ import annotations

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything reads it: no test waits for a hub

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tokenmerge as tm

torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
DEIT = ROOT.parent / "shared" / "real" / "deit_tiny_patch16_224.safetensors"
PHOTOS = ROOT / ".cache" / "real" / "photos"


@pytest.fixture(scope="session")
def deit_tiny_weights() -> dict[str, Tensor]:
    if not DEIT.is_file():
        pytest.skip("the real DeiT-Tiny weights are not next to the checkout (../shared/real)")
    return load_file(DEIT)


@pytest.fixture
def deit_tiny(deit_tiny_weights: dict[str, Tensor]) -> nn.Module:
    """The real DeiT-Tiny, a fresh one for each test."""
    model = timm.create_model("deit_tiny_patch16_224")
    model.load_state_dict(deit_tiny_weights)
    return model.eval()


@pytest.fixture(scope="session")
def photo_folder() -> Path:
    if not (PHOTOS / "ai_benchmark").is_dir():
        pytest.skip("the real photographs are absent; `make real` fetches them where ../shared/real is next to the checkout")
    return PHOTOS


@pytest.fixture(scope="session")
def mixed_photos(photo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every third of all 330 photographs: neighbours in name are often similar."""
    folder = tmp_path_factory.mktemp("photos")
    for path in sorted(p for p in photo_folder.rglob("*") if p.is_file())[::3]:
        (folder / path.name).symlink_to(path.resolve())
    return folder


@pytest.fixture(scope="session")
def photos(photo_folder: Path) -> Tensor:
    """16 photographs as DeiT sees them, [16,3,224,224]."""
    model = timm.create_model("deit_tiny_patch16_224")
    images = tm.load_images(photo_folder / "ai_benchmark", model, crop=0.875, limit=16)
    return next(images.batches(16)).images
