"""OpenVINO, converted from ONNX."""

from __future__ import annotations

import tempfile
from pathlib import Path

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

    def write(self, program: ExportedProgram, path: Path) -> None:
        """Weights stay float32: decisions need it."""
        require_package("openvino", "OpenVINO files")
        import openvino

        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            onnx = Path(folder) / path.with_suffix(".onnx").name
            Onnx().write(program, onnx)
            openvino.save_model(openvino.convert_model(onnx), path, compress_to_fp16=False)

    def open(self, path: Path, threads: int) -> Run:
        require_package("openvino", "OpenVINO files")
        import openvino

        config = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        compiled = openvino.Core().compile_model(path, "CPU", config)
        return lambda x: torch.from_numpy(compiled(x.numpy())[0].copy())
