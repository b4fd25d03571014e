"""Fewer tokens out of a model: those that are left, and what each one stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..backbones import tower_of
from .patch import plan_of
from .trace import trace


@dataclass(frozen=True)
class ReducedTokens:
    """The tokens of a batch that are left, padded to the longest image. The prefix comes first."""

    x: Tensor  # [B,M,C]
    mask: Tensor  # [B,M] bool: False in the padding
    size: Tensor  # [B,M]: how many original tokens each one stands for
    owner: Tensor  # [B,N0]: which token stands for each original one; −1 where it was dropped
    position: Tensor  # [B,M,2]: mean row and column of the patches in a group; of a video, step, row and column; NaN: prefix
    prefix: int

    def as_list(self) -> list[Tensor]:
        """Tokens of each image [M,C], without padding."""
        return [x[mask] for x, mask in zip(self.x, self.mask, strict=True)]

    def members(self, image: int) -> list[list[int]]:
        """The original tokens that each token of an image stands for."""
        owner = self.owner[image]
        return [(owner == token).nonzero()[:, 0].tolist() for token in range(int(self.mask[image].sum()))]


def reduce(model: nn.Module, images: Tensor, *, layer: int | None = None) -> ReducedTokens:
    """Run a model with `output="reduced"` on images (or videos), and return the tokens that are left. `layer`: after this
    layer, from 1, instead of after the last one and the final norm; Hugging Face's `hidden_states[layer]`."""
    plan = plan_of(model)
    if plan.output != "reduced":
        raise ValueError("tokenmerge.reduce needs a model that returns the tokens that are left: apply(…, output='reduced')")
    if layer is not None and not 1 <= layer <= plan.depth:
        raise ValueError(f"layer is from 1 to {plan.depth}, not {layer}")
    tower = tower_of(model)
    with trace(tower) as t:
        x = plan.backbone.sequence(tower, images, layer)
    at = layer or t.depth
    sizes = t.sizes(at)
    size = torch.nn.utils.rnn.pad_sequence(sizes, batch_first=True)
    owner = t.owner_after(at)
    steps = plan.backbone.time_steps(tower)
    plane = grid_of((owner.shape[1] - plan.prefix) // steps, *images.shape[-2:])
    grid = (steps, *plane) if images.ndim == 5 else plane
    position = _mean_positions(owner[:, plan.prefix :], grid, size.shape[1])
    position[:, : plan.prefix] = torch.nan
    return ReducedTokens(x, size > 0, size, owner, position, plan.prefix)


def _mean_positions(owner: Tensor, grid: tuple[int, ...], count: int) -> Tensor:
    """Mean coordinates of the patches of each token: owner [B,P] → [B,count,2 or 3]; NaN for tokens without any."""
    place = torch.cartesian_prod(*(torch.arange(n, device=owner.device) for n in grid)).float()  # [P,D]
    b, d = owner.shape[0], place.shape[1]
    index = owner.clamp(min=0).unsqueeze(-1)
    kept = (owner >= 0).float().unsqueeze(-1)
    total = place.new_zeros(b, count, d).scatter_add(1, index.expand(-1, -1, d), kept * place)
    return total / place.new_zeros(b, count, 1).scatter_add(1, index, kept)


def grid_of(patches: int, height: int, width: int) -> tuple[int, int]:
    """Rows and columns of square patches that cover an image."""
    rows = round((patches * height / width) ** 0.5)
    if rows < 1 or patches % rows:
        raise ValueError(f"{patches} patches do not cover an image of {height} × {width} pixels with squares")
    return rows, patches // rows
