"""A model as a function, in the runtimes that models are served with, to time them against each other."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.features import image_function
from .graph import ExportWrapper, export_program, quiet
from .int8 import Int8, Quantiser
from .targets import TARGETS, Target

EAGER = "eager"
INT8 = "-int8"  # behind the name of a runtime: static int8, baseline and merged model


def _target_runtimes() -> dict[str, Target]:
    return {target.runtime: target for target in TARGETS.values() if target.runtime is not None}


def runtimes() -> list[str]:
    """`eager`; `compile`: torch.compile; `aot`: the same, ahead of time; and the runtimes of the export targets, also in
    int8."""
    targets = _target_runtimes()
    return [EAGER, "compile", "aot", *targets, *(f"{name}{INT8}" for name, target in targets.items() if target.int8)]


def check_runtime(name: str) -> None:
    if name not in runtimes():
        raise ValueError(f"unknown runtime {name!r}; known: {', '.join(runtimes())}")


def int8_runtime(name: str) -> str:
    """The same runtime with int8 files."""
    if f"{name}{INT8}" not in runtimes():
        able = ", ".join(known.removesuffix(INT8) for known in runtimes() if known.endswith(INT8))
        raise ValueError(f"int8 files do not run in {name!r}; they run in {able}")
    return f"{name}{INT8}"


def target_of(runtime: str) -> Target:
    """The export target of a runtime."""
    return _target_runtimes()[runtime.removesuffix(INT8)]


def prepare(model: nn.Module, runtime: str, example: Tensor, folder: Path, threads: int) -> Callable[[Tensor], Any]:
    """The model in this runtime, for any batch size. Files go into `folder`."""
    check_runtime(runtime)
    if runtime == EAGER:
        return image_function(model)
    if runtime == "compile":
        return torch.compile(ExportWrapper(model).eval(), fullgraph=True)
    stem = hashlib.sha256(repr((getattr(model, "_tokenmerge", None), runtime)).encode()).hexdigest()[:12]
    return _open(export_program(ExportWrapper(model).eval(), example), runtime, folder / stem, threads, example)


def prepare_blocks(blocks: nn.Module, runtime: str, example: Tensor, folder: Path, threads: int) -> Callable[[Tensor], Any]:
    """A part of a model in this runtime: a function of tokens [B,N,C], for any B and N."""
    check_runtime(runtime)
    if runtime == EAGER:
        return blocks
    if runtime == "compile":
        return torch.compile(blocks, fullgraph=True)
    dims = {0: torch.export.Dim("batch", min=1, max=65536), 1: torch.export.Dim("tokens", min=2, max=65536)}
    with torch.no_grad(), quiet():
        program = torch.export.export(blocks, (example,), dynamic_shapes=(dims,))
    return _open(program, runtime, folder / f"blocks-{len(list(folder.iterdir()))}", threads, example)


def _open(
    program: torch.export.ExportedProgram, runtime: str, stem: Path, threads: int, example: Tensor
) -> Callable[[Tensor], Any]:
    if runtime == "aot":
        with quiet():
            package = torch._inductor.aoti_compile_and_package(program, package_path=f"{stem}.pt2")
            return torch._inductor.aoti_load_package(package)
    target = target_of(runtime)
    path = stem.with_name(stem.name + target.suffix)
    if runtime.endswith(INT8):
        with tempfile.TemporaryDirectory(dir=stem.parent) as parts:
            source, made = Path(parts) / "model.onnx", Path(parts) / "int8.onnx"
            TARGETS["onnx"].write(program, source)
            quantiser = Quantiser(source, example, Int8())
            quantiser.write(quantiser.names, made)
            target.convert(made, path)
    else:
        target.write(program, path)
    return target.open_fixed(path, threads)
