"""Models by name and images from a folder, for the command line and the examples."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EMBEDDED = "embedded"
EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")


@dataclass(frozen=True)
class Batch:
    images: Tensor  # [B,3,H,W], normalised as the model wants it
    labels: Tensor | None  # [B] int64
    names: tuple[str, ...]


@dataclass
class Images:
    """A set of images that can be gone through again and again, in the same order."""

    name: str
    size: int
    read: Callable[[int], Iterator[Batch]]  # batch size → batches
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # file → why it could not be read

    def batches(self, batch_size: int) -> Iterator[Batch]:
        return self.read(batch_size)

    def picture(self, image: Tensor) -> Tensor:
        """Undo the normalisation of one image, [3,H,W] in [0,1]."""
        mean, std = (torch.tensor(v, device=image.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return (image * std + mean).clamp(0, 1)


def load_model(name: str, weights: str | Path | None = None, **options: Any) -> nn.Module:
    """The embedded model, or any of timm's by name: with local weights, else with timm's pretrained ones."""
    if name == EMBEDDED:
        from . import embedded

        if weights is not None or options:
            raise ValueError("the embedded model has its own weights and size; leave out --weights and --image-size")
        return embedded.load_model()
    import timm

    if not timm.is_model(name):
        near = timm.list_models(f"*{name.partition('.')[0]}*")[:5]
        raise ValueError(
            f"unknown model {name!r}; use {EMBEDDED!r} or a timm name" + (f", such as {', '.join(near)}" if near else "")
        )
    if weights is None:
        return timm.create_model(name, pretrained=True, **options).eval()
    model = timm.create_model(name, **options)
    state = read_weights(weights)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise ValueError(
            f"{weights} does not fit {name}: {len(missing)} keys missing ({', '.join(missing[:3])} …), "
            f"{len(unexpected)} unexpected ({', '.join(unexpected[:3])} …)"
        )
    return model.eval()


def read_weights(path: str | Path) -> Mapping[str, Tensor]:
    """A state dict from a safetensors file. Nothing is unpickled."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix != ".safetensors":
        raise ValueError(f"{path}: weights are read from .safetensors files; convert it with safetensors.torch.save_file")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from None


def load_images(
    source: str | Path,
    model: nn.Module,
    *,
    labels: str | Path | None = None,
    crop: float | None = None,
    limit: int | None = None,
) -> Images:
    """The embedded images, or all images below a folder, resized and normalised as the model's configuration says."""
    if str(source) == EMBEDDED:
        from . import embedded

        return embedded.load_images("test", limit)
    from timm.data import create_transform, resolve_data_config

    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a folder of images, or {EMBEDDED!r}")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())[:limit]
    if not paths:
        raise ValueError(f"{folder}: no images below it; looked for {', '.join(EXTENSIONS)}")
    known = read_labels(labels) if labels is not None else None
    if known is not None and (lost := [p.name for p in paths if p.name not in known]):
        raise ValueError(
            f"{labels}: no label for {len(lost)} images, such as {lost[0]}; write lines 'file name,class index'"
        )
    config = resolve_data_config({} if crop is None else {"crop_pct": crop}, model=model)
    transform = create_transform(**config, is_training=False)

    def read(batch_size: int) -> Iterator[Batch]:
        pending: list[tuple[Tensor, str]] = []
        for i, path in enumerate(paths, 1):
            if str(path) not in images.skipped:
                try:
                    pending.append((transform(open_image(path)), path.name))
                except Exception as error:  # Pillow raises many kinds
                    images.skipped[str(path)] = str(error) or type(error).__name__
                    warnings.warn(f"skipped {path}: {images.skipped[str(path)]}", stacklevel=2)
            if pending and (len(pending) == batch_size or i == len(paths)):
                names = tuple(name for _, name in pending)
                y = None if known is None else torch.tensor([known[name] for name in names])
                yield Batch(torch.stack([x for x, _ in pending]), y, names)
                pending = []
        if len(images.skipped) == len(paths):
            raise ValueError(f"{folder}: none of its {len(paths)} images could be read")

    images = Images(str(folder), len(paths), read, config["mean"], config["std"])
    return images


def open_image(path: Path) -> Any:
    """An RGB picture; 16-bit grey is scaled to 8 bits, where Pillow alone would clip it to white."""
    from PIL import Image

    with Image.open(path) as file:
        picture: Any = file.point(lambda v: v / 256).convert("L") if file.mode.startswith("I") else file
        return picture.convert("RGB")


def read_labels(path: str | Path) -> dict[str, int]:
    """Lines `file name,class index`."""
    known = {}
    with Path(path).open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if len(row) != 2 or not row[1].strip().isdigit():
                raise ValueError(f"{path}, line {number}: expected 'file name,class index', found {','.join(row)!r}")
            known[row[0]] = int(row[1])
    return known
