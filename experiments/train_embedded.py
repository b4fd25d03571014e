"""Train the embedded model: a ViT with 197 tokens on Fashion-MNIST, from scratch, on a CPU.

    python experiments/train_embedded.py --data /usr/share/datasets/fashion-mnist      # Debian: dataset-fashion-mnist

Three stages, because a pass over few tokens is cheap: images at half size (50 tokens), then at full size with half of the
patches dropped, then with all of them. The log of the run that made the shipped weights is `train_embedded.csv` beside
this file, one row an epoch, the last one measured on all 10,000 test images.
"""

from __future__ import annotations

import argparse
import copy
import csv
import gzip
import math
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from timm.layers import PatchDropout
from torch import Tensor, nn
from torch.nn import functional as F

from tokenmerge.data.embedded import CONFIG, MEAN, STD, build_model

SEED = 0
BATCH = 128
LR, WEIGHT_DECAY, WARMUP, SMOOTHING, EMA = 5e-3, 0.05, 100, 0.1, 0.998
# images of the training set to see, side of the images, share of the patches that is dropped
STAGES = ((60_000, 14, 0.0),) * 4 + ((60_000, 28, 0.5),) * 3 + ((20_000, 28, 0.0),)


class Muon:
    """Momentum whose matrices are made orthogonal before each step (Jordan et al., 2024): half the steps of Adam here.

    Matrices of one shape are stacked, so that a step of the whole model is a few small batched products."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        shapes = sorted({tuple(p.shape) for p in matrices})
        self.groups = [[p for p in matrices if tuple(p.shape) == shape] for shape in shapes]
        self.momenta = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95)) * (0.2 * max(gradient.shape[1:]) ** 0.5)
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - lr * WEIGHT_DECAY).sub_(change, alpha=lr)


def orthogonal(x: Tensor) -> Tensor:
    """The nearest orthogonal matrices, roughly: five Newton–Schulz steps with the usual coefficients, [G,M,N]."""
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.transpose(1, 2) if tall else x


def read_idx(path: Path) -> Tensor:
    """The MNIST file format: two zero bytes, a type byte, the number of dimensions, the dimensions, the data."""
    raw = gzip.decompress(path.read_bytes())
    dims = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(raw[3])]
    return torch.frombuffer(bytearray(raw[4 + 4 * len(dims) :]), dtype=torch.uint8).reshape(dims)


def read_split(data: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images [n,1,28,28] uint8 and labels [n] int64 of `train` or `t10k`."""
    images = read_idx(data / f"{split}-images-idx3-ubyte.gz").unsqueeze(1)
    return images, read_idx(data / f"{split}-labels-idx1-ubyte.gz").long()


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """A shift of up to one pixel, per image."""
    b = len(x)
    shift = torch.randint(0, 3, (2, b, 1), generator=generator)
    rows, cols = shift[0] + torch.arange(28), shift[1] + torch.arange(28)
    return F.pad(x, (1, 1, 1, 1))[torch.arange(b)[:, None, None], 0, rows[:, :, None], cols[:, None, :]].unsqueeze(1)


def normalise(x: Tensor) -> Tensor:
    return (x.float() / 255 - MEAN) / STD


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    hits = sum(
        int((model(normalise(x)).argmax(1) == y).sum()) for x, y in zip(images.split(250), labels.split(250), strict=True)
    )
    return hits / len(images)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the four Fashion-MNIST .gz files")
    parser.add_argument("--out", type=Path, default=Path("embedded_vit.safetensors"))
    parser.add_argument("--log", type=Path, default=Path("train_embedded.csv"))
    args = parser.parse_args()

    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    images, labels = read_split(args.data, "train")
    test = read_split(args.data, "t10k")
    model = build_model(dynamic_img_size=True)  # positions are resampled for the small images
    average = copy.deepcopy(model).requires_grad_(False)
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    muon, inside = Muon(matrices), {id(p) for p in matrices}
    adam = torch.optim.AdamW([p for p in model.parameters() if id(p) not in inside], weight_decay=0.0)
    total = sum(size // BATCH for size, _, _ in STAGES)
    step, start, rows = 0, time.time(), []

    for epoch, (size, side, dropped) in enumerate(STAGES, 1):
        model.patch_drop = PatchDropout(dropped, num_prefix_tokens=1) if dropped else nn.Identity()
        model.train()
        loss_sum = 0.0
        for index in torch.randperm(len(images), generator=generator)[: size // BATCH * BATCH].split(BATCH):
            lr = LR * min(1.0, (step + 1) / WARMUP) * (0.5 + 0.5 * math.cos(math.pi * step / total))
            adam.param_groups[0]["lr"] = 0.4 * lr
            x = F.adaptive_avg_pool2d(normalise(augment(images[index], generator)), side)
            loss = F.cross_entropy(model(x), labels[index], label_smoothing=SMOOTHING)
            model.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            muon.step(lr)
            with torch.no_grad():
                weight = 1 - min(EMA, (1 + step) / (10 + step))
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), weight)
            loss_sum += loss.item()
            step += 1
            if step % 50 == 0:
                print(f"epoch {epoch} step {step}/{total} loss {loss.item():.3f} {time.time() - start:.0f} s", flush=True)
        held = slice(None) if epoch == len(STAGES) else slice(0, 1000)
        top1 = accuracy(average, test[0][held], test[1][held])
        rows.append(
            (
                epoch,
                side,
                dropped,
                round(loss_sum / (size // BATCH), 4),
                len(test[0][held]),
                round(top1, 4),
                round(time.time() - start),
            )
        )
        print(rows[-1], flush=True)
        save_file({k: v.contiguous() for k, v in average.state_dict().items()}, args.out, {"config": repr(CONFIG)})
        with args.log.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("epoch", "side", "dropped", "train_loss", "test_images", "test_top1", "seconds"))
            writer.writerows(rows)


if __name__ == "__main__":
    main()
