"""Real DINOv2 ViT-S/14 weights in the classes of three libraries: the same merged features."""

from __future__ import annotations

import warnings
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import timm
import torch
import transformers as hf
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from torch import Tensor, nn

import tokenmerge as tm
from tests import dino_hub
from tests.conftest import ROOT

WEIGHTS = ROOT / ".cache" / "real" / "dinov2_vits14.safetensors"


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """For 224 × 224 pixels."""
    if not WEIGHTS.is_file():
        pytest.skip(
            "the real DINOv2 weights are absent; `make real` fetches them where ../shared/real is next to the checkout"
        )
    state = load_file(WEIGHTS)
    return state | {"pos_embed": resample_abs_pos_embed(state["pos_embed"], [16, 16], num_prefix_tokens=1)}


def with_timm(state: dict[str, Tensor]) -> nn.Module:
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=224)
    model.load_state_dict(state)
    return model.eval()


def with_hugging_face(state: dict[str, Tensor]) -> nn.Module:
    config = hf.Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=224, patch_size=14)
    names = {
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "norm.": "layernorm.",
        "attn.proj": "attention.o_proj",
        "ls1.gamma": "layer_scale1.lambda1",
        "ls2.gamma": "layer_scale2.lambda1",
    }
    renamed = {"embeddings.mask_token": torch.zeros(1, 384)}
    for key, value in state.items():
        layer, rest = "", key
        if key.startswith("blocks."):
            _, index, rest = key.split(".", 2)
            layer = f"encoder.layer.{index}."
        if rest.startswith("attn.qkv"):
            for part, rows in zip("qkv", value.chunk(3), strict=True):
                renamed[f"{layer}attention.{part}_proj.{rest.rpartition('.')[2]}"] = rows
            continue
        old = next((name for name in names if rest.startswith(name)), None)
        renamed[layer + (rest if old is None else rest.replace(old, names[old]))] = value
    model = hf.Dinov2Model(config)
    model.load_state_dict(renamed)
    return model.eval()


def with_hub(state: dict[str, Tensor]) -> nn.Module:
    """The real class, where facebookresearch/dinov2 is on the path; else the stand-in."""
    options: dict[str, Any] = dict(img_size=224, patch_size=14, embed_dim=384, depth=12, num_heads=6)
    if find_spec("dinov2") is None:
        model = dino_hub.dinov2(**options)
    else:
        with warnings.catch_warnings():  # it warns that xFormers is absent
            warnings.simplefilter("ignore")
            layers, models = import_module("dinov2.layers"), import_module("dinov2.models.vision_transformer")
        block = partial(layers.NestedTensorBlock, attn_class=layers.MemEffAttention)
        model = models.DinoVisionTransformer(**options, block_fn=block, init_values=1.0, block_chunks=0)
        state = state | {"mask_token": torch.zeros(1, 384)}
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize("build", [with_hugging_face, with_hub])
@pytest.mark.parametrize("method", [tm.ToMe(10), tm.ATM(1.0, 0.03, 0.8, batch="each")], ids=["tome", "each"])
def test_the_same_merged_features_in_every_library(
    build: Any, method: tm.Method, weights: dict[str, Tensor], photos: Tensor
) -> None:
    x = photos[:4]
    reference, other = with_timm(weights), build(weights)
    with torch.inference_mode():
        with tm.trace(tm.apply(reference, method)) as t:
            expected = reference.forward_features(x)
        tm.apply(other, method)
        if isinstance(other, hf.Dinov2Model):
            found = other(x).last_hidden_state
        else:
            parts = other.forward_features(x)
            found = torch.cat((parts["x_norm_clstoken"].unsqueeze(1), parts["x_norm_patchtokens"]), 1)
    assert int(t.tokens[-1].sum()) < 4 * 200, "something should merge"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
