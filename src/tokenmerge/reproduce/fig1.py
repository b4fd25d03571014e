"""Fig. 1: static top-r merging above, adaptive merging below, for a simple and a complex image.

    tokenmerge reproduce fig1 --images images --weights-dir weights --out results

20 seconds; needs no labels. After layers 1, ¼, ½, ¾ and the last; the number of remaining tokens is under each. The
paper shows pictures: top-r keeps the same number in both images.

Columns: model, image, method, layer, tokens.
"""

from __future__ import annotations

from ..visualization.merge_maps import maps_figure
from .lab import Lab
from .pictures import draw, rows_of
from .table import Sheet, stand_in_note


def run(lab: Lab) -> Sheet:
    (bench, *_) = lab.benches(("deit_small_patch16_224",))
    depth = bench.reference.depth
    drawn = draw(bench, layers=sorted({1, depth // 4, depth // 2, 3 * depth // 4, depth}))
    lines = []
    for i, what in ((0, "simple"), (len(drawn.pictures) - 1, "complex")):
        for name, maps in drawn.maps.items():
            captions = ["", *(f"layer {layer}: {n}" for layer, n in zip(maps[i].layers, maps[i].tokens, strict=True))]
            lines.append((f"{what}, {name}", [drawn.pictures[i], *maps[i].pictures], captions))
    return Sheet(rows_of(bench, drawn), maps_figure(lines), stand_in_note([bench], "DeiT-S"))
