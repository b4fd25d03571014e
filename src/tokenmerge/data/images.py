"""A set of images that can be iterated again and again, in the same order and in the same batches."""

from __future__ import annotations

import hashlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..backbones.base import Preprocessing
from .preprocessing import open_image
from .sources import Listing


@dataclass(frozen=True)
class ImageBatch:
    images: Tensor  # [B,3,H,W], normalised for the model
    labels: Tensor | None  # [B] int64
    names: tuple[str, ...]


class Unreadable(ValueError):
    """None of the requested images could be read."""


class ImageSource(ABC):
    """Numbered images."""

    names: Sequence[str]  # of all images, by number
    mean: tuple[float, ...] = (0.0,)  # of the normalisation
    std: tuple[float, ...] = (1.0,)

    def __init__(self) -> None:
        self.skipped: dict[str, str] = {}  # name → why it could not be read

    @abstractmethod
    def read(self, parts: Sequence[Sequence[int]]) -> Iterator[ImageBatch | None]:
        """Lists of numbers → a batch for each, in this order; None where none of its images could be read."""

    @abstractmethod
    def describe(self) -> str:
        """What distinguishes these images, read in this way, from others."""


class TensorSource(ImageSource):
    """Images in memory, as uint8 or as the model takes them."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor | None,
        names: Sequence[str],
        prepare: Callable[[Tensor], Tensor] = lambda x: x,
        normalisation: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
        description: str | None = None,  # None: the content itself
    ) -> None:
        super().__init__()
        self.images = images
        self.labels = labels
        self.names = names
        self.prepare = prepare
        channels = images.shape[1]
        self.mean, self.std = normalisation or ((0.0,) * channels, (1.0,) * channels)
        self.description = description

    def read(self, parts: Sequence[Sequence[int]]) -> Iterator[ImageBatch | None]:
        for part in map(list, parts):
            labels = None if self.labels is None else self.labels[part]
            yield ImageBatch(self.prepare(self.images[part]), labels, tuple(self.names[i] for i in part))

    def describe(self) -> str:
        if self.description is not None:
            return self.description
        content = hashlib.sha256(self.images.detach().cpu().float().numpy().tobytes())
        return content.hexdigest() + repr(None if self.labels is None else self.labels.tolist())


@dataclass(frozen=True)
class _Decoder(Dataset[Any]):
    """What a worker does: one image, or the reason why it cannot be read."""

    listing: Listing
    preprocessing: Preprocessing

    def __len__(self) -> int:
        return len(self.listing.names)

    def __getitem__(self, number: int) -> tuple[int, Tensor | str]:
        try:
            image = open_image(self.listing.open(number), self.preprocessing.mode)
            return number, self.preprocessing.transform(image)
        except Exception as error:  # Pillow raises many kinds
            return number, str(error) or type(error).__name__


class FileSource(ImageSource):
    """Image files of a listing, decoded by `workers` processes. Unreadable files are skipped with a warning."""

    def __init__(self, name: str, listing: Listing, preprocessing: Preprocessing, workers: int = 0) -> None:
        super().__init__()
        self.name = name
        self.listing = listing
        self.names = listing.names
        self.preprocessing = preprocessing
        self.mean = preprocessing.mean
        self.std = preprocessing.std
        self.workers = workers

    def read(self, parts: Sequence[Sequence[int]]) -> Iterator[ImageBatch | None]:
        decoder = _Decoder(self.listing, self.preprocessing)
        readable = [[number for number in part if self.names[number] not in self.skipped] for part in parts]
        wanted = [part for part in readable if part]
        decoded: Iterator[Any] = ([decoder[number] for number in part] for part in wanted)
        if self.workers:
            decoded = iter(DataLoader(decoder, batch_sampler=wanted, num_workers=self.workers, collate_fn=list))
        for part in readable:
            yield self._batch(next(decoded)) if part else None

    def _batch(self, decoded: list[tuple[int, Tensor | str]]) -> ImageBatch | None:
        good: list[tuple[int, Tensor]] = []
        for number, x in decoded:
            if isinstance(x, str):
                self.skipped[self.names[number]] = x
                warnings.warn(f"skipped {self.names[number]} of {self.name}: {x}", stacklevel=2)
            else:
                good.append((number, x))
        if not good:
            return None
        labels = self.listing.labels
        y = None if labels is None else torch.tensor([labels[number] for number, _ in good])
        return ImageBatch(torch.stack([x for _, x in good]), y, tuple(self.names[number] for number, _ in good))

    def describe(self) -> str:
        labels = self.listing.labels if isinstance(self.listing.labels, list) else None  # a data set's own go with its name
        return f"{self.name} {self.names} {labels} {self.preprocessing.description}"


@dataclass
class Images:
    """Some images of a source, in some order. Batches are cut by number: an unreadable image makes its own batch smaller
    and shifts no other."""

    name: str
    source: ImageSource
    numbers: Sequence[int] = field(default=())  # which images of the source, in which order

    @classmethod
    def of(cls, source: Tensor | Iterable[Any], name: str = "tensor") -> Images:
        """Images in memory, normalised for the model: [n,3,H,W]; or a loader of such batches, alone or with their labels,
        which is iterated once."""
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
        return cls(name, TensorSource(x, labels, names), range(len(x)))

    @property
    def mean(self) -> tuple[float, ...]:
        return self.source.mean

    @property
    def std(self) -> tuple[float, ...]:
        return self.source.std

    @property
    def names(self) -> Sequence[str]:
        """Of all images of the source, by number."""
        return self.source.names

    @property
    def skipped(self) -> dict[str, str]:
        """Name → why it could not be read."""
        return self.source.skipped

    @property
    def identity(self) -> str:
        """What distinguishes these images, read in this way, from others. (It hashes all of them: computed on demand.)"""
        return hashlib.sha256(f"{self.source.describe()} {list(self.numbers)}".encode()).hexdigest()

    @property
    def size(self) -> int:
        return len(self.numbers)

    def batches(self, batch_size: int) -> Iterator[ImageBatch]:
        empty = True
        for _, batch in self.parts(batch_size):
            empty = False
            yield batch
        if empty and self.size:
            raise Unreadable(f"{self.name}: none of its {self.size} images could be read")

    def parts(
        self, batch_size: int, wanted: Callable[[int], bool] = lambda number: True
    ) -> Iterator[tuple[int, ImageBatch]]:
        """Those batches, by number, that are wanted and of which any image can be read."""
        starts = [(i, start) for i, start in enumerate(range(0, self.size, batch_size)) if wanted(i)]
        lists = [[self.numbers[n] for n in range(start, min(start + batch_size, self.size))] for _, start in starts]
        for (number, _), batch in zip(starts, self.source.read(lists), strict=True):
            if batch is not None:
                yield number, batch

    def take(self, numbers: Sequence[int]) -> Images:
        """Only these, counted from 0 in the order of this set."""
        return replace(self, numbers=[self.numbers[i] for i in numbers])

    def readable(self) -> Images:
        """Without the unreadable images; each image is opened once, and the others are named in `skipped`."""
        read = self.source.read([[number] for number in self.numbers])
        return replace(self, numbers=[number for number, batch in zip(self.numbers, read, strict=True) if batch is not None])

    def split(self, count: int, seed: int) -> tuple[Images, Images]:
        """`count` images drawn at random, and the others."""
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(seed)).tolist()
        return self.take(order[:count]), self.take(sorted(order[count:]))

    def denormalise(self, image: Tensor) -> Tensor:
        """Undo the normalisation of one image, [3,H,W] in [0,1]."""
        mean, std = (torch.tensor(v, device=image.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return (image * std + mean).clamp(0, 1)
