"""Where images come from, and how pictures become what a model takes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
# Before a name: sets that timm reads. hfds: Hugging Face datasets; wds: shards of webdataset, which are a stream.
TIMM_SETS = ("hfds/", "wds/", "torch/")

Transform = Callable[[Any], Tensor]  # a PIL image → [3,H,W]


@dataclass(frozen=True)
class Listing:
    """Images by number."""

    names: Sequence[str]
    open: Callable[[int], Any]  # what Pillow can open
    labels: Sequence[int] | None = None
    stream: Callable[[], Iterable[tuple[Any, int]]] | None = None  # pictures and labels, where there are no numbers


@dataclass(frozen=True)
class Reading:
    """How pictures become what a model takes."""

    transform: Transform
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    mode: str = "RGB"
    size: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Files(Dataset[Any]):
    """What a worker does: one image, or the reason why there is none."""

    listing: Listing
    reading: Reading
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> tuple[int, Tensor | str]:
        number = self.numbers[i]
        try:
            return number, self.reading.transform(open_image(self.listing.open(number), self.reading.mode))
        except Exception as error:  # Pillow raises many kinds
            return number, str(error) or type(error).__name__


def list_folder(folder: Path, limit: int | None, labels: str | Path | None, classes: bool) -> Listing:
    if not folder.is_dir():
        raise ValueError(
            f"{folder}: no such folder; give a folder of images, a .tar file, {', '.join(TIMM_SETS)}NAME or 'embedded'"
        )
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())[:limit]
    if not paths:
        raise ValueError(f"{folder}: no images below it; looked for {', '.join(EXTENSIONS)}")
    names = [path.relative_to(folder).as_posix() for path in paths]
    known: list[int] | None = None
    if labels is not None:
        by_name = _labels_of(names, labels)
        known = [by_name[name] for name in names]
    elif classes:
        known = _by_subfolder(folder, names)
    return Listing(names, lambda i: paths[i], known)


def _by_subfolder(folder: Path, names: Sequence[str]) -> list[int]:
    """Folders below are classes, in the order of their names."""
    kinds = sorted(path.name for path in folder.iterdir() if path.is_dir())
    seen = Counter(name.partition("/")[0] for name in names)
    if empty := [kind for kind in kinds if not seen[kind]]:
        raise ValueError(f"{folder}: no images in the class folder {empty[0]!r}, so that all classes behind it would shift")
    if loose := [name for name in names if "/" not in name]:
        raise ValueError(f"{folder}: {loose[0]} lies in no class folder")
    return [kinds.index(name.partition("/")[0]) for name in names]


def list_store(url: str, limit: int | None) -> Listing:
    """All images below a place that fsspec knows: s3://, gs://, file://, memory://, …"""
    from fsspec.core import url_to_fs

    try:
        store, root = url_to_fs(url)
        found = sorted(path for path in store.find(root) if path.lower().endswith(EXTENSIONS))[:limit]
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"{url}: cannot be listed ({error})") from error
    if not found:
        raise ValueError(f"{url}: no images below it; looked for {', '.join(EXTENSIONS)}")
    return Listing([path.removeprefix(root).lstrip("/") for path in found], lambda i: store.open(found[i], "rb"))


def list_timm_set(name: str, split: str) -> Listing:
    from timm.data import create_dataset

    try:
        if name.endswith(".tar"):
            found = create_dataset("", name)
        else:
            kind, _, rest = name.partition("/")
            root = rest if kind == "wds" else None
            found = create_dataset(name, root, split=split, is_training=False, batch_size=1)
    except Exception as error:  # every library behind timm raises its own
        raise ValueError(f"{name}: timm cannot read it ({error})") from error
    reader: Any = found.reader
    if not hasattr(found, "__getitem__"):
        return Listing([f"{name} {i}" for i in range(len(found))], lambda i: None, None, lambda: found)
    names = reader.filenames(basename=False) if hasattr(reader, "filenames") else [str(i) for i in range(len(reader))]
    return Listing(names, lambda i: reader[i][0], _Labels(reader))


class _Labels(Sequence[int]):
    """Labels of a reader of timm's, looked up one by one."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, i: Any) -> Any:
        return int(self.reader[i][1])


def reading_for(model: Any, crop: float | None, size: int | None) -> Reading:
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
    return Reading(
        create_transform(**config, is_training=False),
        config["mean"],
        config["std"],
        "L" if wanted[0] == 1 else "RGB",
        wanted,
    )


def _by_processor(model: Any) -> Reading:
    from transformers import AutoImageProcessor

    find: Any = AutoImageProcessor.from_pretrained
    try:
        processor = find(model.config.name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no image processor was found beside the weights of this {type(model).__name__} "
            f"({str(error).splitlines()[0]}); give load_images a transform, or a tensor or loader in place of the folder"
        ) from None
    return Reading(
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


def open_image(file: Any, mode: str = "RGB") -> Any:
    """A picture in this mode, from a path or an open file. 16-bit grey is scaled to 8 bits: Pillow alone would clip it."""
    from PIL import Image

    with Image.open(file) as found:
        picture: Any = found.point(lambda v: v / 256).convert("L") if found.mode.startswith("I") else found
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
