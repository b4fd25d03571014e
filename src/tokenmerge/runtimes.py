"""A model as a function, in the runtimes that models are served with, for timing them side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .exporting import Shipped, open_file, program_of, quiet, write_onnx, write_openvino

RUNTIMES = ("eager", "compile", "aot", "onnxruntime", "openvino")


def check_runtime(name: str) -> None:
    if name not in RUNTIMES:
        raise ValueError(f"unknown runtime {name!r}; known: {', '.join(RUNTIMES)}")


def prepare(model: nn.Module, runtime: str, example: Tensor, folder: Path, threads: int) -> Callable[[Tensor], Any]:
    """`compile`: torch.compile. `aot`: the same, ahead of time. `onnxruntime`, `openvino`: exported, for any batch size.
    Files go into `folder`."""
    check_runtime(runtime)
    if runtime == "eager":
        return model
    if runtime == "compile":
        return torch.compile(model, fullgraph=True)
    place = folder / hashlib.sha256(repr((getattr(model, "_tokenmerge", None), runtime)).encode()).hexdigest()[:12]
    program = program_of(Shipped(model).eval(), example)
    if runtime == "aot":
        with quiet():
            package = torch._inductor.aoti_compile_and_package(program, package_path=str(place.with_suffix(".pt2")))
            return torch._inductor.aoti_load_package(package)
    onnx = place.with_suffix(".onnx")
    write_onnx(program, onnx)
    if runtime == "onnxruntime":
        return open_file(onnx, threads)
    write_openvino(onnx, place.with_suffix(".xml"))
    return open_file(place.with_suffix(".xml"), threads)
