"""The recipe of a fine-tuning run, and the images of each of its steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..data import embedded
from ..data.images import Images
from ..data.load import load_images
from ..data.preprocessing import preprocessing_for
from ..engine.patch import backbone_of

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
    weight_decay: float = 0.05
    mixup: float = 0.8
    cutmix: float = 1.0
    smoothing: float = 0.1
    drop_path: float = 0.1  # stochastic depth of the last block; it grows linearly from 0
    repeats: int = 3  # repeated augmentation: an epoch shows a third of the images, each three times
    teacher: float = 0.0  # weight of distillation from the baseline model in the loss, instead of the labels; ours
    clip: float | None = None  # of the gradient's norm
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

    def learning_rate(self, done: float) -> float:
        """At this fraction of the run."""
        first = self.lr if self.lr_batch is None else self.lr * self.batch_size / self.lr_batch
        return self.min_lr + (first - self.min_lr) * (1 + math.cos(math.pi * done)) / 2


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
        if batch.labels is None:
            raise ValueError(f"{self.images.name}: fine-tuning needs labels")
        return batch.images, batch.labels


def training_images(
    source: str,
    model: nn.Module,
    augment: str = AUGMENT,
    erase: float = ERASE,
    labels: str | Path | None = None,
) -> Images:
    """Images with labels, from a CSV file or the names of the subfolders, augmented as in DeiT's recipe by timm; the
    embedded images without augmentation."""
    from timm.data import create_transform

    if source == embedded.NAME:
        return embedded.load_images("train")
    preprocessing = preprocessing_for(model)
    transform = create_transform(
        backbone_of(model).input_size(model),
        is_training=True,
        auto_augment=augment or None,
        re_prob=erase,
        re_mode="pixel",
        interpolation="bicubic",
        mean=preprocessing.mean,
        std=preprocessing.std,
    )
    return load_images(source, model, transform=transform, labels=labels, classes=labels is None, split="train")
