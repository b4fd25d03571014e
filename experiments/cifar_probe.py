"""A ridge probe on frozen DINOv2 features of CIFAR-10: what merging does to a classifier that was trained without it.

    python experiments/cifar_probe.py DINOV2.safetensors CIFAR10 OUT.csv

CIFAR10 is the folder of the binary version. The probe is trained once, on the baseline's features of 2,000 training
images at --size pixels, and then reads what the merged models give for all 10,000 test images. Settings are solved, and
thresholds calibrated, on other training images without labels. All have the free last layer. At 168 pixels an hour and a
half on one core; at 224 as long for --sample 64 --rounds 3 --test-images 5000.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tokenmerge as tm
from tokenmerge.calibration.compare import Comparison
from tokenmerge.utils.files import write_csv

BATCH = 32
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read(path: Path, count: int, skip: int = 0) -> tuple[Tensor, Tensor]:
    """Images [n,3,32,32] in [0,1] and labels of a binary batch: a label and 3 × 32 × 32 bytes each."""
    raw = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).reshape(-1, 3073)[skip : skip + count]
    return raw[:, 1:].reshape(-1, 3, 32, 32) / 255, raw[:, 0].long()


def enlarge(images: Tensor, size: int) -> Tensor:
    """As the model wants them, [n,3,size,size]."""
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    large = F.interpolate(images, size=(size, size), mode="bicubic", antialias=True, align_corners=False)
    return (large.clamp(0, 1) - mean) / std


@torch.inference_mode()
def features(model: nn.Module, images: Tensor, size: int) -> tuple[Tensor, float]:
    """Class-token features [n,C], and GMACs of an image. (A trace a batch: one over all of them would keep them all.)"""
    found, gmacs = [], 0.0
    for batch in images.split(BATCH):
        with tm.trace(model, detail=False) as t:
            found.append(model(enlarge(batch, size)).double())
        gmacs += t.cost("paper").gmacs * len(batch)
    return torch.cat(found), gmacs / len(images)


def ridge(x: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
    """Least squares on one-hot labels, with a bias that is not shrunk."""
    x = torch.cat((x, torch.ones(len(x), 1, dtype=x.dtype)), 1)
    penalty = weight * len(x) ** 0.5 * torch.eye(x.shape[1], dtype=x.dtype)
    penalty[-1, -1] = 0
    return torch.linalg.solve(x.T @ x + penalty, x.T @ F.one_hot(labels).to(x.dtype))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("weights", "cifar", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--size", type=int, default=168, help="pixels of a side, a multiple of 14")
    parser.add_argument("--images", type=int, default=2000, help="to train the probe on")
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--sample", type=int, default=256, help="to calibrate on")
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.7])
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    model = tm.load_model("vit_small_patch14_dinov2", args.weights, num_classes=0)
    model.set_input_size(img_size=args.size)  # type: ignore[operator]
    train, train_labels = read(args.cifar / "data_batch_1.bin", args.images)
    test, test_labels = read(args.cifar / "test_batch.bin", args.test_images)
    others, _ = read(args.cifar / "data_batch_2.bin", 2 * args.sample)

    comparison = Comparison(model, tm.Images.of(enlarge(others, args.size)), sample=args.sample, rounds=args.rounds)
    configs: list[tuple[str, tm.Method]] = [("baseline", tm.NoMerge(last_layer="full"))]
    for budget in args.budgets:
        for name in ("ToMe", "ATM", "calibrated ATM"):
            configs.append((f"{name} at {budget:.0%}", comparison.at(name, budget).method))
            print(configs[-1], flush=True)

    x, _ = features(tm.apply(model, tm.NoMerge(last_layer="full")), train, args.size)
    centre, scale = x.mean(0), x.std(0)
    probe = ridge((x - centre) / scale, train_labels)
    rows = []
    for name, method in configs:
        y, gmacs = features(tm.apply(model, method), test, args.size)
        logits = torch.cat(((y - centre) / scale, torch.ones(len(y), 1, dtype=y.dtype)), 1) @ probe
        accuracy = float((logits.argmax(1) == test_labels).double().mean())
        base = rows[0] if rows else {"gmacs": gmacs, "accuracy": accuracy}
        rows.append(
            {
                "method": name,
                "gmacs": round(gmacs, 4),
                "ratio": round(gmacs / base["gmacs"], 4),  # type: ignore[operator]
                "accuracy": round(accuracy, 4),
                "points": round(100 * (accuracy - base["accuracy"]), 2),  # type: ignore[operator]
                "images": len(y),
                "config": repr(method),
            }
        )
        print(*list(rows[-1].values())[:6], flush=True)
    write_csv(rows, args.out)


if __name__ == "__main__":
    main()
