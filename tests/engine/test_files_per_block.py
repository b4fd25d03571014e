"""How many of our files one block of a merged model runs through: the path that a reader has to follow.

That is the path in PyTorch, which is the reference; the fused kernels are an alternative to it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import tokenmerge as tm
from tests.contract.table import batch, build
from tokenmerge.core import fused
from tokenmerge.core.fused import use_fused
from tokenmerge.data import embedded
from tokenmerge.engine.patch import plan_of
from tokenmerge.methods import METHODS

SOURCE = Path(tm.__file__).parent
MOST = 6
# As `optimize` ships it.
SHIPPED = {"batch": "each", "metric": "tokens", "size_weight": 0.25, "attention_weight": 0.5}


def files_of_blocks(model: Any, x: Tensor, kernels: bool = False) -> list[set[str]]:
    """Files with a function that ran between the entry of each block and its return."""
    found = []

    def watch(block: Any) -> None:
        files: set[str] = set()
        found.append(files)

        def profile(frame: FrameType, event: str, arg: object) -> None:
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(SOURCE):
                files.add(path.relative_to(SOURCE).as_posix())

        block.register_forward_pre_hook(lambda *args: sys.setprofile(profile))
        block.register_forward_hook(lambda *args: sys.setprofile(None))

    for block in plan_of(model).backbone.blocks(model):
        watch(block)
    with torch.inference_mode(), use_fused(kernels):
        model(x)
    return found


def embedded_blocks(method: tm.Method, kernels: bool = False) -> list[set[str]]:
    x = next(embedded.load_images("test", 8).batches(8)).images
    return files_of_blocks(tm.apply(embedded.load_model(), method), x, kernels)


def test_a_block_that_merges_nothing() -> None:
    blocks = embedded_blocks(tm.NoMerge())
    assert all(files == {"backbones/timm_vit.py", "engine/forward.py"} for files in blocks[:-1])


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.has_strength()])
def test_every_method(name: str) -> None:
    model = embedded.load_model()
    blocks = embedded_blocks(METHODS[name].at_strength(0.3, len(model.blocks), 50))
    longest = max(blocks, key=len)
    assert {"engine/forward.py", "core/matching.py", "core/tokens.py"} <= longest  # it did merge
    assert len(longest) <= MOST, sorted(longest)


@pytest.mark.parametrize("options", [{"batch": "each"}, {"split_layer": 0}, SHIPPED], ids=repr)
def test_batch_rules_and_weights(options: dict[str, Any]) -> None:
    longest = max(embedded_blocks(tm.ATM(0.98, 0.04, 0.84, **options)), key=len)
    assert {"core/matching.py", "core/tokens.py"} <= longest
    assert len(longest) <= MOST, sorted(longest)


def test_fused_kernels() -> None:
    """They replace matching.py, and do not come on top of it."""
    pytest.importorskip("numba", reason="the CPU kernels need numba")
    fused.available()  # imports them
    longest = max(embedded_blocks(tm.ATM(0.98, 0.04, 0.84, **SHIPPED), kernels=True), key=len)
    assert {"core/fused.py", "core/kernels/cpu.py", "core/tokens.py"} <= longest
    assert len(longest) <= MOST, sorted(longest)


@pytest.mark.parametrize("name", ["cls", "eva02", "hf-vit", "torchvision"])
def test_every_library(name: str) -> None:
    model = tm.apply(build(name), tm.ATM(thresholds=[0.5, 0.4, 0.3, 0.2], **SHIPPED))
    longest = max(files_of_blocks(model, batch(name)), key=len)
    assert {"core/matching.py", "core/tokens.py"} <= longest
    assert len(longest) <= MOST, sorted(longest)
