"""What Fig. 1, 7 and A1 share: some images, from simple to complex, merged by ToMe and by ATM at the same mean cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ..methods import ToMe
from ..visualization import Maps, draw_maps, enlarge
from .lab import Bench
from .sheets import Row

WHOLE = {"last_layer": "full"}  # so that the last layer merges, too, as in the paper's pictures


@dataclass(frozen=True)
class Drawn:
    """In one order, by the tokens that ATM leaves."""

    names: list[str]
    pictures: list[Tensor]  # [3,H,W]
    maps: dict[str, list[Maps]]  # by method


def draw(bench: Bench, count: int, layers: Sequence[int] | None = None) -> Drawn:
    """ToMe merges as much as the paper's r = 10 in DeiT-S, ATM the same on average, each image by itself."""
    reference = bench.reference
    tome = ToMe(r=max(1, round(10 * 12 / reference.depth * reference.tokens / 197)), **(bench.plain | WHOLE))
    ratio = float(reference.measure(replace(tome, **bench.plain)).ratio.mean())
    atm = replace(bench.solve("ATM", ratio), batch="each", **WHOLE)  # type: ignore[call-arg, arg-type]
    batch = next(bench.images.split(min(count, bench.images.size), seed=1)[0].batches(count))
    pictures = [enlarge(bench.images.picture(image)) for image in batch.images]
    maps = {"ToMe": draw_maps(bench.model, batch.images, pictures, tome, layers)}
    maps["ATM"] = draw_maps(bench.model, batch.images, pictures, atm, layers)
    order = sorted(range(len(pictures)), key=lambda i: maps["ATM"][i].tokens[-1])
    return Drawn(
        [batch.names[i] for i in order],
        [pictures[i] for i in order],
        {name: [of[i] for i in order] for name, of in maps.items()},
    )


def rows_of(bench: Bench, drawn: Drawn) -> list[Row]:
    """Tokens left, by image, method and layer."""
    return [
        {"model": bench.label, "image": name, "method": method, "layer": layer, "tokens": tokens}
        for method, maps in drawn.maps.items()
        for name, one in zip(drawn.names, maps, strict=True)
        for layer, tokens in zip(one.layers, one.tokens, strict=True)
    ]
