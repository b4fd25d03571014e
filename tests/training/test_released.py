"""Released layouts, round trip on synthetic files: the converted files give the logits of the model they were made from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

import tokenmerge as tm
from tests.helpers import cli
from tokenmerge.engine.forward import method_modules
from tokenmerge.training.released import convert

NAME = "test_vit"  # of timm: small, CLS token


def evovit_layout(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's keys → those of the released files."""
    out: dict[str, Tensor] = {}
    for key, value in state.items():
        part, *rest = key.split(".")
        if key.startswith("fc_norm"):
            out[f"norm.{rest[-1]}"] = value
        elif part == "blocks" and rest[1] == "attn" and rest[2] == "qkv":
            width = len(value) // 3
            out[f"qks.{rest[0]}.qk.{rest[-1]}"], out[f"vs.{rest[0]}.v.{rest[-1]}"] = value[: 2 * width], value[2 * width :]
        elif part == "blocks" and rest[1] == "attn":
            out[f"projs.{rest[0]}.{rest[-1]}"] = value
        elif part == "blocks" and rest[1] == "norm1":
            out[f"norms.{rest[0]}.{rest[-1]}"] = value
        else:
            out[key] = value
    return out


def released(tmp_path: Path, method: tm.Method) -> tuple[Any, Path]:
    """A model with the method and trained modules, and a checkpoint of it in the authors' layout."""
    torch.manual_seed(0)
    pool = "avg" if isinstance(method, tm.EvoViT) else "token"
    model = tm.apply(timm.create_model(NAME, global_pool=pool, num_classes=7).eval(), method)
    modules = method_modules(model)
    for p in () if modules is None else modules.parameters():
        p.data.normal_(std=0.3)
    made = {} if modules is None else modules.state_dict()
    own = {key: value for key, value in model.state_dict().items() if not key.startswith("tokenmerge_modules")}
    if isinstance(method, tm.EvoViT):
        state = evovit_layout(own) | made
    else:
        state = own | {f"score_predictor.{key}": value for key, value in made.items()}
    path = tmp_path / "released.pth"
    average = {key: torch.zeros_like(value) for key, value in state.items()}  # not what the authors evaluate
    torch.save({"model": state, "model_ema": average, "epoch": 29, "args": argparse.Namespace(lr=1e-3)}, path)
    return model, path


METHODS = [tm.DynamicViT(0.7), tm.EvoViT(), tm.AViT(beta=1), tm.EViT(0.7), tm.MCTF(8)]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_round_trip(method: tm.Method, tmp_path: Path) -> None:
    model, path = released(tmp_path, method)
    x = torch.randn(2, 3, 160, 160)
    converted = convert(path, NAME, method, tmp_path / "out", num_classes=7)
    with torch.inference_mode():
        expected = model(x)
        other = tm.load_model(NAME, tmp_path / "out" / "model.safetensors", num_classes=7)
        for config in (converted, tm.load(tmp_path / "out" / "method.json")):
            torch.testing.assert_close(tm.apply(other, config)(x), expected, atol=1e-6, rtol=0)


def test_strict(tmp_path: Path) -> None:
    _, path = released(tmp_path, tm.DynamicViT(0.7))
    with pytest.raises(ValueError, match=r"is not a released checkpoint of EViT.*unexpected"):
        convert(path, NAME, tm.EViT(0.7), tmp_path / "out", num_classes=7)
    with pytest.raises(ValueError, match="of another shape"):
        convert(path, NAME, tm.DynamicViT(0.7), tmp_path / "out", num_classes=5)
    found = torch.load(path, weights_only=False)
    del found["model"]["score_predictor.1.in_conv.0.weight"]
    torch.save(found, path)
    with pytest.raises(ValueError, match=r"modules missing \['1.in_conv.0.weight'\]"):
        convert(path, NAME, tm.DynamicViT(0.7), tmp_path / "out", num_classes=7)
    assert not (tmp_path / "out").exists(), "nothing is written"


def test_on_the_command_line(tmp_path: Path) -> None:
    _, path = released(tmp_path, tm.EvoViT())
    done = cli("convert", NAME, path, "--method", "EvoViT()", "--num-classes", 7, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "method.json",
        "method.modules.safetensors",
        "model.safetensors",
    ]
    done = cli("convert", NAME, path, "--method", "DynamicViT(0.7)", "--num-classes", 7, "--out", tmp_path / "no")
    assert done.returncode == 2
    assert "is not a released checkpoint of DynamicViT" in done.stderr
