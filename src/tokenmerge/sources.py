"""Where images come from, and how pictures become what a model takes."""

from __future__ import annotations

import csv
import io
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
HFDS, WDS = "hfds/", "wds/"  # before a name, as timm writes them: Hugging Face datasets; shards of webdataset

Transform = Callable[[Any], Tensor]  # a PIL image → [3,H,W]


@dataclass(frozen=True)
class Listing:
    """Images by number."""

    names: Sequence[str]  # no two are alike
    open: Callable[[int], Any]  # what Pillow can open
    labels: Sequence[int] | None = None


@dataclass(frozen=True)
class Reading:
    """How pictures become what a model takes."""

    transform: Transform
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    mode: str = "RGB"
    size: tuple[int, ...] | None = None
    says: str = ""  # what the transform does, in words that are the same tomorrow


@dataclass(frozen=True)
class Files(Dataset[Any]):
    """What a worker does: one image, or the reason why there is none."""

    listing: Listing
    reading: Reading

    def __len__(self) -> int:
        return len(self.listing.names)

    def __getitem__(self, number: int) -> tuple[int, Tensor | str]:
        try:
            return number, self.reading.transform(open_image(self.listing.open(number), self.reading.mode))
        except Exception as error:  # Pillow raises many kinds
            return number, str(error) or type(error).__name__


def list_source(source: str, labels: str | Path | None, classes: bool, split: str) -> Listing:
    """A folder, a .tar file, an object store, or a set of Hugging Face's."""
    if source.startswith((HFDS, WDS)):
        if labels is not None or classes:
            raise ValueError(f"{source}: the set has its own labels; leave yours out")
        return _hugging_face_set(source, split) if source.startswith(HFDS) else _shards(Path(source.removeprefix(WDS)))
    if source.endswith(".tar"):
        names, find = _tar(Path(source))
    elif "://" in source:
        names, find = _store(source)
    else:
        names, find = _folder(Path(source))
    if not names:
        raise ValueError(f"{source}: no images below it; looked for {', '.join(EXTENSIONS)}")
    if labels is not None:
        by_name = _labels_of(names, labels)
        return Listing(names, find, [by_name[name] for name in names])
    return Listing(names, find, _by_subfolder(source, names) if classes else None)


Found = tuple[list[str], Callable[[int], Any]]  # names, and how each is opened


def _folder(folder: Path) -> Found:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a folder of images, a .tar file, {HFDS}NAME, s3://… or 'embedded'")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    return [path.relative_to(folder).as_posix() for path in paths], lambda i: paths[i]


@dataclass(frozen=True)
class _Tar:
    """A .tar file, whose members are read by their place in it, so that processes share no open file."""

    path: Path
    members: dict[str, tuple[int, int]]  # name → where it begins, bytes

    @classmethod
    def open(cls, path: Path) -> _Tar:
        try:
            with tarfile.open(path, "r:") as tar:
                return cls(path, {m.name.removeprefix("./"): (m.offset_data, m.size) for m in tar if m.isfile()})
        except (OSError, tarfile.TarError) as error:
            raise ValueError(f"{path}: not a readable, uncompressed .tar file ({error})") from error

    @property
    def images(self) -> list[str]:
        return sorted(name for name in self.members if name.lower().endswith(EXTENSIONS))

    def read(self, name: str) -> bytes:
        start, size = self.members[name]
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(size)


def _tar(path: Path) -> Found:
    tar = _Tar.open(path)
    names = tar.images
    return names, lambda i: io.BytesIO(tar.read(names[i]))


def _shards(folder: Path) -> Listing:
    """All shards of webdataset in a folder, as one numbered set: KEY.jpg with KEY.cls, the index of its class, beside it."""
    shards = [_Tar.open(path) for path in sorted(folder.glob("*.tar"))]
    found = [(shard, name) for shard in shards for name in shard.images]
    if not found:
        raise ValueError(f"{folder}: no images in its {len(shards)} .tar files; give a folder of shards behind {WDS}")
    keys = [(shard, name.rpartition(".")[0] + ".cls") for shard, name in found]
    labels = None
    if all(key in shard.members for shard, key in keys):
        try:
            labels = [int(shard.read(key)) for shard, key in keys]
        except ValueError as error:
            raise ValueError(f"{folder}: a .cls file holds no number ({error})") from error
    names = [f"{shard.path.name}/{name}" for shard, name in found]
    return Listing(names, lambda i: io.BytesIO(found[i][0].read(found[i][1])), labels)


def _store(url: str) -> Found:
    """A place that fsspec knows: s3://, gs://, file://, memory://, …"""
    from fsspec.core import url_to_fs

    try:
        store, root = url_to_fs(url)
        paths = sorted(path for path in store.find(root) if path.lower().endswith(EXTENSIONS))
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"{url}: cannot be listed ({error})") from error
    return [path.removeprefix(root).lstrip("/") for path in paths], lambda i: io.BytesIO(store.cat_file(paths[i]))


def _hugging_face_set(name: str, split: str) -> Listing:
    from timm.data import create_dataset

    try:
        reader: Any = create_dataset(name, None, split=split, is_training=False).reader
    except Exception as error:  # every library behind timm raises its own
        raise ValueError(f"{name}: timm cannot read it ({error})") from error
    return Listing([f"{split} {i}" for i in range(len(reader))], lambda i: reader[i][0], _Labels(reader))


class _Labels(Sequence[int]):
    """Labels of a reader of timm's, looked up one by one."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, i: Any) -> Any:
        return int(self.reader[i][1])


def _by_subfolder(source: str, names: Sequence[str]) -> list[int]:
    """Folders below are classes, in the order of their names."""
    if loose := [name for name in names if "/" not in name]:
        raise ValueError(f"{source}: {loose[0]} lies in no class folder")
    first = [name.partition("/")[0] for name in names]
    known = set(first)
    if Path(source).is_dir():
        empty = sorted(path.name for path in Path(source).iterdir() if path.is_dir() and path.name not in known)
        if empty:
            raise ValueError(
                f"{source}: no images in the class folder {empty[0]!r}, so that all classes behind it would shift"
            )
    number = {kind: i for i, kind in enumerate(sorted(known))}
    return [number[kind] for kind in first]


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
    wanted, transform = tuple(config["input_size"]), create_transform(**config, is_training=False)
    mode = "L" if wanted[0] == 1 else "RGB"
    return Reading(transform, config["mean"], config["std"], mode, wanted, repr(transform))


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
        says=str(processor),
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
