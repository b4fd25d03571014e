"""Merge maps: each group of merged patches filled with its mean colour, thin borders between groups."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from ..engine.features import image_function
from ..engine.patch import apply, shared_weights_copy
from ..engine.reduce import grid_of
from ..engine.trace import Trace, trace
from ..methods.base import Method
from ..utils.files import replacing


def merge_map(image: Tensor, owner: Tensor, grid: tuple[int, ...], *, border: float = 0.0) -> Tensor:
    """image [3,H,W] in [0,1], owner [h·w] of its patches (prefix tokens left out), grid (h,w) → [3,H,W]. Of a video
    [T,3,H,W] with a grid (t,h,w), the frames are drawn side by side: [3,H,T·W].

    Borders are drawn in the shade `border` along the edges where neighbouring patches belong to different groups. Dropped
    patches (owner −1) are darkened.
    """
    groups = (owner.to(image.device) + 1).reshape(1, 1, *grid).float()  # 0: dropped
    label = F.interpolate(groups, size=(*image.shape[:-3], *image.shape[-2:]), mode="nearest")[0].long()
    label, image = side_by_side(label.transpose(0, 1) if image.ndim == 4 else label)[0], side_by_side(image)
    colours = torch.zeros(len(image), int(label.max()) + 1, device=image.device)
    colours.index_add_(1, label.flatten(), image.flatten(1).float())
    count = torch.bincount(label.flatten(), minlength=colours.shape[1]).clamp(min=1)
    filled = (colours / count)[:, label]
    filled = torch.where(label == 0, 0.25 * image, filled)
    edge = torch.zeros_like(label, dtype=torch.bool)
    edge[:, 1:] |= label[:, 1:] != label[:, :-1]
    edge[1:] |= label[1:] != label[:-1]
    return filled.masked_fill(edge, border)


def side_by_side(frames: Tensor) -> Tensor:
    """A video [T,C,H,W] → [C,H,T·W]; an image stays as it is."""
    return torch.cat(tuple(frames), -1) if frames.ndim == 4 else frames


@dataclass(frozen=True)
class Maps:
    """Merge maps of one image: after each of these layers, with the number of remaining tokens."""

    layers: tuple[int, ...]
    pictures: list[Tensor]  # [3,H,W] each
    tokens: list[int]


def maps_of(t: Trace, pictures: Sequence[Tensor], layers: Sequence[int] | None = None) -> list[Maps]:
    """One entry per image of the trace; `pictures` are the input images, [3,H,W] in [0,1], at any resolution, or videos
    [T,3,H,W]. Without `layers`: all layers whose merges have an effect."""
    if layers is None:
        layers = range(1, t.depth + 1 if t.calls[0].last_layer == "full" or t.depth == 1 else t.depth)
    prefix = t.calls[0].prefix
    all_maps = []
    steps = t.calls[0].backbone.time_steps(t.model)
    plane = grid_of((t.owner.shape[1] - prefix) // steps, *t.calls[0].image[-2:])
    grid = (steps, *plane) if len(t.calls[0].image) == 4 else plane
    owners = [t.owner_after(layer)[:, prefix:].cpu() for layer in layers]
    tokens = t.tokens
    for i, picture in enumerate(pictures):
        drawn = [merge_map(picture, owner[i], grid) for owner in owners]
        all_maps.append(Maps(tuple(layers), drawn, [int(tokens[layer - 1][i]) for layer in layers]))
    return all_maps


def trace_html(t: Trace) -> str:
    """A strip of merge maps for each of the first images of the first call (a trace keeps no others). Colours are stretched
    to the range of each image, since the model's normalisation is not known here."""
    call = t.calls[0] if t.calls else None
    if call is None or call.inputs is None:
        return f"<p>a trace of {len(t.calls)} calls; with detail=True it shows merge maps</p>"
    every = tuple(range(1, call.inputs.ndim))
    low = call.inputs.amin(every, keepdim=True)
    high = call.inputs.amax(every, keepdim=True)
    pictures = ((call.inputs - low) / (high - low).clamp(min=1e-6)).float().cpu()
    shown = [enlarge(picture[..., : 3 if picture.shape[-3] >= 3 else 1, :, :], 112) for picture in pictures]
    rows = []
    for picture, maps in zip(shown, maps_of(t, shown), strict=True):
        cells = [f"<td>{_inline(side_by_side(picture))}</td>"]
        for layer, drawn, tokens in zip(maps.layers, maps.pictures, maps.tokens, strict=True):
            cells.append(f"<td>{_inline(drawn)}<br><small>{layer}: {tokens}</small></td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _inline(picture: Tensor) -> str:
    data = io.BytesIO()
    to_pil(picture).save(data, format="png")
    return f'<img width="84" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'


def to_pil(picture: Tensor) -> Image.Image:
    """[1 or 3,H,W] in [0,1] → an image."""
    pixels = (picture.detach().cpu().float().expand(3, -1, -1) * 255).round().to(torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


@torch.inference_mode()
def draw_maps(
    model: nn.Module, x: Tensor, pictures: Sequence[Tensor], method: Method, layers: Sequence[int] | None = None
) -> list[Maps]:
    """Merge maps of images x [B,3,H,W] or videos [B,T,3,H,W], normalised for the model. The model is not changed."""
    like = next(model.parameters())
    merged = apply(shared_weights_copy(model), method)
    with trace(merged) as t:
        image_function(merged)(x.to(like.device, like.dtype))
    return maps_of(t, pictures, layers)


def enlarge(image: Tensor, least: int = 224) -> Tensor:
    """Enlarge a small picture by an integer factor, so that borders are thin compared with its pixels."""
    factor = max(1, -(-least // max(image.shape[-2:])))
    return image.repeat_interleave(factor, -1).repeat_interleave(factor, -2)


def maps_figure(rows: list[tuple[str, list[Tensor], list[str]]]) -> Any:
    """A figure with one row of pictures per entry: (title, pictures [3,H,W], captions under them)."""
    from matplotlib import pyplot as plt

    columns = max(len(pictures) for _, pictures, _ in rows)
    figure, axes = plt.subplots(len(rows), columns, figsize=(1.5 * columns, 1.75 * len(rows)), squeeze=False)
    for line, (title, pictures, captions) in zip(axes, rows, strict=True):
        for axis, picture, caption in zip(line, pictures, captions, strict=True):
            axis.imshow(picture.expand(3, -1, -1).permute(1, 2, 0).numpy())
            axis.set_xlabel(caption, fontsize=8)
        for axis in line:
            axis.set_xticks([])
            axis.set_yticks([])
            axis.spines[:].set_visible(False)
        line[0].set_ylabel(title, fontsize=9)
    figure.tight_layout(pad=0.4)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure, and close it."""
    from matplotlib import pyplot as plt

    with replacing(path) as draft:
        figure.savefig(draft, dpi=150, format=path.suffix[1:])
    plt.close(figure)
