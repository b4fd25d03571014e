"""For models whose loops hand nothing but the hidden states from block to block: the state of a call travels with them.

A patched model passes `Carried(x, call)` where it would pass x. The modules on the way are patched, too: each takes the call
off, does its work on the tensor, and puts the call back on, or hands it on as an argument.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Call


class Carried(NamedTuple):
    """A tensor and the call that it belongs to."""

    x: Tensor
    call: Call

    @property
    def shape(self) -> torch.Size:
        return self.x.shape


class RelayEmbeddings:
    """Images → hidden states."""

    def forward(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(images, Carried):
            return super().forward(images, *args, **kwargs)  # type: ignore[misc]
        return Carried(super().forward(images.x, *args, **kwargs), images.call)  # type: ignore[misc]


class RelayEncoder:
    """An encoder that hands keywords to its layers."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(hidden_states, Carried):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        return super().forward(hidden_states.x, *args, tokenmerge=hidden_states.call, **kwargs)  # type: ignore[misc]


class YolosEncoder:
    """Its loop hands nothing on, adds position embeddings between the layers, and has the detection tokens at the end: they
    are moved to the front, behind the CLS token, where the prefix is."""

    def forward(self, hidden_states: Any, height: int, width: int) -> Any:
        if not isinstance(hidden_states, Carried):
            return super().forward(hidden_states, height, width)  # type: ignore[misc]
        from transformers.modeling_outputs import BaseModelOutput

        encoder: Any = self
        x, call = hidden_states
        detection = encoder.config.num_detection_tokens
        patches = x.shape[1] - 1 - detection
        middle = None if encoder.interpolation is None else encoder.interpolation((height, width))
        x = _swap(x, patches, detection)
        for layer, block in enumerate(encoder.layer, 1):
            x = block(x, tokenmerge=call)
            if middle is not None and layer < len(encoder.layer):
                x = call.add_between(layer, x, _swap(middle[layer - 1], patches, detection))
        out: Any = _swap(x, detection, x.shape[1] - 1 - detection)
        return BaseModelOutput(last_hidden_state=out)


def _swap(x: Tensor, first: int, second: int) -> Tensor:
    """Change the order of the two parts of a sequence that follow its first token."""
    head, a, b = torch.split(x, [1, first, second], 1)
    return torch.cat((head, b, a), 1)


RELAYS: dict[str, type] = {cls.__name__: cls for cls in (RelayEmbeddings, RelayEncoder, YolosEncoder)}
