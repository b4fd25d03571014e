"""Table A3: all configs of LV-ViT-T, LV-ViT-S and LV-ViT-M, training-free.

    tokenmerge reproduce tableA3 --images imagenet/val --class-folders --weights-dir weights --out results

GMACs as LV-ViT's authors count them. The paper: 2.87 GMACs and 79.11 % come down to 2.00 at 78.47 % (LV-ViT-T); 6.57
and 83.26 % to 3.51 at 82.08 % (LV-ViT-S); 12.74 and 84.00 % to 6.16 at 83.29 % (LV-ViT-M). All rows are in `tokenmerge
presets`.
"""

from __future__ import annotations

from .paper import Lab
from .table import Sheet
from .table_a1 import full_results

MODELS = ("lvvit_t", "lvvit_s", "lvvit_m")


def run(lab: Lab) -> Sheet:
    return full_results(lab, MODELS, "the LV-ViT family")
