"""The recipe of a fine-tuning run, and the images of each of its steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..data import embedded
from ..data.images import Images
from ..data.load import load_images
from ..data.preprocessing import preprocessing_for
from ..engine.patch import adapter_of

AUGMENT = "rand-m9-mstd0.5-inc1"  # DeiT's, in timm's notation
ERASE = 0.25  # DeiT's probability of random erasing


@dataclass(frozen=True)
class Recipe:
    """The paper's fine-tuning (30 epochs, no warm-up, cosine from 2e-5 to 3e-6), otherwise DeiT's script: AdamW, mixup,
    CutMix, label smoothing, drop path, repeated augmentation, an EMA next to the weights, the learning rate for 512 images
    scaled with the batch.

    Where a step is cut into micro-batches, the r of threshold rules is still that of the whole step (see whole_batch.py).
    Mixup and CutMix draw once per micro-batch, where DeiT draws once per device; the learning rate falls with every step,
    where DeiT's falls with every epoch."""

    epochs: int = 30
    batch_size: int = 1024  # of a step, over all processes and micro-batches
    micro_batch: int = 64  # images whose gradients are computed at once
    lr: float = 2e-5  # for `lr_batch` images per step
    lr_batch: int | None = 512  # the first learning rate is lr · batch_size / lr_batch; None: lr
    min_lr: float = 3e-6  # not scaled, as in DeiT's script
    module_lr: float = 1.0  # factor of the learning rate of the method's own modules, where it has any
    weight_decay: float = 0.05
    mixup: float = 0.8
    cutmix: float = 1.0
    smoothing: float = 0.1
    drop_path: float = 0.1  # stochastic depth of the last block; it grows linearly from 0
    repeats: int = 3  # repeated augmentation: an epoch shows a third of the images, each three times
    teacher: float = 0.0  # weight of distillation from the baseline model in the loss, instead of the labels; ours
    clip: float | None = None  # of the gradient's norm
    warmup: float = 0.0  # epochs in which the learning rate rises from `warmup_lr`
    warmup_lr: float = 1e-6
    cooldown: float = 0.0  # last epochs, at `min_lr`
    eval_mode: bool = False  # dropout and stochastic depth stay off, as in EViT's fine-tuning
    shrink: tuple[float, float] | None = None  # epochs between which the reduction grows from nothing to the method's own
    consistency: float = 0.0  # weight of MCTF's loss between a strong and a weak reduction
    weak: tuple[float, float] = (0.0, 7 / 16)  # range of the weak one, as a fraction of the method's reduction
    confidence: float = 0.4  # least probability of the label for an image to take part in that loss
    labels: bool = True  # False: that loss alone, and the weak reduction runs in a frozen copy of the model
    ema: float | None = 0.99996  # decay of an exponential moving average of the weights, saved as ema.safetensors
    use_ema: bool = False  # leave the model with the average; DeiT's script evaluates the weights themselves
    checkpointing: bool = False  # of activations
    bf16: bool = False  # autocast
    seed: int = 0
    save_every: int = 100  # steps

    def __post_init__(self) -> None:
        if self.batch_size % self.micro_batch:
            raise ValueError(f"batches of {self.batch_size} cannot be cut into micro-batches of {self.micro_batch}")
        if self.use_ema and self.ema is None:
            raise ValueError("use_ema needs the decay of the moving average: give ema, such as 0.99996")
        if not self.labels and not self.consistency:
            raise ValueError("without labels, the loss between two reductions is the only one: give consistency, such as 3")
        if self.warmup + self.cooldown >= self.epochs:
            outside = f"a warm-up of {self.warmup:g} and a cool-down of {self.cooldown:g}"
            raise ValueError(f"{self.epochs} epochs leave none between {outside}")

    def scaled(self, factor: float) -> Recipe:
        """The same schedule over another number of epochs."""
        epochs = max(1, round(factor * self.epochs))
        part = epochs / self.epochs
        shrink = None if self.shrink is None else (part * self.shrink[0], part * self.shrink[1])
        return replace(self, epochs=epochs, warmup=part * self.warmup, cooldown=part * self.cooldown, shrink=shrink)

    @property
    def peak_lr(self) -> float:
        """The learning rate after the warm-up, for the batch size."""
        return self.lr if self.lr_batch is None else self.lr * self.batch_size / self.lr_batch

    def learning_rate(self, done: float) -> float:
        """At this fraction of the run: linear warm-up, a half cosine over all epochs but the cool-down, then `min_lr`."""
        epoch = done * self.epochs
        if epoch < self.warmup:
            return self.warmup_lr + (self.peak_lr - self.warmup_lr) * epoch / self.warmup
        part = min(epoch / (self.epochs - self.cooldown), 1.0)
        return self.min_lr + (self.peak_lr - self.min_lr) * (1 + math.cos(math.pi * part)) / 2

    def reduction(self, done: float) -> float:
        """The fraction of the method's reduction at this fraction of the run: EViT's schedule of the keep rate."""
        if self.shrink is None:
            return 1.0
        first, last = self.shrink
        part = min(max((done * self.epochs - first) / (last - first), 0.0), 1.0)
        return (1 - math.cos(math.pi * part)) / 2


