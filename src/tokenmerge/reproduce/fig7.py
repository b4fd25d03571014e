"""Fig. 7: merge maps after the last layer, ToMe and ATM at the same GMACs, from simple to complex images.

    tokenmerge reproduce fig7 --images images --weights-dir weights --out results

20 seconds; needs no labels; 8 images. The paper: ToMe keeps 77 tokens in every image (DeiT-S, r = 10 in all 12 layers),
ATM few in simple images and many in complex ones.

Columns: model, image, method, layer, tokens.
"""

from __future__ import annotations

from ..visualization.figures import compared_figure
from .lab import Lab
from .pictures import draw, rows_of
from .table import Sheet, stand_in_note


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    drawn = draw(bench)
    return Sheet(rows_of(bench, drawn), compared_figure(drawn), stand_in_note([bench], "DeiT-S"))
