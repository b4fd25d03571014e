"""Merge maps of several methods on the same images, from simple to complex, after every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..data.load import Source, as_images
from ..methods.base import Method
from .merge_maps import Maps, draw_maps, enlarge, maps_figure


@dataclass(frozen=True)
class Drawn:
    """Images in one order, and their merge maps by each method."""

    names: list[str]
    pictures: list[Tensor]  # [3,H,W]
    maps: dict[str, list[Maps]]  # by method

    def rows(self) -> list[dict[str, Any]]:
        """Remaining tokens, by image, method and layer."""
        return [
            {"image": name, "method": method, "layer": layer, "tokens": tokens}
            for method, maps in self.maps.items()
            for name, one in zip(self.names, maps, strict=True)
            for layer, tokens in zip(one.layers, one.tokens, strict=True)
        ]


def visualize(
    model: nn.Module, images: Source, methods: Mapping[str, Method], *, layers: Sequence[int] | None = None
) -> Drawn:
    """Merge all images by each method. Images are sorted by the number of tokens that the last method keeps, fewest first:
    adaptive methods keep few in simple images."""
    images = as_images(images, model)
    batch = next(images.batches(images.size))
    pictures = [enlarge(images.denormalise(image)) for image in batch.images]
    maps = {name: draw_maps(model, batch.images, pictures, method, layers) for name, method in methods.items()}
    leading = list(maps.values())[-1]
    order = sorted(range(len(pictures)), key=lambda i: leading[i].tokens[-1])
    return Drawn(
        [batch.names[i] for i in order],
        [pictures[i] for i in order],
        {name: [of[i] for i in order] for name, of in maps.items()},
    )


def compared_figure(drawn: Drawn) -> Any:
    """Fig. 7: the images, then one row per method, with the remaining tokens under each."""
    lines = [("image", drawn.pictures, [""] * len(drawn.pictures))]
    for name, maps in drawn.maps.items():
        lines.append((name, [one.pictures[-1] for one in maps], [str(one.tokens[-1]) for one in maps]))
    return maps_figure(lines)


def strips_figure(drawn: Drawn, which: Sequence[int]) -> Any:
    """Fig. A1: for some images, one row per method and one picture per layer, with the remaining tokens under each."""
    lines = []
    for i in which:
        for name, maps in drawn.maps.items():
            captions = ["", *(f"{layer}: {n}" for layer, n in zip(maps[i].layers, maps[i].tokens, strict=True))]
            lines.append((name, [drawn.pictures[i], *maps[i].pictures], captions))
    return maps_figure(lines)
