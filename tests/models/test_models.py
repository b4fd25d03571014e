"""LV-ViT and T2T-ViT against step-by-step references that read nothing but the state dict, on random weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tokenmerge as tm
import tokenmerge.models  # registers them
from tokenmerge.core.schedule import default_split_layer

State = dict[str, Tensor]


def norm(w: State, name: str, x: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(w: State, name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", torch.zeros(()))


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def mlp(w: State, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.fc2", gelu(linear(w, f"{name}.fc1", x)))


def attention(w: State, name: str, x: Tensor, heads: int) -> Tensor:
    c = x.shape[-1]
    q, k, v = linear(w, f"{name}.qkv", x).split(c, -1)
    out = torch.zeros_like(x)
    d = c // heads
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        out[..., part] = (q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(d)).softmax(-1) @ v[..., part]
    return linear(w, f"{name}.proj", out)


def trunk(w: State, x: Tensor, heads: int, depth: int, skip: float) -> Tensor:
    x = torch.cat((w["cls_token"].expand(len(x), -1, -1), x), 1) + w["pos_embed"]
    for i in range(depth):
        x = x + attention(w, f"blocks.{i}.attn", norm(w, f"blocks.{i}.norm1", x), heads) / skip
        x = x + mlp(w, f"blocks.{i}.mlp", norm(w, f"blocks.{i}.norm2", x)) / skip
    return norm(w, "norm", x)


def lvvit(w: State, x: Tensor, heads: int, depth: int, skip: float, aux: bool) -> Tensor:
    for i, (stride, padding) in enumerate(((2, 3), (1, 1), (1, 1)), 1):
        x = F.conv2d(x, w[f"patch_embed.conv{i}.weight"], stride=stride, padding=padding)
        mean, variance, weight, bias = (
            w[f"patch_embed.bn{i}.{key}"].view(1, -1, 1, 1) for key in ("running_mean", "running_var", "weight", "bias")
        )
        x = ((x - mean) / (variance + 1e-5).sqrt() * weight + bias).clamp(min=0)
    x = F.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=8)
    x = trunk(w, x.flatten(2).transpose(1, 2), heads, depth, skip)
    logits = linear(w, "head", x[:, 0])
    return logits + 0.5 * linear(w, "aux_head", x[:, 1:]).amax(1) if aux else logits


def patches(x: Tensor, size: int, stride: int, padding: int) -> Tensor:
    """Every window of an image [B,C,H,W] as a row, channel by channel, [B,windows,C·size²]."""
    x = F.pad(x, (padding,) * 4)
    rows = []
    for top in range(0, x.shape[2] - size + 1, stride):
        for left in range(0, x.shape[3] - size + 1, stride):
            rows.append(x[:, :, top : top + size, left : left + size].flatten(1))
    return torch.stack(rows, 1)


def t2t(w: State, x: Tensor, heads: int, depth: int) -> Tensor:
    side = x.shape[2] // 4
    x = patches(x, 7, 4, 2)
    for i in (1, 2):
        name = f"tokens_to_token.attention{i}"
        y = norm(w, f"{name}.norm1", x)
        q, k, v = linear(w, f"{name}.attn.qkv", y).split(64, -1)
        out = (q @ k.transpose(1, 2) / math.sqrt(y.shape[-1])).softmax(-1) @ v
        x = linear(w, f"{name}.attn.proj", out) + v
        x = x + mlp(w, f"{name}.mlp", norm(w, f"{name}.norm2", x))
        x = patches(x.transpose(1, 2).reshape(len(x), 64, side, side), 3, 2, 1)
        side //= 2
    x = linear(w, "tokens_to_token.project", x)
    return linear(w, "head", trunk(w, x, heads, depth, 1.0)[:, 0])


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(0.5, 2)
            elif value.is_floating_point() and name != "pos_embed":
                value.normal_(std=0.5 / value.shape[-1] ** 0.5 if value.ndim > 1 else 0.3)
    return model.eval()


SMALL = {"img_size": 64, "num_classes": 11}


LVVITS = [("lvvit_t", 4, 12, 1.0), ("lvvit_s", 6, 16, 2.0), ("lvvit_m", 8, 20, 2.0)]
T2TS = [("t2t_vit_t_14", 6, 14), ("t2t_vit_t_19", 7, 19), ("t2t_vit_t_24", 8, 24)]


@pytest.mark.parametrize(("name", "heads", "depth", "skip"), LVVITS)
@pytest.mark.parametrize("head", ["cls", "cls+aux"])
def test_lvvit_equals_its_facts(name: str, heads: int, depth: int, skip: float, head: str) -> None:
    model = randomised(timm.create_model(name, head=head, **SMALL)).double()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.inference_mode():
        expected = lvvit(model.state_dict(), x, heads, depth, skip, head == "cls+aux")
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
        tm.apply(model, tm.NoMerge())
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
        with tm.trace(tm.apply(model, tm.ToMe(2))) as t:
            assert model(x).shape == (2, 11)
    assert t.calls[0].last_layer == ("query" if head == "cls" else "full")


@pytest.mark.parametrize(
    ("name", "heads", "depth"), [("t2t_vit_t_14", 6, 14), ("t2t_vit_t_19", 7, 19), ("t2t_vit_t_24", 8, 24)]
)
def test_t2t_equals_its_facts(name: str, heads: int, depth: int) -> None:
    model = randomised(timm.create_model(name, **SMALL)).double()
    w, c = model.state_dict(), model.embed_dim
    for p, j in ((0, 0), (3, 0), (3, 7), (16, c - 2)):
        angle = p / 10000 ** (2 * (j // 2) / c)
        assert float(w["pos_embed"][0, p, j]) == pytest.approx(math.cos(angle) if j % 2 else math.sin(angle), abs=1e-6)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.inference_mode():
        expected = t2t(w, x, heads, depth)
        torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(tm.apply(model, tm.NoMerge())(x), expected, atol=1e-5, rtol=1e-5)
        assert tm.apply(model, tm.ATM(thresholds=[0.5] * depth, batch="each"))(x).shape == (2, 11)


@pytest.mark.parametrize(
    ("name", "millions", "crop", "split_layer"),
    [
        ("lvvit_t", 8.535, 0.9, 9),
        ("lvvit_s", 26.152, 0.9, 12),
        ("lvvit_m", 55.831, 1.0, 15),
        ("t2t_vit_t_14", 21.541, 0.9, 10),
        ("t2t_vit_t_19", 39.173, 0.9, 14),
        ("t2t_vit_t_24", 64.101, 0.9, 18),
        ("mae_vit_base_patch16", 86.568, 0.875, 9),
        ("mae_vit_large_patch16", 304.327, 0.875, 18),
        ("mae_vit_huge_patch14", 632.046, 0.875, 24),
    ],
)
def test_sizes_and_configurations(name: str, millions: float, crop: float, split_layer: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.001)
    assert (model.pretrained_cfg["crop_pct"], model.pretrained_cfg["interpolation"]) == (crop, "bicubic")
    assert default_split_layer(len(model.blocks)) == split_layer


@pytest.mark.parametrize(("name", "gmacs"), [("t2t_vit_t_14", 6.09), ("t2t_vit_t_19", 9.79)])
def test_cost_of_t2t(name: str, gmacs: float) -> None:
    model = tm.apply(timm.create_model(name).eval(), tm.NoMerge(last_layer="full"))
    with torch.inference_mode(), tm.trace(model, detail=False) as t:
        model(torch.zeros(1, 3, 224, 224))
    assert round(t.cost("paper").gmacs, 2) == gmacs


@pytest.mark.parametrize(("name", "gmacs"), [("lvvit_t", 2.867), ("lvvit_s", 6.572), ("lvvit_m", 12.738)])
def test_cost_of_lvvit(name: str, gmacs: float) -> None:
    """As its authors count. ATM's last layer, for the class head: 8·C² + … for one token instead of 197."""
    model = tm.apply(timm.create_model(name, head="cls").eval(), tm.NoMerge(last_layer="full"))
    with torch.inference_mode(), tm.trace(model, detail=False) as t:
        model(torch.zeros(1, 3, 224, 224))
    assert round(t.cost("lvvit").gmacs, 3) == gmacs
    tm.apply(model, tm.NoMerge(last_layer="prefix"))
    with torch.inference_mode(), tm.trace(model, detail=False) as t:
        model(torch.zeros(1, 3, 224, 224))
    c, hidden = model.embed_dim, 3 * model.embed_dim
    assert t.cost("lvvit").gmacs == pytest.approx(gmacs - 196 * (2 * c * hidden + 9 * hidden + 11 * c) / 1e9, abs=0.0006)


