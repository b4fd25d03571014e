"""ONNX, run by ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ...utils.optional import require_package
from ..graph import quiet
from .base import Run, Target, register

OPSET = 20


@register
class Onnx(Target):
    name = "onnx"
    suffix = ".onnx"
    runtime = "onnxruntime"
    tolerance = 1e-4

    def write(self, program: ExportedProgram, path: Path) -> None:
        require_package("onnxscript", "ONNX files")
        with quiet():
            made: Any = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
        made.save(str(path))

    def open(self, path: Path, threads: int) -> Run:
        require_package("onnxruntime", "ONNX files")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        # Threads sleep while they wait. Active waiting slows down whatever runs next, and in virtual machines it makes times
        # jump between two values (docs/speed.md).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])
