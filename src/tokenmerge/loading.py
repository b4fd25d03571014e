"""Images from a folder, a tensor or a loader, as the model wants them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .sources import TIMM_SETS, Files, Listing, Reading, Transform, list_folder, list_store, list_timm_set, reading_for


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
    names: Sequence[str] = ()  # of all images of the source, by number
    stream: bool = False  # whether it can only be gone through in its own order

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
        names = [f"image {i}" for i in range(len(x))]
        return cls(name, range(len(x)), read, none, tuple(1.0 for _ in none), names=names)

    @property
    def size(self) -> int:
        return len(self.numbers)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        return self.read(self.numbers, batch_size)

    def parts(self, batch_size: int, wanted: Callable[[int], bool]) -> Iterator[tuple[int, Batch]]:
        """Those batches, by number, that are wanted. They are cut by the numbers of the images, so that one that cannot be
        read makes its own batch smaller and moves no other."""
        if self.stream:
            yield from ((number, batch) for number, batch in enumerate(self.batches(batch_size)) if wanted(number))
            return
        for number, start in enumerate(range(0, self.size, batch_size)):
            if wanted(number):
                with suppress(ValueError):  # none of them could be read
                    part = self.take(range(start, min(start + batch_size, self.size)))
                    yield from ((number, batch) for batch in part.batches(batch_size))

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
    """The embedded images, all images below a folder, in a .tar file, or of a set that timm reads (`hfds/NAME`,
    `wds/FOLDER`, their `split`); resized and normalised as the model's configuration says: timm's, the image processor
    beside a model of Hugging Face's, torchvision's usual one. `crop` (the share that a centre crop keeps) and `size`
    (pixels) override it; `transform` is used in its place. Labels come from a CSV file, or with `classes` from the names of
    the folders below. `workers` processes decode."""
    from . import embedded

    if str(source) == embedded.NAME and model is None:
        return embedded.load_images("test", limit)
    if model is None and transform is None:
        raise ValueError("images of a folder are resized and normalised for a model: give load_images the model, too")
    reading = Reading(transform) if transform is not None else reading_for(model, crop, size)
    if str(source) == embedded.NAME:
        if reading.size not in (None, embedded.INPUT):
            raise ValueError(
                f"the embedded images are {embedded.INPUT}, the model takes {reading.size}; give a folder of images"
            )
        return embedded.load_images("test", limit)
    if str(source).startswith(TIMM_SETS) or str(source).endswith(".tar"):
        listing = list_timm_set(str(source), split)
    elif "://" in str(source):
        listing = list_store(str(source), limit)
    else:
        listing = list_folder(Path(source), limit, labels, classes)
    return _images(str(source), listing, reading, limit, workers)


def _images(source: str, listing: Listing, reading: Reading, limit: int | None, workers: int) -> Images:
    if listing.stream is not None:
        return _stream(source, listing, reading, limit)

    def read(numbers: Sequence[int], batch_size: int) -> Iterator[Batch]:
        left = [number for number in numbers if listing.names[number] not in images.skipped]
        files = Files(listing, reading, left)
        found: Iterable[Any] = (files[i] for i in range(len(files)))
        if workers:
            found = chain.from_iterable(DataLoader(files, batch_size, num_workers=workers, collate_fn=list))
        pending: list[tuple[int, Tensor]] = []
        good = 0
        for i, (number, x) in enumerate(found, 1):
            if isinstance(x, str):
                images.skipped[listing.names[number]] = x
                warnings.warn(f"skipped {listing.names[number]} of {source}: {x}", stacklevel=2)
            else:
                pending.append((number, x))
                good += 1
            if pending and (len(pending) == batch_size or i == len(left)):
                y = None if listing.labels is None else torch.tensor([listing.labels[n] for n, _ in pending])
                yield Batch(torch.stack([x for _, x in pending]), y, tuple(listing.names[n] for n, _ in pending))
                pending = []
        if not good:
            raise ValueError(f"{source}: none of its {len(numbers)} images could be read")

    images = Images(source, range(len(listing.names))[:limit], read, reading.mean, reading.std, names=listing.names)
    return images


def _stream(source: str, listing: Listing, reading: Reading, limit: int | None) -> Images:
    stream = listing.stream
    assert stream is not None

    def read(numbers: Sequence[int], batch_size: int) -> Iterator[Batch]:
        if isinstance(numbers, range) and numbers.step == 1:
            rows = islice(stream(), numbers.start, numbers.stop)
        else:
            raise ValueError(
                f"{source} is a stream, which has no numbered images; take a folder, a .tar file or hfds/ for this"
            )
        while part := list(islice(rows, batch_size)):
            x = torch.stack([reading.transform(picture.convert(reading.mode)) for picture, _ in part])
            yield Batch(x, torch.tensor([label for _, label in part]), tuple(source for _ in part))

    return Images(
        source, range(len(listing.names))[:limit], read, reading.mean, reading.std, names=listing.names, stream=True
    )
