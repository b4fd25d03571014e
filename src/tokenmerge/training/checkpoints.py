"""What a training run writes: checkpoints to resume from, and the trained weights with their method."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..engine.forward import method_modules
from ..methods.base import Method
from ..methods.learning import MODULES
from ..methods.serialization import modules_path, save
from ..utils.files import replacing, write_text


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints in a folder. `run` identifies the model, the recipe, the method and the images."""

    folder: Path
    run: str

    def load(self, model: nn.Module, optimizer: Any, ema: nn.Module | None) -> int:
        """Load the last complete checkpoint; returns the number of finished steps."""
        checkpoints = sorted(self.folder.glob("checkpoint-[0-9]*[0-9]"))
        if not checkpoints:
            return 0
        last = checkpoints[-1]
        state = json.loads((last / "step.json").read_text(encoding="utf-8"))
        if state.get("run") != self.run:
            raise ValueError(
                f"{self.folder}: a run with another model, recipe, method or images, or of another version of tokenmerge; "
                "choose another folder, or remove it"
            )
        model.load_state_dict(load_file(last / "model.safetensors"))
        optimizer.load_state_dict(torch.load(last / "optimizer.pt", weights_only=True))
        if ema is not None:
            ema.load_state_dict(load_file(last / "ema.safetensors"))
        return int(state["step"])

    def save(self, step: int, model: nn.Module, optimizer: Any, ema: nn.Module | None) -> None:
        """A checkpoint gets its name when it is complete; earlier ones are then removed."""
        folder = self.folder / f"checkpoint-{step:08}"
        draft = folder.with_name(folder.name + ".part")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(_to_cpu(model.state_dict()), draft / "model.safetensors")
        torch.save(optimizer.state_dict(), draft / "optimizer.pt")
        if ema is not None:
            save_file(_to_cpu(ema.state_dict()), draft / "ema.safetensors")
        write_text(json.dumps({"step": step, "run": self.run}), draft / "step.json")
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        for old in self.folder.glob("checkpoint-*"):
            if old != folder:
                shutil.rmtree(old)


def write_trained(model: Any, method: Method, out: Path) -> None:
    """Write the model's own weights, and the method with the weights of its modules."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(out, state_dict=_to_cpu(_own_state(model)))
    else:
        _write(_own_state(model), out / "model.safetensors")
    _write_method(model, method, out / "method.json")


def write_ema(model: nn.Module, method: Method, out: Path) -> None:
    """The same for the moving average of a model: `ema.safetensors` and, where the method has modules, `ema_method.json`."""
    _write(_own_state(model), out / "ema.safetensors")
    if method_modules(model) is not None:
        _write_method(model, method, out / "ema_method.json")


def trained_method(model: nn.Module, method: Method, out: Path) -> Method:
    """The method as `write_trained` writes it."""
    return _with_weights(model, method, out / "method.json")


def _with_weights(model: nn.Module, method: Method, path: Path) -> Method:
    if method_modules(model) is None:
        return method
    return replace(method, weights=str(modules_path(path)))  # type: ignore[call-arg]


def _write_method(model: nn.Module, method: Method, path: Path) -> None:
    modules = method_modules(model)
    if modules is not None:
        _write(modules.state_dict(), modules_path(path))
    save(_with_weights(model, method, path), path)


def _own_state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value for key, value in model.state_dict().items() if not key.startswith(f"{MODULES}.")}


def _write(state: dict[str, Tensor], path: Path) -> None:
    with replacing(path) as draft:
        save_file(_to_cpu(state), draft)


def _to_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().cpu().contiguous() for key, value in state.items()}
