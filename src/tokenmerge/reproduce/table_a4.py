"""Table A4: all configs of LV-ViT-T, LV-ViT-S and LV-ViT-M, training-free.

    tokenmerge reproduce tableA4 --images imagenet/val --class-folders --weights-dir weights --out results

15 seconds with DeiT-T in their place. GMACs as LV-ViT's authors count them. The head is that of the paper, `--head cls`:
only the CLS token is kept in the last layer, so the second head, on the patches, has nothing to read. LV-ViT's official
evaluation uses both (`--head cls+aux`), and then the last layer is computed in full. The paper: 2.87 GMACs and 79.11 %
come down to 2.00 at 78.47 % (LV-ViT-T); 6.57 and 83.26 % to 3.51 at 82.08 % (LV-ViT-S); 12.74 and 84.00 % to 6.16 at
83.29 % (LV-ViT-M). All rows are in `tokenmerge presets`.

Columns: model, method, alpha, beta, theta_min, gmacs_paper, gmacs_here, gmacs_difference, ratio_paper, ratio_here,
top1_paper, top1_here, change_paper, change_here, agreement, distance, images.
"""

from __future__ import annotations

from .lab import Lab
from .table import Sheet
from .table_a2 import full_results

MODELS = ("lvvit_t", "lvvit_s", "lvvit_m")


def run(lab: Lab) -> Sheet:
    return full_results(lab, MODELS, "the LV-ViT family")
