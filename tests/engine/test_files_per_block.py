"""How many of our files one block of a merged model runs through: the path that a reader has to follow."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch

import tokenmerge as tm
from tokenmerge.data import embedded

SOURCE = Path(tm.__file__).parent
LAYER = 6


def files_of_one_block(method: tm.Method, batch: int) -> set[str]:
    """Files with a function that ran between the entry of a block and its return."""
    model = tm.apply(embedded.load_model(), method)
    x = next(embedded.load_images("test", batch).batches(batch)).images
    files: set[str] = set()
    block = model.blocks[LAYER - 1]

    def profile(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            files.add(path.relative_to(SOURCE).as_posix())

    block.register_forward_pre_hook(lambda *args: sys.setprofile(profile))
    block.register_forward_hook(lambda *args: sys.setprofile(None))
    with torch.inference_mode():
        model(x)
    return files


@pytest.mark.parametrize(
    ("method", "most"),
    [
        (tm.NoMerge(), 2),
        (tm.ToMe(8), 6),
        (tm.ATM(0.98, 0.04, 0.84), 6),
        (tm.ATM(0.98, 0.04, 0.84, split_layer=0), 6),  # matching by size
        (tm.ATM(0.98, 0.04, 0.84, batch="each"), 8),  # packed: attention per image, and the layout of the tokens
    ],
    ids=repr,
)
def test_a_block_runs_through_few_files(method: tm.Method, most: int) -> None:
    files = files_of_one_block(method, batch=8)
    assert {"backbones/timm_vit.py", "engine/forward.py"} <= files
    assert len(files) <= most, sorted(files)
