"""The models and images of the paper's experiments: which of them are available, and what was measured with them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from ..calibration.compare import Comparison
from ..data import embedded
from ..data.checkpoint import CHECKPOINTS, load_model
from ..data.images import Images
from ..data.load import load_images
from ..engine.cost import Convention
from ..engine.patch import apply, plan_of, shared_weights_copy
from ..evaluation.evaluate import Result, evaluate
from ..evaluation.reference import Reference
from ..methods.atm import ATM
from ..methods.base import Method
from ..methods.no_merge import BASELINE, NoMerge
from ..methods.presets import PaperRow, rows_of
from ..training.finetune import finetune
from ..training.recipe import Recipe, training_images
from ..utils.progress import Progress, no_progress

SOLVED_ON = 64  # images on which other methods are solved for a cost; all are then measured on all images


@dataclass(frozen=True)
class Published:
    """A model of the paper: its name there, and the file with the official weights."""

    label: str
    file: str  # begins with this
    origin: str
    rows: str = ""  # name in `paper_rows`, where it differs
    crop: float | None = None  # None: as the model's config says
    convention: Convention = "paper"  # of its GMACs
    batch_size: int = 1024


_DEIT, _LV, _T2T = "facebookresearch/deit", "zihangJiang/TokenLabeling", "yitu-opensource/T2T-ViT"
PUBLISHED = {
    "deit_tiny_patch16_224": Published("DeiT-T", "deit_tiny_patch16_224", _DEIT, crop=0.875),
    "deit_small_patch16_224": Published("DeiT-S", "deit_small_patch16_224", _DEIT, crop=0.875),
    "deit_base_patch16_224": Published("DeiT-B", "deit_base_patch16_224", _DEIT, crop=0.875),
    "lvvit_t": Published("LV-ViT-T", "lvvit_t", _LV, convention="lvvit"),
    "lvvit_s": Published("LV-ViT-S", "lvvit_s", _LV, convention="lvvit"),
    "lvvit_m": Published("LV-ViT-M", "lvvit_m", _LV, convention="lvvit"),
    "t2t_vit_t_14": Published("T2T-ViT-14", "81.7_T2T_ViTt_14", _T2T, batch_size=100),
    "t2t_vit_t_19": Published("T2T-ViT-19", "82.4_T2T_ViTt_19", _T2T, batch_size=100),
    "mae_vit_base_patch16": Published(
        "MAE", "mae_finetuned_vit_base", "facebookresearch/mae", rows="vit_base_patch16_224.mae"
    ),
}


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
    device: str = "cpu"
    workers: int = 0
    progress: Progress = no_progress
    missing: dict[str, str] = field(default_factory=dict)  # what is needed and not available → how to get it
    _benches: dict[tuple[str, str], Bench] = field(default_factory=dict)

    def benches(self, wanted: Sequence[str]) -> list[Bench]:
        """One for each of the paper's models that are available. If none is, another stands in for the first of them, with
        the configs that the paper has for it."""
        if self.models:
            return [self._bench(name, name if name in PUBLISHED else wanted[0]) for name in self.models]
        available = [name for name in wanted if self._weights(name) is not None]
        for name in (name for name in wanted if name not in available):
            known = PUBLISHED[name]
            self.missing[name] = f"{known.label}: put {known.file}….pth of {known.origin} into the folder of --weights-dir"
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
        begins = {name, PUBLISHED[name].file if name in PUBLISHED else name}
        files = sorted(p for p in self.weights_dir.iterdir() if p.name.endswith((".safetensors", *CHECKPOINTS)))
        return next((p for p in files if any(p.name.startswith(begin) for begin in begins)), None)

    def _bench(self, name: str, paper: str) -> Bench:
        if (name, paper) not in self._benches:
            model = load_model(name) if name == embedded.NAME else load_model(name, self._weights_or_raise(name))
            crop = PUBLISHED[name].crop if name in PUBLISHED else None
            options: dict[str, Any] = {"labels": self.labels, "classes": self.class_folders, "crop": crop}
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


@dataclass
class Bench:
    """One model on the images."""

    lab: Lab
    name: str
    paper: str  # the model of the paper that it is, or that it stands in for
    model: nn.Module
    images: Images
    _known: dict[tuple[str, int], Result] = field(default_factory=dict)

    @property
    def _published(self) -> Published:
        return PUBLISHED.get(self.name) or Published(self.name, self.name, "")

    @property
    def label(self) -> str:
        return self._published.label

    @property
    def stands_in(self) -> bool:
        return self.name != self.paper

    @property
    def batch_size(self) -> int:
        return min(self.lab.batch_size or self._published.batch_size, self.images.size)

    @property
    def convention(self) -> Convention:
        return self._published.convention

    @cached_property
    def few(self) -> Comparison:
        """To solve methods for a given cost."""
        folder = self._kept(f"configs {self.images.identity} {self.options}")
        measure = min(SOLVED_ON, self.images.size - 1)
        return Comparison(self.model, self.images, sample=1, measure=measure, resume=folder, options=self.options)

    @cached_property
    def reference(self) -> Reference:
        return self.few.reference

    @property
    def options(self) -> dict[str, Any]:
        """What the paper gives to every method: only the CLS token after the last attention; to MAE neither this nor
        proportional attention."""
        last = plan_of(apply(shared_weights_copy(self.model), NoMerge())).last_layer(self.model)
        options: dict[str, Any] = {"last_layer": "full" if last == "full" else "prefix"}
        return options | ({"prop_attn": False} if self.paper.startswith("mae") else {})

    def rows(self, table: str | None = None) -> list[PaperRow]:
        """The paper's, baseline first."""
        return rows_of(PUBLISHED[self.paper].rows or self.paper, table)

    def atm(self, row: PaperRow, **options: Any) -> ATM:
        return ATM(row.alpha, row.beta, row.theta_min, **(self.options | options))

    def nearest(self, gmacs: float, table: str | None = None) -> PaperRow:
        return min(self.rows(table)[1:], key=lambda row: abs(row.gmacs - gmacs))

    def solve(self, family: str, ratio: float) -> Method:
        """A method at this fraction of the baseline's GMACs."""
        self.lab.progress(f"{self.label}: {family} at {ratio:.0%} of the GMACs", 0)
        return self.few.at(family, ratio).method

    def measure(self, methods: Sequence[Method], batch_size: int | None = None) -> list[Result]:
        """The baseline and each method, on all images."""
        size = batch_size or self.batch_size
        new = [method for method in dict.fromkeys(methods) if (repr(method), size) not in self._known]
        if new or not self._known:
            self.lab.progress(f"{self.label}: {len(new)} configs on {self.images.size} images, batches of {size}", 0)
            for result in self._evaluate(self.model, {repr(method): method for method in new}, size):
                self._known[result.name, size] = result
        return [self._known[BASELINE, size], *(self._known[repr(method), size] for method in methods)]

    def finetuned(self, method: Method) -> Result | None:
        """After the paper's recipe on the training set; None if there is none."""
        source = self.lab.training()
        if source is None:
            return None
        key = (f"fine-tuned {method!r}", self.batch_size)
        if key not in self._known:
            images = training_images(source, self.model, labels=self.lab.train_labels)
            if self.lab.sample is not None:
                images, _ = images.split(self.lab.sample, seed=0)
            micro = min(64, images.size)
            recipe = Recipe(epochs=self.lab.epochs, batch_size=min(1024, images.size // micro * micro), micro_batch=micro)
            self.lab.progress(f"{self.label}: fine-tuning {method!r}, {recipe.epochs} epochs of {images.size} images", 0)
            folder = self._kept(f"fine-tuned {method!r} {recipe} {images.identity}")
            model = copy.deepcopy(self.model)
            finetune(model, images, method, folder, recipe, workers=self.lab.workers, cpu=self.lab.device == "cpu")
            _, self._known[key] = self._evaluate(model.to(self.lab.device), {key[0]: method}, self.batch_size)
        return self._known[key]

    def _evaluate(self, model: nn.Module, methods: Mapping[str, Method], size: int) -> list[Result]:
        resume = self._kept(f"{dict(methods)} {size} {self.images.identity}")
        return evaluate(model, self.images, methods, batch_size=size, convention=self.convention, resume=resume)

    def _kept(self, what: str) -> Path:
        return self.lab.out / "kept" / f"{self.name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
