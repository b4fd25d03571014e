"""A dense head on a merged model: which patches of a picture belong to the garment?

    python examples/dense.py [OUT.csv]        # the embedded model and images, a minute on two cores

Merged models give features in the grid of the original patches: `forward_features` (timm), `last_hidden_state` (Hugging
Face) and `forward_intermediates` restore them, so any dense head works unchanged. Here the head is linear: a ridge
regression from the frozen model's patch features to the fraction of each 2 × 2 patch that is foreground, fitted on 500
pictures without merging, and used on 2,000 others with and without.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tokenmerge as tm
from tokenmerge.data import embedded
from tokenmerge.engine.forward import Restore
from tokenmerge.utils.files import write_csv

FOREGROUND = 0.1  # of the brightness: the background of Fashion-MNIST is black
METHODS = {
    "baseline": tm.NoMerge(last_layer="full"),
    "ToMe": tm.ToMe(8),
    "ToMe, twice as many": tm.ToMe(16),
    "ATM": tm.ATM(1.0, 0.03, 0.97, batch="each"),
    "ATM, lower thresholds": tm.ATM(1.0, 0.03, 0.93, batch="each"),
    "EViT": tm.EViT(0.8),
}
RESTORE: tuple[Restore, ...] = ("group", "residual")


class LinearHead(nn.Module):
    """One number for each patch, [B,N,C] → [B,N]; fitted in closed form."""

    def __init__(self, features: Tensor, target: Tensor, ridge: float = 1.0) -> None:
        super().__init__()
        x, y = _with_one(features).flatten(0, 1).double(), target.flatten().double()
        gram = x.T @ x + ridge * torch.eye(x.shape[1], dtype=x.dtype)
        self.register_buffer("weight", torch.linalg.solve(gram, x.T @ y).float())

    def forward(self, features: Tensor) -> Tensor:
        return _with_one(features) @ self.weight


def _with_one(x: Tensor) -> Tensor:
    return torch.cat((x, torch.ones_like(x[..., :1])), -1)


def patch_features(model: nn.Module, x: Tensor) -> Tensor:
    """[B,196,C], in the places of the original patches."""
    return model.forward_features(x)[:, model.num_prefix_tokens :]  # type: ignore[operator,index]


def foreground(images: tm.Images, x: Tensor) -> Tensor:
    """The share of each patch that is brighter than the background, [B,196]."""
    bright = (torch.stack([images.denormalise(image) for image in x]) > FOREGROUND).float()
    return F.avg_pool2d(bright, 2).flatten(1)


@torch.inference_mode()
def run() -> list[dict[str, object]]:
    model = embedded.load_model()
    train, test = embedded.load_images("train"), embedded.load_images("test")
    x = torch.cat([batch.images for batch in train.batches(100)])
    head = LinearHead(torch.cat([patch_features(model, part) for part in x.split(100)]), foreground(train, x))
    rows: list[dict[str, object]] = []
    for (name, method), restore in product(METHODS.items(), RESTORE):
        tm.apply(model, method, restore=restore)
        both = either = 0.0
        with tm.trace(model, detail=False) as t:
            for batch in test.batches(100):
                found, real = head(patch_features(model, batch.images)) > 0.5, foreground(test, batch.images) > 0.5
                both, either = both + float((found & real).sum()), either + float((found | real).sum())
        cost = t.cost("paper")
        found_iou = round(both / either, 4)
        rows.append(
            {"method": name, "config": repr(method), "restore": restore, "ratio": round(cost.ratio, 4), "iou": found_iou}
        )
    return rows


if __name__ == "__main__":
    table = run()
    for row in table:
        ratio = 100 * float(str(row["ratio"]))
        print(f"{row['method']:<24}{ratio:6.1f} % of the GMACs   restore={row['restore']:<10} IoU {row['iou']}")
    if len(sys.argv) > 1:
        write_csv(table, Path(sys.argv[1]))
