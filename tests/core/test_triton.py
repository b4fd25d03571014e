"""The CUDA kernels in Triton's interpreter, against matching.py and tokens.py.

Triton decides when it is imported whether it interprets. So one test runs this file again, in a process that does."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.test_fused import check_same, make_view
from tokenmerge.core.attention import BlockAttention
from tokenmerge.core.matching import PairRule, ThresholdRule, TopRule, View
from tokenmerge.core.tokens import Tokens

triton = pytest.importorskip("triton", reason="the CUDA kernels need Triton, which comes with torch on Linux")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")

RULES: list[PairRule] = [
    TopRule("keys", r=5),
    TopRule("tokens", True, 0.5, 0.5, r=7),
    TopRule("keys", False, 1.0, 0.0, r=40),
    ThresholdRule("keys", theta=0.5),
    ThresholdRule("tokens", True, 0.25, 1.0, theta=0.1),
    ThresholdRule("tokens", theta=0.7, batch="each"),
    ThresholdRule("keys", True, 0.5, 0.5, theta=0.2, batch="each"),
    ThresholdRule("tokens", False, 0.25, 0.5, theta=0.6, batch="each"),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def cuda() -> Any:
    return import_module("tokenmerge.core.kernels.cuda")


def merges_per_image(rule: PairRule) -> bool:
    return isinstance(rule, ThresholdRule) and rule.batch == "each"


@compiled
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(Path(__file__))]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@in_the_interpreter
@every_rule
@pytest.mark.parametrize("lengths", [False, True])
def test_equals_the_reference(rule: PairRule, lengths: bool) -> None:
    if lengths and not merges_per_image(rule):
        pytest.skip("needs images of equal length")
    for seed, (batch, patches, prefix) in enumerate([(1, 33, 1), (3, 21, 2), (2, 4, 0), (4, 1, 1)]):
        view = make_view(batch, patches, prefix, seed, sizes=3, lengths=lengths)
        check_same(view, rule, cuda().select_and_merge)


@in_the_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    for seed, rule in enumerate(RULES):
        view = make_view(2, 17, 1, seed, sizes=3, dtype=dtype, lengths=merges_per_image(rule))
        check_same(view, rule, cuda().select_and_merge)


@in_the_interpreter
def test_nan_and_repeated_tokens() -> None:
    view = make_view(3, 30, 1, 1)
    for position in (1, 2, 7):
        view.tokens.x[1, position] = math.nan
    view.tokens.x[2, 3:] = view.tokens.x[2, 3]
    view.tokens.x[0, 3:9] = 0
    check_same(view, ThresholdRule("tokens", theta=0.5, batch="each"), cuda().select_and_merge)
    check_same(view, ThresholdRule("tokens", theta=2.0, batch="each"), cuda().select_and_merge)  # nothing merges


@in_the_interpreter
def test_rope_and_no_cls_token() -> None:
    view = make_view(2, 16, 1, 0, has_cls=False)
    check_same(view, TopRule("keys", attention_weight=0.5, r=4), cuda().select_and_merge)


@in_the_interpreter
@every_rule
def test_at_most_eight_launches_and_one_sync(rule: PairRule, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = cuda()
    launches: list[str] = []
    syncs: list[int] = []
    launch, on_host = kernels.launch, kernels.on_host
    monkeypatch.setattr(
        kernels, "launch", lambda kernel, *a, **k: (launches.append(kernel.__name__), launch(kernel, *a, **k))
    )
    monkeypatch.setattr(kernels, "on_host", lambda counts: (syncs.append(1), on_host(counts))[1])
    view = make_view(3, 21, 1, 4, sizes=3, lengths=merges_per_image(rule))
    with torch.no_grad(), torch.profiler.profile() as profile:
        _, decision = kernels.select_and_merge(rule, view)
    assert decision is not None
    products = [e.name for e in profile.events() if e.name == "aten::bmm"]
    assert len(products) == 1
    assert len(launches) + len(products) <= 8
    assert len(set(launches)) == len(launches)
    assert len(syncs) == (0 if isinstance(rule, TopRule) else 1)


class Operators(TorchDispatchMode):
    """The operators of PyTorch that ran, without views and empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and not func.is_view and "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@compiled
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


@compiled
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
