"""Patch features of a merged model in the grid of the original patches: how near are they to the baseline's?

    python experiments/dense_restore.py dinov2_vits14.safetensors photos/ [OUT.csv]        # DINOv2 ViT-S/14, six minutes

`restore="group"` gives every patch the vector of its group, `restore="residual"` its own vector at the merge plus what the
group has changed since. Prints the mean cosine of the patch features with the baseline's, at two costs, on photographs that
calibration did not see.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor
from torch.nn import functional as F

import tokenmerge as tm
from tokenmerge.calibration.optimize import tome_at
from tokenmerge.engine.forward import Restore
from tokenmerge.evaluation.reference import Reference
from tokenmerge.utils.files import write_csv

SEEN, UNSEEN = 32, 100
RESTORE: tuple[Restore, ...] = ("group", "residual")


def dinov2(weights: str) -> Any:
    state = load_file(weights)
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], [16, 16], num_prefix_tokens=1)
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=224)
    model.load_state_dict(state)
    return model.eval()


@torch.inference_mode()
def main(weights: str, photos: str, out: str | None = None) -> None:
    model = dinov2(weights)
    seen, unseen = tm.load_images(photos, model, size=224).split(SEEN, 0)
    unseen = unseen.take(range(UNSEEN))
    batches = [batch.images for batch in unseen.batches(20)]
    one = Reference(model, seen.take(range(1)), batch_size=1)

    def patches(x: Tensor) -> Tensor:
        return model.forward_features(x)[:, 1:]

    baseline = [patches(x) for x in batches]
    rows = []
    for ratio in (0.7, 0.6):
        calibrated = tm.calibrate(model, seen, gmacs=ratio, sample=SEEN, rounds=2).method
        for name, method in {"calibrated ATM": calibrated, "ToMe": tome_at(one, ratio)}.items():
            for restore in RESTORE:
                tm.apply(model, method, restore=restore)
                with tm.trace(model, detail=False) as t:
                    found = [F.cosine_similarity(patches(x), y, dim=-1) for x, y in zip(batches, baseline, strict=True)]
                tm.remove(model)
                cosine = torch.cat(found)
                row = {
                    "method": name,
                    "restore": restore,
                    "gmacs_ratio": round(t.cost("paper").ratio, 3),
                    "cosine": round(float(cosine.mean()), 4),
                    "cosine_5_percent": round(float(cosine.flatten().quantile(0.05)), 4),
                }
                print(row, flush=True)
                rows.append(row)
    if out is not None:
        write_csv(rows, Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
