"""Decisions, and the maps of attention that they look at, are computed in float32, whatever the model computes in: bfloat16
cosines flip up to a third of the decisions near θ."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast would take a product of float32 matrices in half precision."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()
