"""The CUDA kernels: equal to the reference in Triton's interpreter, on the right device, and compiled for a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.interpreted_kernels import RULES, cuda, every_rule, merges_per_image
from tests.core.test_fused import make_view
from tokenmerge.core.attention import BlockAttention
from tokenmerge.core.matching import TopRule, View
from tokenmerge.core.tokens import Tokens

triton = pytest.importorskip("triton", reason="the CUDA kernels need Triton, which comes with torch on Linux")


def test_in_the_interpreter() -> None:
    """Triton decides when it is imported whether it interprets: so, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("interpreted_kernels.py")),
    ]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


class Operators(TorchDispatchMode):
    """The operators of PyTorch that ran, without views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@every_rule
def test_every_tensor_is_on_the_device(rule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fake CUDA tensors, whose shapes and devices are real."""
    kernels = cuda()
    tensors: list[Any] = []
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, grid, *args, **k: tensors.extend(a for a in args if isinstance(a, torch.Tensor))
    )
    real = make_view(2, 20, 1, 0)
    monkeypatch.setattr(kernels, "on_host", lambda counts: [4] * len(counts))
    with FakeTensorMode():
        x, k, q = (torch.empty(t.shape, device="cuda") for t in (real.tokens.x, real.k, real.q))  # type: ignore[union-attr]
        tokens = Tokens.start(x)
        attention = BlockAttention(tokens, real.attention.config, 1)
        with Operators() as operators:
            merged, decision = kernels.select_and_merge(rule, View(3, 12, 1, tokens, k, attention, q))
    assert operators.names == ["aten::bmm"]
    r = min(rule.r, 10) if isinstance(rule, TopRule) else 4
    assert len(tensors) > 20
    for tensor in [*tensors, merged.x, merged.size, decision.order, decision.into]:
        assert isinstance(tensor, FakeTensor)
        assert tensor.device.type == "cuda"
    assert merged.x.shape == (2, 21 - r, 24)
    assert decision.order.shape == (2 * 21,)


def test_the_kernels_compile_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """To PTX for compute capability 8.0, with the arguments that `select_and_merge` passes; no GPU is needed."""
    kernels = cuda()
    seen: dict[Any, None] = {}
    types = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32", torch.int8: "*i8"}

    def compile_only(kernel: Any, grid: Any, *args: Any, **constants: Any) -> None:
        def kind(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                return types[value.dtype]
            return "fp32" if isinstance(value, float) else "i32"

        signature = {name: kind(value) for name, value in zip(kernel.arg_names, args, strict=False)}
        signature |= dict.fromkeys(constants, "constexpr")
        key = (kernel, tuple(signature.items()), tuple(constants.items()))
        if key not in seen:
            seen[key] = None
            source = triton.compiler.ASTSource(kernel, signature, constexprs=constants)
            target = triton.backends.compiler.GPUTarget("cuda", 80, 32)
            made = triton.compile(source, target=target, options={"enable_fp_fusion": False})
            assert ".visible .entry" in made.asm["ptx"]

    monkeypatch.setattr(kernels, "launch", compile_only)
    for dtype in (torch.float32, torch.float16):
        for rule in (RULES[1], RULES[6]):
            view = make_view(3, 21, 1, 4, sizes=3, lengths=merges_per_image(rule), dtype=dtype)
            counts = [2, 0, 3] if view.tokens.ragged else [3, 3, 3]
            monkeypatch.setattr(kernels, "on_host", lambda _, counts=counts: counts)
            kernels.select_and_merge(rule, view)
    assert len({kernel for kernel, *_ in seen}) == 7
