"""Models by name, and weights from files of which no code is ever run."""

from __future__ import annotations

import argparse
import hashlib
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import models  # noqa: F401 – registers ours with timm
from ..backbones import ADAPTERS, model_name_forms
from ..backbones.base import CannotLoad, UnknownModel
from . import embedded

CHECKPOINTS = (".pth", ".pt", ".pth.tar", ".bin")
STATES = ("state_dict_ema", "model_ema", "state_dict", "model")  # names of the state dict in a checkpoint


def load_model(name: str, weights: str | Path | None = None, **options: Any) -> nn.Module:
    """The embedded model; any timm model by name; `torchvision:vit_b_16`; or `hf:FOLDER`, also `hf:organisation/name` where
    the Hugging Face hub can be reached. With local weights, else with the library's pretrained ones. `options` go to the
    library: num_classes, img_size, …"""
    if name == embedded.NAME:
        if weights is not None or options:
            raise ValueError("the embedded model has its own weights and classes; leave out --weights and --num-classes")
        return embedded.load_model()
    model = _create(name, weights is None, options)
    if weights is not None:
        model = _with_weights(model, name, read_weights(weights), f"{weights} does not fit {name}", options)
    return model.eval()


def model_with(name: str, state: Mapping[str, Tensor], what: str, **options: Any) -> nn.Module:
    """A model by name with these weights; all of its keys, and no others. `what`: begins the error where they do not fit."""
    return _with_weights(_create(name, False, options), name, state, what, options).eval()


def _with_weights(
    model: nn.Module, name: str, state: Mapping[str, Tensor], what: str, options: Mapping[str, Any]
) -> nn.Module:
    pools = "fc_norm.weight" in state and "norm.weight" not in state  # timm's form of a model that pools before its norm
    if pools and "global_pool" not in options:
        model = _create(name, False, {**options, "global_pool": "avg"})
    _load_strictly(model, state, what)
    return model


def _create(name: str, pretrained: bool, options: Mapping[str, Any]) -> nn.Module:
    named = (a for a in ADAPTERS if a.name_form and name.startswith(a.name_prefix))
    adapter = max(named, key=lambda a: len(a.name_prefix))
    short = name.removeprefix(adapter.name_prefix)
    try:
        return adapter.create(short, pretrained, **options)
    except TypeError as error:
        raise ValueError(f"{name} does not take these options ({error}); give num_classes, img_size, …") from error
    except UnknownModel as error:
        raise ValueError(f"{error}; known are {embedded.NAME!r}, {', '.join(model_name_forms())}") from error
    except CannotLoad:
        raise
    except Exception as error:  # no such weights, no hub, no cache: every library on the way raises its own
        if not pretrained:
            raise
        raise ValueError(f"cannot get pretrained weights of {name} ({error}); give local ones with --weights") from error


def _load_strictly(model: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    own = model.state_dict()
    missing = [k for k in own if k not in state]
    unexpected = [k for k in state if k not in own]
    shapes = [k for k in own if k in state and own[k].shape != state[k].shape]
    wrong = [
        f"{len(keys)} {kind} ({', '.join(keys[:3])}{', …' if len(keys) > 3 else ''})"
        for keys, kind in ((missing, "missing"), (unexpected, "unexpected"), (shapes, "of another shape"))
        if keys
    ]
    if wrong:
        advice = "; give the number of classes with --num-classes" if any("head" in k for k in shapes) else ""
        raise ValueError(f"{what}: keys {'; '.join(wrong)}{advice}")
    model.load_state_dict(state)


def read_weights(path: str | Path, wanted: Sequence[str] = STATES) -> Mapping[str, Tensor]:
    """A state dict from a safetensors file, or from a torch checkpoint that holds nothing but tensors and plain values: no
    code of a file is ever run. `wanted`: where it may be in a checkpoint, EMA weights first; prefixes of wrappers are
    removed."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a readable safetensors file ({error})") from None
    if not path.name.endswith(CHECKPOINTS):
        raise ValueError(f"{path}: weights are read from .safetensors files or checkpoints ({', '.join(CHECKPOINTS)})")
    try:
        # Training scripts keep their options, an argparse.Namespace of plain values, next to the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path}: not a checkpoint of tensors alone ({reason[:150]}). Loading more would run code of the file: if you "
            "trust it, open it with torch.load(…, weights_only=False) yourself, and save its state dict with "
            "safetensors.torch.save_file"
        ) from None
    return _unwrap(found, path, wanted)


def _unwrap(found: Any, path: Path, wanted: Sequence[str]) -> dict[str, Tensor]:
    """The state dict inside a checkpoint."""
    for key in wanted:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        keys = ", ".join(map(str, list(found)[:5])) if isinstance(found, Mapping) else type(found).__name__
        raise ValueError(f"{path}: no state dict found, neither plain nor under {' or '.join(wanted)}; it has {keys}")
    state = {str(key): value for key, value in found.items()}
    while all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state


def weights_digest(model: nn.Module) -> str:
    """Identifies the weights, so that results of another model are not taken for this one's."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {float(value.detach().cpu().double().sum())!r}".encode())
    return digest.hexdigest()