# Published schedules, by the name of the method: see docs/evaluation.md.
RECIPES: dict[str, Recipe] = {
    "atm": Recipe(),
    "tome": Recipe(epochs=300, lr=5e-4, min_lr=1e-5, warmup=5),
    "evit": Recipe(batch_size=2048, min_lr=2e-6, weight_decay=1e-6, eval_mode=True),
    "evit-scratch": Recipe(epochs=300, batch_size=2048, lr=5e-4, min_lr=1e-5, warmup=5, shrink=(10, 110)),
    "bat": Recipe(min_lr=2e-6, weight_decay=1e-6, eval_mode=True),
    "mctf": Recipe(epochs=40, cooldown=10, lr=1.5e-5, min_lr=1e-6, mixup=0, cutmix=0, consistency=3.0),
    "dynamicvit": Recipe(lr=1e-3, lr_batch=None, min_lr=1e-6, warmup=5, warmup_lr=0, drop_path=0, repeats=1, ema=0.9999),
    "iared2": Recipe(epochs=90, lr=4e-5, lr_batch=None, min_lr=1e-6),
    "evovit": Recipe(epochs=300, lr=5e-4, min_lr=1e-5, warmup=5),
    "avit": Recipe(epochs=100, batch_size=384, lr=3e-4, min_lr=1e-5, warmup=5),
}


WITHOUT_LABELS = 3.0  # weight of the only loss there is; AdamW's steps hardly depend on it


def find_recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; known: {', '.join(RECIPES)}")
    return RECIPES[name]


def seed_all(*numbers: int) -> None:
    """Seed every generator that augmentation, mixing and dropout draw from."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclass(frozen=True)
class MicroBatches(Dataset[tuple[Tensor, Tensor]]):
    """The micro-batches of one process from one step on, each read with its own seed, whichever worker reads it."""

    images: Images
    recipe: Recipe
    indices: Sequence[tuple[int, int]]  # step and micro-batch

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        step, micro = self.indices[i]
        recipe = self.recipe
        size = recipe.micro_batch
        steps = self.images.size // recipe.batch_size  # of an epoch
        order = np.random.default_rng((recipe.seed, step // steps)).permutation(self.images.size)
        first = step % steps * recipe.batch_size + micro * size
        seed_all(recipe.seed, 1, step, micro)
        numbers = order[np.arange(first, first + size) // recipe.repeats]
        batch = next(self.images.take(numbers.tolist()).batches(size))
        if not recipe.labels:
            return batch.images, torch.zeros(size, dtype=torch.int64)
        if batch.labels is None:
            raise ValueError(f"{self.images.name}: fine-tuning needs labels, or a recipe without them (--labels none)")
        return batch.images, batch.labels


def training_images(
    source: str,
    model: nn.Module,
    augment: str = AUGMENT,
    erase: float = ERASE,
    labels: str | Path | None = None,
    labelled: bool = True,
) -> Images:
    """Images with labels, from a CSV file or the names of the subfolders, augmented as in DeiT's recipe by timm; the
    embedded images without augmentation. `labelled=False`: any folder, without labels."""
    from timm.data import create_transform

    if source == embedded.NAME:
        return embedded.load_images("train")
    preprocessing = preprocessing_for(model)
    transform = create_transform(
        adapter_of(model).input_size(model),
        is_training=True,
        auto_augment=augment or None,
        re_prob=erase,
        re_mode="pixel",
        interpolation="bicubic",
        mean=preprocessing.mean,
        std=preprocessing.std,
    )
    return load_images(source, model, transform=transform, labels=labels, classes=labelled and labels is None, split="train")
