"""Models by name and images from a folder, for the command line and the examples."""

from __future__ import annotations

import csv
import pickle
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
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


def load_model(name: str, weights: str | Path | None = None, **options: Any) -> nn.Module:
    """The embedded model, or any of timm's by name: with local weights, else with timm's pretrained ones.
    `options` go to `timm.create_model`: num_classes, img_size, …"""
    if name == EMBEDDED:
        from . import embedded

        if weights is not None or options:
            raise ValueError("the embedded model has its own weights and classes; leave out --weights and --num-classes")
        return embedded.load_model()
    import timm

    if not timm.is_model(name):
        near = timm.list_models(f"*{name.partition('.')[0]}*")[:5]
        raise ValueError(
            f"unknown model {name!r}; use {EMBEDDED!r} or a timm name" + (f", such as {', '.join(near)}" if near else "")
        )
    if weights is None:
        try:
            return timm.create_model(name, pretrained=True, **options).eval()
        except Exception as error:  # no such weights, no hub, no cache: every library on the way raises its own
            raise ValueError(
                f"timm has no pretrained weights of {name} for us ({error}); give local ones with --weights"
            ) from error
    model = timm.create_model(name, **options)
    state = read_weights(weights)
    own = model.state_dict()
    missing, unexpected = [k for k in own if k not in state], [k for k in state if k not in own]
    shapes = [k for k in own if k in state and own[k].shape != state[k].shape]
    wrong = [
        f"{len(keys)} {what} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
        for keys, what in ((missing, "missing"), (unexpected, "unexpected"), (shapes, "of another shape"))
        if keys
    ]
    if wrong:
        advice = "; give the number of classes with --num-classes" if any("head" in k for k in shapes) else ""
        raise ValueError(f"{weights} does not fit {name}: keys {'; '.join(wrong)}{advice}")
    model.load_state_dict(state)
    return model.eval()


def read_weights(path: str | Path) -> Mapping[str, Tensor]:
    """A state dict from a safetensors file, or from a checkpoint of torch's that holds nothing but tensors and plain
    values: no code of a file is ever run. The moving average is taken where there is one, wrappers' prefixes are cut."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a readable safetensors file ({error})") from None
    if not path.name.endswith(CHECKPOINTS):
        raise ValueError(f"{path}: weights are read from .safetensors files or checkpoints ({', '.join(CHECKPOINTS)})")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path}: not a checkpoint of tensors alone ({reason[:150]}). Loading more would run code of the file: if you "
            "trust it, open it with torch.load(…, weights_only=False) yourself, and save its state dict with "
            "safetensors.torch.save_file"
        ) from None
    return _unwrap(found, path)


CHECKPOINTS = (".pth", ".pt", ".pth.tar", ".bin")


def _unwrap(found: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside of a checkpoint."""
    for key in ("state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        keys = ", ".join(map(str, list(found)[:5])) if isinstance(found, Mapping) else type(found).__name__
        raise ValueError(
            f"{path}: no state dict found, neither plain nor under state_dict_ema, model_ema, state_dict or model; "
            f"it has {keys}"
        )
    state = {str(key): value for key, value in found.items()}
    while all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def load_images(
    source: str | Path,
    model: nn.Module | None = None,
    *,
    labels: str | Path | None = None,
    crop: float | None = None,
    size: int | None = None,
    limit: int | None = None,
) -> Images:
    """The embedded images, or all images below a folder, resized and normalised as the model's configuration says;
    `crop` (the share that a centre crop keeps) and `size` (pixels) override it."""
    from timm.data import create_transform, resolve_data_config

    from . import embedded

    if str(source) == EMBEDDED and model is None:
        return embedded.load_images("test", limit)
    if model is None:
        raise ValueError("images of a folder are resized and normalised for a model: give load_images the model, too")
    asked = {"crop_pct": crop, "img_size": size}
    config = resolve_data_config({key: value for key, value in asked.items() if value is not None}, model=model)
    wanted = tuple(config["input_size"])
    if str(source) == EMBEDDED:
        if wanted != embedded.INPUT:
            raise ValueError(f"the embedded images are {embedded.INPUT}, the model takes {wanted}; give a folder of images")
        return embedded.load_images("test", limit)
    folder = Path(source)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a folder of images, or {EMBEDDED!r}")
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in EXTENSIONS and p.is_file())[:limit]
    if not paths:
        raise ValueError(f"{folder}: no images below it; looked for {', '.join(EXTENSIONS)}")
    names = {path: path.relative_to(folder).as_posix() for path in paths}
    known = None if labels is None else _labels_of(list(names.values()), labels)
    transform = create_transform(**config, is_training=False)
    mode = "L" if config["input_size"][0] == 1 else "RGB"

    def read(numbers: Sequence[int], batch_size: int) -> Iterator[Batch]:
        pending: list[tuple[Tensor, str]] = []
        for i, path in enumerate((paths[number] for number in numbers), 1):
            name = names[path]
            if name not in images.skipped:
                try:
                    pending.append((transform(open_image(path, mode)), name))
                except Exception as error:  # Pillow raises many kinds
                    images.skipped[name] = str(error) or type(error).__name__
                    warnings.warn(f"skipped {path}: {images.skipped[name]}", stacklevel=2)
            if pending and (len(pending) == batch_size or i == len(numbers)):
                y = None if known is None else torch.tensor([known[name] for _, name in pending])
                yield Batch(torch.stack([x for x, _ in pending]), y, tuple(name for _, name in pending))
                pending = []
        if all(names[paths[number]] in images.skipped for number in numbers):
            raise ValueError(f"{folder}: none of its {len(numbers)} images could be read")

    images = Images(str(folder), range(len(paths)), read, config["mean"], config["std"])
    return images


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
