"""Table A5: all configs of T2T-ViT-14, T2T-ViT-19 and MAE, training-free.

    tokenmerge reproduce tableA5 --images imagenet/val --class-folders --weights-dir weights --out results

15 seconds with DeiT-T in their place. Batches of 100 for T2T-ViT; MAE without proportional attention and with the full
last layer. The paper: 6.09 GMACs and 81.70 % come down to 4.97 at 81.70 %, 3.96 at 81.16 % (T2T-14); 9.79 and 82.40 % to
7.79 at 82.40 %, 4.83 at 81.17 % (T2T-19); 17.57 and 83.72 % to 11.50 at 82.46 % (MAE). All rows are in `tokenmerge
presets`.

Columns: model, method, alpha, beta, theta_min, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper, ratio_here,
top1_paper, top1_here, change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from .lab import Lab
from .table import Sheet
from .table_a2 import full_results

MODELS = ("t2t_vit_t_14", "t2t_vit_t_19", "mae_vit_base_patch16")


def run(lab: Lab) -> Sheet:
    return full_results(lab, MODELS, "T2T-ViT and MAE")
