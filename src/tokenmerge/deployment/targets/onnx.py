"""ONNX, run by ONNX Runtime."""

from __future__ import annotations

import ast
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ...utils.optional import require_package
from ..graph import quiet
from .base import Run, Target, register

OPSET = 20
BATCH = "batch"  # the name of the dynamic dimension
SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter notes the modules that a node comes from


@register
class Onnx(Target):
    name = "onnx"
    suffix = ".onnx"
    runtime = "onnxruntime"
    tolerance = 1e-4
    int8 = ("static", "dynamic", "weights")

    def write(self, program: ExportedProgram, path: Path, output: str = "output") -> None:
        require_package("onnxscript", "ONNX files")
        with quiet():
            made: Any = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
        tidy(made.model, output)
        made.save(str(path))

    def convert(self, onnx: Path, path: Path) -> None:
        shutil.copyfile(onnx, path)

    def files(self, path: Path) -> tuple[Path, ...]:
        return (path, path.with_name(f"{path.name}.data"))  # large models have their weights there

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


def tidy(model: Any, output: str) -> None:
    """Name the output, the batch dimension, and products after the modules that they come from; fold what is computed from
    weights alone; take out stack traces, which name files of this machine."""
    from onnxscript import ir
    from onnxscript.optimizer import fold_constants

    with quiet():
        fold_constants(model, input_size_limit=2**30, output_size_limit=2**30)
    graph = model.graph
    graph.outputs[0].name = output
    first = graph.inputs[0].shape[0]
    taken: Counter[str] = Counter()
    for node in graph:
        name = _module_of(node) if node.op_type in ("MatMul", "Gemm", "Conv") else None
        if name is not None:
            taken[name] += 1
            node.name = name if taken[name] == 1 else f"{name}.{taken[name]}"
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
        if value.shape is not None and isinstance(first, ir.SymbolicDim):
            value.shape = ir.Shape([BATCH if dim == first else dim for dim in value.shape])
        value.metadata_props.clear()


def _module_of(node: Any) -> str | None:
    """The innermost module that computed a node, without the wrapper around the model; None where the exporter does not
    say."""
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
    modules = [scope for scope in scopes[:-1] if scope]
    return modules[-1].removeprefix("model.") if modules else None
