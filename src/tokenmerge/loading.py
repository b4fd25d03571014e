"""Images from a folder, a tensor or a loader, as the model wants them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .sources import Files, Listing, Reading, Transform, list_source, reading_for


@dataclass(frozen=True)
class Batch:
    images: Tensor  # [B,3,H,W], normalised as the model wants it
    labels: Tensor | None  # [B] int64
    names: tuple[str, ...]


class Unreadable(ValueError):
    """None of the images that were asked for could be read."""


# Lists of numbers → a batch for each, in this order; None where none of its images could be read.
Read = Callable[[Sequence[Sequence[int]]], Iterator[Batch | None]]


@dataclass
class Images:
    """A set of images that can be gone through again and again, in the same order. Batches are cut by number: an image that
    cannot be read makes its own batch smaller and moves no other."""

    name: str
    numbers: Sequence[int]  # which images of the source, in which order
    read: Read
    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: Sequence[str]  # of all images of the source, by number
    tell: Callable[[], str] = str  # see identity
    skipped: dict[str, str] = field(default_factory=dict)  # name → why it could not be read

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
        names = [f"image {i}" for i in range(len(x))]

        def read(parts: Sequence[Sequence[int]]) -> Iterator[Batch]:
            for part in map(list, parts):
                yield Batch(x[part], None if labels is None else labels[part], tuple(names[i] for i in part))

        def tell() -> str:
            content = hashlib.sha256(x.detach().cpu().float().numpy().tobytes())
            return content.hexdigest() + repr(None if labels is None else labels.tolist())

        none = (0.0,) * x.shape[1]
        return cls(name, range(len(x)), read, none, tuple(1.0 for _ in none), names, tell)

    @property
    def identity(self) -> str:
        """What tells these images, read this way, from others. (It goes over all of them, so that it is worked out when
        somebody asks.)"""
        return hashlib.sha256(f"{self.tell()} {list(self.numbers)}".encode()).hexdigest()

    @property
    def size(self) -> int:
        return len(self.numbers)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        nothing = True
        for _, batch in self.parts(batch_size):
            nothing = False
            yield batch
        if nothing and self.size:
            raise Unreadable(f"{self.name}: none of its {self.size} images could be read")

    def parts(self, batch_size: int, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[tuple[int, Batch]]:
        """Those batches, by number, that are wanted and of which anything can be read."""
        starts = [(i, start) for i, start in enumerate(range(0, self.size, batch_size)) if wanted(i)]
        lists = [[self.numbers[n] for n in range(start, min(start + batch_size, self.size))] for _, start in starts]
        for (number, _), batch in zip(starts, self.read(lists), strict=True):
            if batch is not None:
                yield number, batch

    def take(self, numbers: Sequence[int]) -> Images:
        """Only these, counted from 0 in the order of this set."""
        return replace(self, numbers=[self.numbers[i] for i in numbers])

    def readable(self) -> Images:
        """Without those that cannot be read; each is opened once, and named in `skipped`."""
        read = self.read([[number] for number in self.numbers])
        return replace(self, numbers=[number for number, batch in zip(self.numbers, read, strict=True) if batch is not None])

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


def load_images(
    source: str | Path,
    model: nn.Module | None = None,
    *,
    labels: str | Path | None = None,
    crop: float | None = None,
    size: int | None = None,
    limit: int | None = None,
    transform: Transform | None = None,
    classes: bool = False,
    split: str = "validation",
    workers: int = 0,
) -> Images:
    """The embedded images, all images below a folder, in a .tar file or an object store (`s3://…`), or the `split` of a
    set of Hugging Face's (`hfds/NAME`); resized and normalised as the model's configuration says: timm's, the image
    processor beside a model of Hugging Face's; for torchvision's, timm's usual one at the model's size. `crop` (the share
    that a centre crop keeps) and `size` (pixels) override it; `transform` is used in its place. Labels come from a CSV
    file, or with `classes` from the names of the folders below. `workers` processes decode."""
    from . import embedded

    if str(source) == embedded.NAME and model is None:
        return embedded.load_images("test", limit)
    if model is None and transform is None:
        raise ValueError("images of a folder are resized and normalised for a model: give load_images the model, too")
    says = getattr(transform, "__qualname__", None) or repr(transform)
    reading = Reading(transform, says=says) if transform is not None else reading_for(model, crop, size)
    if str(source) == embedded.NAME:
        if labels is not None or classes:
            raise ValueError("the embedded images have their own labels; leave yours out")
        if reading.size not in (None, embedded.INPUT):
            raise ValueError(
                f"the embedded images are {embedded.INPUT}, the model takes {reading.size}; give a folder of images"
            )
        return embedded.load_images("test", limit)
    return _images(str(source), list_source(str(source), labels, classes, split), reading, limit, workers)


def _images(source: str, listing: Listing, reading: Reading, limit: int | None, workers: int) -> Images:
    files = Files(listing, reading)

    def read(parts: Sequence[Sequence[int]]) -> Iterator[Batch | None]:
        left = [[number for number in part if listing.names[number] not in images.skipped] for part in parts]
        whole = [part for part in left if part]
        found: Iterator[Any] = ([files[number] for number in part] for part in whole)
        if workers:
            found = iter(DataLoader(files, batch_sampler=whole, num_workers=workers, collate_fn=list))
        for part in left:
            yield _batch(next(found)) if part else None

    def _batch(found: list[tuple[int, Tensor | str]]) -> Batch | None:
        good: list[tuple[int, Tensor]] = []
        for number, x in found:
            if isinstance(x, str):
                images.skipped[listing.names[number]] = x
                warnings.warn(f"skipped {listing.names[number]} of {source}: {x}", stacklevel=2)
            else:
                good.append((number, x))
        if not good:
            return None
        y = None if listing.labels is None else torch.tensor([listing.labels[number] for number, _ in good])
        return Batch(torch.stack([x for _, x in good]), y, tuple(listing.names[number] for number, _ in good))

    def tell() -> str:
        labels = listing.labels if isinstance(listing.labels, list) else None  # a set's own go with its name
        return f"{source} {listing.names} {labels} {reading.says}"

    numbers = range(len(listing.names))[:limit]
    images = Images(source, numbers, read, reading.mean, reading.std, listing.names, tell)
    return images
