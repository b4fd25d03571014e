"""Images from a folder, a tensor or a loader, as the model wants them."""

from __future__ import annotations

import csv
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
    numbers: Sequence[int]  # which images of the source, in which order
    read: Callable[[Sequence[int], int], Iterator[Batch]]  # numbers, batch size → batches
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skipped: dict[str, str] = field(default_factory=dict)  # file → why it could not be read

    @classmethod
    def of(cls, source: Tensor | Iterable[Any], name: str = "tensor") -> Images:
        """Images in memory, normalised as the model wants them: [n,3,H,W]; or a loader of such batches, alone or with their
        labels, which is gone through once."""
        labels: Tensor | None = None
        if isinstance(source, Tensor):
            x = source
        else:
            rows = list(source)
            batches = [row if isinstance(row, Tensor) else row[0] for row in rows]
            if not batches or not all(isinstance(batch, Tensor) and batch.ndim == 4 for batch in batches):
                raise ValueError("a loader must give batches [n,3,H,W], alone or as the first of a tuple")
            x = torch.cat(batches)
            if all(not isinstance(row, Tensor) and len(row) == 2 and isinstance(row[1], Tensor) for row in rows):
                labels = torch.cat([row[1] for row in rows])

        def read(numbers: Sequence[int], batch_size: int) -> Iterator[Batch]:
            for start in range(0, len(numbers), batch_size):
                part = list(numbers[start : start + batch_size])
                yield Batch(x[part], None if labels is None else labels[part], tuple(f"image {i}" for i in part))

        none = (0.0,) * x.shape[1]
        return cls(name, range(len(x)), read, none, tuple(1.0 for _ in none))

    @property
    def size(self) -> int:
        return len(self.numbers)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        return self.read(self.numbers, batch_size)

    def take(self, numbers: Sequence[int]) -> Images:
        """Only these, counted from 0 in the order of this set."""
        return replace(self, numbers=[self.numbers[i] for i in numbers])

    def readable(self) -> Images:
        """Without those that cannot be read; each is opened once, and named in `skipped`."""
        good = []
        for number in self.numbers:
            with suppress(ValueError):  # it was the only one asked for
                next(self.read([number], 1))
                good.append(number)
        return replace(self, numbers=good)

    def split(self, count: int, seed: int) -> tuple[Images, Images]:
        """So many, drawn at random, and the others."""
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(seed)).tolist()
        return self.take(order[:count]), self.take(sorted(order[count:]))

    def picture(self, image: Tensor) -> Tensor:
        """Undo the normalisation of one image, [3,H,W] in [0,1]."""
        mean, std = (torch.tensor(v, device=image.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return (image * std + mean).clamp(0, 1)


Source = Images | Tensor | Iterable[Any] | str | Path


def as_images(source: Source, model: nn.Module) -> Images:
    """What users have: a folder, a tensor, a loader, or Images."""
    if isinstance(source, Images):
        return source
    return load_images(source, model) if isinstance(source, str | Path) else Images.of(source)


Transform = Callable[[Any], Tensor]  # a PIL image → [3,H,W]


def load_images(
    source: str | Path,
    model: nn.Module | None = None,
    *,
    labels: str | Path | None = None,
    crop: float | None = None,
    size: int | None = None,
    limit: int | None = None,
    transform: Transform | None = None,
) -> Images:
    """The embedded images, or all images below a folder, resized and normalised as the model's configuration says: timm's,
    the image processor beside a model of Hugging Face's, torchvision's usual one. `crop` (the share that a centre crop
    keeps) and `size` (pixels) override it; `transform` is used in its place."""
    from . import embedded

    if str(source) == embedded.NAME and model is None:
        return embedded.load_images("test", limit)
    if model is None and transform is None:
        raise ValueError("images of a folder are resized and normalised for a model: give load_images the model, too")
    reading = _Reading(transform) if transform is not None else _reading(model, crop, size)
    if str(source) == embedded.NAME:
        if reading.size not in (None, embedded.INPUT):
            raise ValueError(
                f"the embedded images are {embedded.INPUT}, the model takes {reading.size}; give a folder of images"
            )
        return embedded.load_images("test", limit)
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a folder of images, or {embedded.NAME!r}")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())[:limit]
    if not paths:
        raise ValueError(f"{folder}: no images below it; looked for {', '.join(EXTENSIONS)}")
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    known = None if labels is None else _labels_of(list(names.values()), labels)
    change, mode = reading.transform, reading.mode

    def read(numbers: Sequence[int], batch_size: int) -> Iterator[Batch]:
        pending: list[tuple[Tensor, str]] = []
        for i, path in enumerate((paths[number] for number in numbers), 1):
            name = names[path]
            if name not in images.skipped:
                try:
                    pending.append((change(open_image(path, mode)), name))
                except Exception as error:  # Pillow raises many kinds
                    images.skipped[name] = str(error) or type(error).__name__
                    warnings.warn(f"skipped {path}: {images.skipped[name]}", stacklevel=2)
            if pending and (len(pending) == batch_size or i == len(numbers)):
                y = None if known is None else torch.tensor([known[name] for _, name in pending])
                yield Batch(torch.stack([x for x, _ in pending]), y, tuple(name for _, name in pending))
                pending = []
        if all(names[paths[number]] in images.skipped for number in numbers):
            raise ValueError(f"{folder}: none of its {len(numbers)} images could be read")

    images = Images(str(folder), range(len(paths)), read, reading.mean, reading.std)
    return images


@dataclass(frozen=True)
class _Reading:
    """How pictures become what a model takes."""

    transform: Transform
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    mode: str = "RGB"
    size: tuple[int, ...] | None = None


def _reading(model: Any, crop: float | None, size: int | None) -> _Reading:
    from timm.data import create_transform, resolve_data_config

    if any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        if crop is not None or size is not None:
            raise ValueError(
                "a model of Hugging Face's has its image processor; leave out crop and size, or give a transform"
            )
        return _by_processor(model)
    asked = {"crop_pct": crop, "img_size": size or getattr(model, "image_size", None)}  # torchvision's name for it
    config = resolve_data_config({key: value for key, value in asked.items() if value is not None}, model=model)
    wanted = tuple(config["input_size"])
    return _Reading(
        create_transform(**config, is_training=False),
        config["mean"],
        config["std"],
        "L" if wanted[0] == 1 else "RGB",
        wanted,
    )


def _by_processor(model: Any) -> _Reading:
    from transformers import AutoImageProcessor

    find: Any = AutoImageProcessor.from_pretrained
    try:
        processor = find(model.config.name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no image processor was found beside the weights of this {type(model).__name__} "
            f"({str(error).splitlines()[0]}); give load_images a transform, or a tensor or loader in place of the folder"
        ) from None
    return _Reading(
        lambda picture: processor(picture, return_tensors="pt")["pixel_values"][0],
        tuple(processor.image_mean),
        tuple(processor.image_std),
    )


def _labels_of(names: list[str], path: str | Path) -> dict[str, int]:
    """Labels by path below the folder, or by file name alone where that is unique."""
    known = read_labels(path)
    short = Counter(name.rpartition("/")[2] for name in names)
    found = {
        name: known[key]
        for name in names
        if (key := name if name in known else name.rpartition("/")[2]) in known and (key == name or short[key] == 1)
    }
    if lost := [name for name in names if name not in found]:
        advice = "write lines 'path below the folder,class index'"
        raise ValueError(f"{path}: no label for {len(lost)} images, such as {lost[0]}; {advice}")
    return found


def open_image(path: Path, mode: str = "RGB") -> Any:
    """A picture in this mode; 16-bit grey is scaled to 8 bits, where Pillow alone would clip it to white."""
    from PIL import Image

    with Image.open(path) as file:
        picture: Any = file.point(lambda v: v / 256).convert("L") if file.mode.startswith("I") else file
        return picture.convert(mode)


def read_labels(path: str | Path) -> dict[str, int]:
    """Lines `path,class index`."""
    known = {}
    with Path(path).open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if len(row) != 2 or not row[1].strip().isdigit():
                raise ValueError(f"{path}, line {number}: expected 'path,class index', found {','.join(row)!r}")
            known[row[0]] = int(row[1])
    return known
