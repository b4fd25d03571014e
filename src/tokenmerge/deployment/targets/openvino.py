"""OpenVINO, converted from ONNX."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ...utils.optional import require_package
from .base import Run, Target, register
from .onnx import Onnx


@register
class OpenVino(Target):
    name = "openvino"
    suffix = ".xml"
    runtime = "openvino"
    tolerance = 1e-4
    int8 = ("static", "weights")  # it computes dynamic ranges, but keeps the weights in float

    def write(self, program: ExportedProgram, path: Path, output: str = "output") -> None:
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            onnx = Path(folder) / path.with_suffix(".onnx").name
            Onnx().write(program, onnx, output)
            self.convert(onnx, path)

    def convert(self, onnx: Path, path: Path) -> None:
        """What is not quantised stays float32: decisions need it."""
        require_package("openvino", "OpenVINO files")
        import openvino

        openvino.save_model(openvino.convert_model(onnx), path, compress_to_fp16=False)

    def files(self, path: Path) -> tuple[Path, ...]:
        return (path, path.with_suffix(".bin"))

    def open(self, path: Path, threads: int) -> Run:
        core, config = _core(threads)
        compiled = core.compile_model(path, "CPU", config)
        return lambda x: torch.from_numpy(compiled(x.numpy())[0].copy())

    def open_fixed(self, path: Path, threads: int) -> Run:
        core, config = _core(threads)
        model = core.read_model(path)

        @cache
        def compiled(shape: torch.Size) -> Any:
            model.reshape({model.inputs[0]: list(shape)})
            return core.compile_model(model, "CPU", config)

        return lambda x: torch.from_numpy(compiled(x.shape)(x.numpy())[0].copy())


def _core(threads: int) -> tuple[Any, dict[str, Any]]:
    require_package("openvino", "OpenVINO files")
    import openvino

    return openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
