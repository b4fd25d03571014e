"""Where images come from: folders, archives, object stores, data sets."""

from __future__ import annotations

import csv
import io
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
HFDS = "hfds/"  # name prefixes, as timm writes them: Hugging Face data sets
WDS = "wds/"  # shards of webdataset

IMAGENET = 1000  # classes of ImageNet-1k
WNID = re.compile(r"n\d{8}")

Transform = Callable[[Any], Tensor]  # a PIL image → [3,H,W]


@dataclass(frozen=True)
class Listing:
    """Images by number."""

    names: Sequence[str]  # unique
    open: Callable[[int], Any]  # what Pillow can open
    labels: Sequence[int] | None = None


def list_source(
    source: str, labels: str | Path | None, classes: bool, split: str, num_classes: int | None = None
) -> Listing:
    """A folder, a .tar file, an object store, or a data set. `num_classes`: of the model, which class folders must fit."""
    if source.startswith((HFDS, WDS)):
        if labels is not None or classes:
            raise ValueError(f"{source}: the data set has its own labels; leave yours out")
        return _hugging_face_dataset(source, split) if source.startswith(HFDS) else _shards(Path(source.removeprefix(WDS)))
    if source.endswith(".tar"):
        names, opener = _tar(Path(source))
    elif "://" in source:
        names, opener = _store(source)
    else:
        names, opener = _folder(Path(source))
    if not names:
        raise ValueError(f"{source}: no images below it; looked for {', '.join(EXTENSIONS)}")
    if labels is not None:
        by_name = _labels_of(names, labels)
        return Listing(names, opener, [by_name[name] for name in names])
    return Listing(names, opener, _by_subfolder(source, names, num_classes) if classes else None)


NamesAndOpener = tuple[list[str], Callable[[int], Any]]


def _folder(folder: Path) -> NamesAndOpener:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a folder of images, a .tar file, {HFDS}NAME, s3://… or 'embedded'")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())
    return [path.relative_to(folder).as_posix() for path in paths], lambda i: paths[i]


@dataclass(frozen=True)
class _Tar:
    """A .tar file. Members are read by their offset, so that processes share no open file."""

    path: Path
    members: dict[str, tuple[int, int]]  # name → offset, bytes

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


def _tar(path: Path) -> NamesAndOpener:
    tar = _Tar.open(path)
    names = tar.images
    return names, lambda i: io.BytesIO(tar.read(names[i]))


def _shards(folder: Path) -> Listing:
    """All webdataset shards in a folder, as one numbered set: KEY.jpg with its class index in KEY.cls."""
    shards = [_Tar.open(path) for path in sorted(folder.glob("*.tar"))]
    found = [(shard, name) for shard in shards for name in shard.images]
    if not found:
        raise ValueError(f"{folder}: no images in its {len(shards)} .tar files; give a folder of shards after {WDS}")
    keys = [(shard, name.rpartition(".")[0] + ".cls") for shard, name in found]
    labels = None
    if all(key in shard.members for shard, key in keys):
        try:
            labels = [int(shard.read(key)) for shard, key in keys]
        except ValueError as error:
            raise ValueError(f"{folder}: a .cls file holds no number ({error})") from error
    names = [f"{shard.path.name}/{name}" for shard, name in found]
    return Listing(names, lambda i: io.BytesIO(found[i][0].read(found[i][1])), labels)


def _store(url: str) -> NamesAndOpener:
    """A URL that fsspec knows: s3://, gs://, file://, memory://, …"""
    from fsspec.core import url_to_fs

    try:
        store, root = url_to_fs(url)
        paths = sorted(path for path in store.find(root) if path.lower().endswith(EXTENSIONS))
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"{url}: cannot be listed ({error})") from error
    return [path.removeprefix(root).lstrip("/") for path in paths], lambda i: io.BytesIO(store.cat_file(paths[i]))


def _hugging_face_dataset(name: str, split: str) -> Listing:
    from timm.data import create_dataset

    try:
        reader: Any = create_dataset(name, None, split=split, is_training=False).reader
    except Exception as error:  # every library behind timm raises its own kind
        raise ValueError(f"{name}: timm cannot read it ({error})") from error
    return Listing([f"{split} {i}" for i in range(len(reader))], lambda i: reader[i][0], _Labels(reader))


class _Labels(Sequence[int]):
    """Labels of a timm reader, looked up one by one."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, i: Any) -> Any:
        return int(self.reader[i][1])


def _by_subfolder(source: str, names: Sequence[str], num_classes: int | None) -> list[int]:
    """Subfolders are classes. Where they have ImageNet's names (n01440764 …), they get its indices, so that a subset has the
    right labels; else they count in the order of their names, and all classes of the model must be there."""
    if loose := [name for name in names if "/" not in name]:
        raise ValueError(f"{source}: {loose[0]} is in no class folder")
    first = [name.partition("/")[0] for name in names]
    known = set(first)
    if num_classes in (None, IMAGENET) and all(map(WNID.fullmatch, known)):
        index = imagenet_index()
        if unknown := sorted(known - set(index)):
            raise ValueError(f"{source}: {unknown[0]} is not one of ImageNet-1k's {IMAGENET} classes; give labels instead")
        return [index[kind] for kind in first]
    if Path(source).is_dir():
        empty = sorted(path.name for path in Path(source).iterdir() if path.is_dir() and path.name not in known)
        if empty:
            raise ValueError(f"{source}: no images in the class folder {empty[0]!r}, so all later classes would shift")
    if num_classes and len(known) != num_classes:
        raise ValueError(
            f"{source}: {len(known)} class folders, such as {min(known)!r}, for a model with {num_classes} classes. "
            f"Supported are ImageNet's names (n01440764 …) for a model with {IMAGENET} classes, or one folder for every "
            "class of the model; else give a CSV file of labels"
        )
    number = {kind: i for i, kind in enumerate(sorted(known))}
    return [number[kind] for kind in first]


def imagenet_index() -> dict[str, int]:
    """ImageNet-1k's class index by wnid."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return {info.index_to_label_name(i): i for i in range(info.num_classes())}


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


def read_labels(path: str | Path) -> dict[str, int]:
    """Lines `path,class index`."""
    known = {}
    with Path(path).open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.reader(file), 1):
            if len(row) != 2 or not row[1].strip().isdigit():
                raise ValueError(f"{path}, line {number}: expected 'path,class index', found {','.join(row)!r}")
            known[row[0]] = int(row[1])
    return known
