"""Fig. A1: merge maps after every layer, ToMe and ATM.

    tokenmerge reproduce figA1 --images images --weights-dir weights --out results

20 seconds; needs no labels. A simple, a middling and a complex image of 8. The paper shows pictures: of simple images,
ATM merges much in the first layers; complex ones it merges slowly.

Columns: model, image, method, layer, tokens.
"""

from __future__ import annotations

from ..visualization.figures import strips_figure
from .lab import Lab
from .pictures import draw, rows_of
from .table import Sheet, stand_in_note


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    drawn = draw(bench)
    count = len(drawn.pictures)
    figure = strips_figure(drawn, list(dict.fromkeys((0, count // 2, count - 1))))
    return Sheet(rows_of(bench, drawn), figure, stand_in_note([bench], "DeiT-S"))