def test_mae_from_the_official_layout(tmp_path: Path) -> None:
    """`mae_finetuned_vit_base.pth`: {"model": …}, the mean of the patches behind `fc_norm`, no `norm`."""
    torch.manual_seed(0)
    shapes = {"cls_token": (1, 1, 768), "pos_embed": (1, 197, 768), "patch_embed.proj.weight": (768, 3, 16, 16)}
    shapes |= {"patch_embed.proj.bias": (768,), "fc_norm.weight": (768,), "fc_norm.bias": (768,)}
    shapes |= {"head.weight": (1000, 768), "head.bias": (1000,)}
    for i in range(12):
        for part, (rows, columns) in {"attn.qkv": (2304, 768), "attn.proj": (768, 768)}.items():
            shapes |= {f"blocks.{i}.{part}.weight": (rows, columns), f"blocks.{i}.{part}.bias": (rows,)}
        for part, (rows, columns) in {"mlp.fc1": (3072, 768), "mlp.fc2": (768, 3072)}.items():
            shapes |= {f"blocks.{i}.{part}.weight": (rows, columns), f"blocks.{i}.{part}.bias": (rows,)}
        for part in ("norm1", "norm2"):
            shapes |= {f"blocks.{i}.{part}.weight": (768,), f"blocks.{i}.{part}.bias": (768,)}
    state = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    torch.save({"model": state}, tmp_path / "mae_finetuned_vit_base.pth")
    model = tm.load_model("mae_vit_base_patch16", tmp_path / "mae_finetuned_vit_base.pth")
    x = torch.randn(1, 3, 224, 224)
    with torch.inference_mode():
        patches = model.forward_features(x)[:, 1:]  # which ends without a norm
        mean = torch.nn.functional.layer_norm(patches.mean(1), (768,), state["fc_norm.weight"], state["fc_norm.bias"], 1e-6)
        torch.testing.assert_close(model(x), mean @ state["head.weight"].T + state["head.bias"], atol=1e-5, rtol=1e-5)
        with tm.trace(tm.apply(model, tm.ATM.preset("vit_base_patch16_224.mae", lossless=False, gmacs=17.0))) as t:
            model(x)
    assert t.calls[0].last_layer == "full"
    assert round(t.cost("paper").baseline_gmacs, 2) == 17.57


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="head must be 'cls' or 'cls\\+aux', not 'aux'"):
        timm.create_model("lvvit_t", head="aux")
    with pytest.raises(ValueError, match="multiples of 16, not \\(100, 100\\)"):
        timm.create_model("t2t_vit_t_14", img_size=100)
