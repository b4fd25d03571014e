"""Models by name, and weights from files of which no code is ever run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .extras import need

CHECKPOINTS = (".pth", ".pt", ".pth.tar", ".bin")
HF, TORCHVISION = "hf:", "torchvision:"  # before the names of their models


def load_model(name: str, weights: str | Path | None = None, **options: Any) -> nn.Module:
    """The embedded model; any of timm's by name; `torchvision:vit_b_16`; or `hf:FOLDER`, also `hf:organisation/name` where
    Hugging Face's hub can be reached. With local weights, else with the library's pretrained ones. `options` go to the
    library: num_classes, img_size, …"""
    from . import embedded

    if name == embedded.NAME:
        if weights is not None or options:
            raise ValueError("the embedded model has its own weights and classes; leave out --weights and --num-classes")
        return embedded.load_model()
    if name.startswith(HF):
        if weights is not None or options:
            raise ValueError(f"{name}: the folder has its own weights and classes; leave out --weights and --num-classes")
        return _from_hugging_face(name.removeprefix(HF))
    create, pretrained = _from_torchvision(name) if name.startswith(TORCHVISION) else _from_timm(name)
    if weights is None:
        try:
            return _create(create, name, **pretrained, **options).eval()
        except OptionsError:
            raise
        except Exception as error:  # no such weights, no hub, no cache: every library on the way raises its own
            raise ValueError(f"no pretrained weights of {name} for us ({error}); give local ones with --weights") from error
    model = _create(create, name, **options)
    _load_strictly(model, read_weights(weights), f"{weights} does not fit {name}")
    return model.eval()


class OptionsError(ValueError):
    """The library has no such options."""


def _create(create: Callable[..., nn.Module], name: str, **options: Any) -> nn.Module:
    try:
        return create(**options)
    except TypeError as error:
        raise OptionsError(f"{name} does not take these options ({error}); give num_classes, img_size, …") from error


def _from_timm(name: str) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    import timm

    from . import models  # registers ours with timm

    assert models
    if not timm.is_model(name):
        near = timm.list_models(f"*{name.partition('.')[0]}*")[:5]
        raise ValueError(
            f"unknown model {name!r}; use 'embedded', a timm name, {TORCHVISION}vit_b_16 or {HF}FOLDER"
            + (f"; near: {', '.join(near)}" if near else "")
        )
    return partial(timm.create_model, name), {"pretrained": True}


def _from_torchvision(name: str) -> tuple[Callable[..., nn.Module], dict[str, Any]]:
    from torchvision.models import get_model, list_models

    short, known = name.removeprefix(TORCHVISION), list_models(include="vit_*")
    if short not in known:
        raise ValueError(f"unknown model {name!r}; torchvision has {', '.join(known)}")
    return partial(get_model, short), {"weights": "DEFAULT"}


# Of models with two towers, the one that sees.
_TOWERS = {"CLIPModel": "CLIPVisionModelWithProjection", "SiglipModel": "SiglipVisionModel"}


def _from_hugging_face(place: str) -> nn.Module:
    need("transformers", "models of Hugging Face")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(place)
        kind = (config.architectures or ["AutoModel"])[0]
        cls: Any = getattr(transformers, _TOWERS.get(kind, kind), transformers.AutoModel)
        return cls.from_pretrained(place).eval()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{place}: not a folder or name that transformers can load ({reason})") from error


def _load_strictly(model: nn.Module, state: Mapping[str, Tensor], what: str) -> None:
    own = model.state_dict()
    missing, unexpected = [k for k in own if k not in state], [k for k in state if k not in own]
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


def read_weights(path: str | Path) -> Mapping[str, Tensor]:
    """A state dict from a safetensors file, or from a checkpoint of torch's that holds nothing but tensors and plain
    values: no code of a file is ever run. The moving average is taken where there is one, wrappers' prefixes are cut."""
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
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path}: not a checkpoint of tensors alone ({reason[:150]}). Loading more would run code of the file: if you "
            "trust it, open it with torch.load(…, weights_only=False) yourself, and save its state dict with "
            "safetensors.torch.save_file"
        ) from None
    return _unwrap(found, path)


def _unwrap(found: Any, path: Path) -> dict[str, Tensor]:
    """The state dict inside of a checkpoint."""
    for key in ("state_dict_ema", "model_ema", "state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
            break
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        keys = ", ".join(map(str, list(found)[:5])) if isinstance(found, Mapping) else type(found).__name__
        raise ValueError(
            f"{path}: no state dict found, neither plain nor under state_dict_ema, model_ema, state_dict or model; "
            f"it has {keys}"
        )
    state = {str(key): value for key, value in found.items()}
    while all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): value for key, value in state.items()}
    return state
