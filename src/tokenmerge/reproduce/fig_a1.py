"""Fig. A1: merge maps after every layer, ToMe beside ATM.

    tokenmerge reproduce figA1 --data images --weights-dir weights --out results

20 seconds; needs no labels. A simple, a middling and a complex image of 8. The paper shows pictures: of simple images,
ATM merges much in the first layers; complex ones it merges slowly.
"""

from __future__ import annotations

from ..visualization import maps_figure
from .lab import Lab
from .pictures import draw, rows_of
from .sheets import Sheet, stand_in_note


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    drawn = draw(bench, 8)
    count, lines = len(drawn.pictures), []
    for i in dict.fromkeys((0, count // 2, count - 1)):
        for name, maps in drawn.maps.items():
            captions = ["", *(f"{layer}: {n}" for layer, n in zip(maps[i].layers, maps[i].tokens, strict=True))]
            lines.append((name, [drawn.pictures[i], *maps[i].pictures], captions))
    return Sheet(rows_of(bench, drawn), maps_figure(lines), stand_in_note([bench], "DeiT-S"))
