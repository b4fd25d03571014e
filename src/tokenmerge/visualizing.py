"""Look at what methods do: the same images merged by each, from simple to complex, after every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .comparing import Comparison
from .loading import Images
from .methods import Method, parse
from .visualization import Maps, draw_maps, enlarge, maps_figure


@dataclass(frozen=True)
class Drawn:
    """Images in one order, and what each method made of them."""

    names: list[str]
    pictures: list[Tensor]  # [3,H,W]
    maps: dict[str, list[Maps]]  # by method

    def rows(self) -> list[dict[str, Any]]:
        """Tokens left, by image, method and layer."""
        return [
            {"image": name, "method": method, "layer": layer, "tokens": tokens}
            for method, maps in self.maps.items()
            for name, one in zip(self.names, maps, strict=True)
            for layer, tokens in zip(one.layers, one.tokens, strict=True)
        ]


def visualize(
    model: nn.Module, images: Images, methods: Mapping[str, Method], *, layers: Sequence[int] | None = None
) -> Drawn:
    """Merge all images by each method. They are put in order by the tokens that the last method leaves, few first: adaptive
    methods leave few in simple images."""
    batch = next(images.batches(images.size))
    pictures = [enlarge(images.picture(image)) for image in batch.images]
    maps = {name: draw_maps(model, batch.images, pictures, method, layers) for name, method in methods.items()}
    leading = list(maps.values())[-1]
    order = sorted(range(len(pictures)), key=lambda i: leading[i].tokens[-1])
    return Drawn(
        [batch.names[i] for i in order],
        [pictures[i] for i in order],
        {name: [of[i] for i in order] for name, of in maps.items()},
    )


def at_equal_cost(model: nn.Module, images: Images, names: Sequence[str], gmacs: float) -> dict[str, Method]:
    """Methods by name, each at this fraction of the unmerged GMACs on average over the images; those that can, decide for
    each image by itself."""
    comparison = Comparison(model, images, sample=1)
    found = {}
    for name in names:
        method = parse(comparison.at(name, gmacs).setting)
        found[name] = replace(method, batch="each") if hasattr(method, "batch") else method  # type: ignore[call-arg]
    return found


def compared_figure(drawn: Drawn) -> Any:
    """Fig. 7: the images, then a row a method, with the tokens left under each."""
    lines = [("image", drawn.pictures, [""] * len(drawn.pictures))]
    for name, maps in drawn.maps.items():
        lines.append((name, [one.pictures[-1] for one in maps], [str(one.tokens[-1]) for one in maps]))
    return maps_figure(lines)


def strips_figure(drawn: Drawn, which: Sequence[int]) -> Any:
    """Fig. A1: for some images, a row a method, a picture a layer: its number and the tokens left."""
    lines = []
    for i in which:
        for name, maps in drawn.maps.items():
            captions = ["", *(f"{layer}: {n}" for layer, n in zip(maps[i].layers, maps[i].tokens, strict=True))]
            lines.append((name, [drawn.pictures[i], *maps[i].pictures], captions))
    return maps_figure(lines)
