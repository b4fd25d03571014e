"""Images from a folder, an archive, an object store, a data set or memory, preprocessed for a model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..backbones import match_adapter
from ..backbones.base import Preprocessing
from . import embedded
from .images import FileSource, Images
from .preprocessing import preprocessing_for
from .sources import Transform, list_source

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
    Hugging Face data set (`hfds/NAME`), preprocessed as the model's config says: timm's data config, the image processor of
    a Hugging Face model; for torchvision, timm's defaults at the model's size.

    `crop` (the fraction that a centre crop keeps) and `size` (pixels) override the config; `transform` replaces it. Labels
    come from a CSV file, or with `classes` from the names of the subfolders: ImageNet's own (n01440764 …), or one for every
    class of the model. `workers` processes decode."""
    source = str(source)
    if source == embedded.NAME:
        if crop is not None or transform is not None:
            raise ValueError("the embedded images are used as they are; leave out crop and transform")
        return _embedded(model, size, labels is not None or classes, limit)
    adapter = None if model is None else match_adapter(model)
    if transform is not None:
        description = getattr(transform, "__qualname__", None) or repr(transform)
        grey = model is not None and adapter is not None and adapter.input_size(model)[0] == 1
        preprocessing = Preprocessing(transform, mode="L" if grey else "RGB", description=description)
    elif model is not None:
        preprocessing = preprocessing_for(model, crop, size)
    else:
        raise ValueError("images of a folder are resized and normalised for a model: give load_images the model, too")
    num_classes = None if model is None or adapter is None else adapter.num_classes(model)
    listing = list_source(source, labels, classes, split, num_classes)
    return Images(source, FileSource(source, listing, preprocessing, workers), range(len(listing.names))[:limit])


def _embedded(model: nn.Module | None, size: int | None, labels: bool, limit: int | None) -> Images:
    if labels:
        raise ValueError("the embedded images have their own labels; leave yours out")
    if model is not None:
        wanted = preprocessing_for(model, None, size).size
        if wanted not in (None, embedded.INPUT):
            raise ValueError(f"the embedded images are {embedded.INPUT}, the model takes {wanted}; give a folder of images")
    return embedded.load_images("test", limit)
