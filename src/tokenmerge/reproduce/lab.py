"""What the user has: models, images, a training set; and how the experiments are to be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data import embedded
from ..data.checkpoint import CHECKPOINTS, load_model
from ..data.load import load_images
from ..methods.presets import PRINTED
from ..models.lvvit import HEADS
from ..utils.distributed import ProcessGroup
from ..utils.progress import Progress, no_progress
from .bench import Bench
from .published import PUBLISHED


@dataclass
class Lab:
    """What the user has. Everything that is measured is kept below `out`, so that the same command resumes."""

    out: Path
    images: str
    labels: Path | None = None
    class_folders: bool = False
    weights_dir: Path | None = None
    models: Sequence[str] = ()  # instead of the paper's
    sample: int | None = None  # use this many images, drawn at random
    train_images: str | None = None
    train_labels: Path | None = None
    epochs: int = 30
    batch_size: int | None = None  # instead of the paper's
    head: str = "cls"  # of LV-ViT; the paper keeps only the CLS token, so the head on the patches has nothing to read
    fair: bool = False  # give the CLS-only last layer to every method; the paper gives it to ATM
    tolerance: float = PRINTED  # of "without loss", in points of top-1
    device: str = "cpu"
    workers: int = 0
    group: ProcessGroup = field(default_factory=ProcessGroup)  # processes that share the batches
    progress: Progress = no_progress
    missing: dict[str, str] = field(default_factory=dict)  # what is needed and not available → how to get it
    _benches: dict[tuple[str, str], Bench] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"--head is {' or '.join(HEADS)}, the heads of LV-ViT, not {self.head!r}")

    def benches(self, wanted: Sequence[str]) -> list[Bench]:
        """One for each of the paper's models that are available. If none is, another stands in for the first of them, with
        the configs that the paper has for it."""
        if self.models:
            return [self._bench(name, name if name in wanted else wanted[0]) for name in self.models]
        available = [name for name in wanted if self._weights(name) is not None]
        for name in (name for name in wanted if name not in available):
            known = PUBLISHED[name]
            self.missing[name] = f"{known.label}: put {known.file} of {known.origin} into the folder of --weights-dir"
        if available:
            return [self._bench(name, name) for name in available]
        others = [name for name in PUBLISHED if self._weights(name) is not None]
        if not others:
            raise ValueError("none of the paper's models is available; " + "; ".join(self.missing.values()))
        return [self._bench(others[0], wanted[0])]

    def training(self) -> str | None:
        if self.train_images is None:
            self.missing["training set"] = "the training set, for fine-tuning: give its folder with --train-images"
        return self.train_images

    def _weights(self, name: str) -> Path | None:
        if self.weights_dir is None:
            return None
        begins = {name}
        if name in PUBLISHED:
            begins.add(PUBLISHED[name].file.partition("-")[0].removesuffix(".pth.tar").removesuffix(".pth"))
        files = sorted(p for p in self.weights_dir.iterdir() if p.name.endswith((".safetensors", *CHECKPOINTS)))
        return next((p for p in files if any(p.name.startswith(begin) for begin in begins)), None)

    def _bench(self, name: str, paper: str) -> Bench:
        if (name, paper) not in self._benches:
            options: dict[str, Any] = {"head": self.head} if name.startswith("lvvit") else {}
            model = load_model(name) if name == embedded.NAME else load_model(name, self._weights_or_raise(name), **options)
            crop = PUBLISHED[name].crop if name in PUBLISHED else None
            options = {"labels": self.labels, "classes": self.class_folders, "crop": crop}
            if self.images == embedded.NAME:
                options = {}
            images = load_images(self.images, model, workers=self.workers, **options)
            if self.sample is not None:
                images, _ = images.split(self.sample, seed=0)
            self._benches[name, paper] = Bench(self, name, paper, model.to(self.device), images)
        return self._benches[name, paper]

    def _weights_or_raise(self, name: str) -> Path:
        found = self._weights(name)
        if found is None:
            raise ValueError(f"no weights of {name} in {self.weights_dir}: a file there must begin with its name")
        return found
