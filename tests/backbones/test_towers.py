"""Models with more than an image tower: the tower merges, the rest is untouched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import tokenmerge as tm
from tests.tiny_models import HF
from tokenmerge.backbones import tower_of
from tokenmerge.engine.features import image_function

TEXT: dict[str, Any] = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=10)
SPECIAL: dict[str, Any] = dict(bos_token_id=0, eos_token_id=1, pad_token_id=1)
IDS = torch.tensor([[0, 3, 1], [0, 5, 1]])


def randomised(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.6 / parameter.shape[-1] ** 0.5)
    return model.eval()


def clip() -> Any:
    return randomised(hf.CLIPModel(hf.CLIPConfig(text_config=TEXT | SPECIAL, vision_config=HF, projection_dim=16)))


def siglip() -> Any:
    text = TEXT | SPECIAL | dict(projection_size=32, max_position_embeddings=8)
    return randomised(hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=HF)))


def blip() -> Any:
    text = TEXT | SPECIAL | dict(encoder_hidden_size=32, projection_dim=16, sep_token_id=1)
    return randomised(hf.BlipModel(hf.BlipConfig(text_config=text, vision_config=HF, projection_dim=16)))


def llava() -> Any:
    text = hf.LlamaConfig(**(TEXT | dict(vocab_size=32)))
    config = hf.LlavaConfig(text_config=text, vision_config=hf.CLIPVisionConfig(**HF), image_token_index=31)
    return randomised(hf.LlavaForConditionalGeneration(config))


def open_clip_model(**vision: Any) -> Any:
    vision = dict(layers=4, width=64, head_width=32, patch_size=8, image_size=40) | vision
    text = dict(context_length=8, vocab_size=10, width=32, heads=2, layers=1)
    return randomised(open_clip.CLIP(embed_dim=16, vision_cfg=vision, text_cfg=text))


def open_clip_timm() -> Any:
    vision = dict(timm_model_name="vit_tiny_patch16_224", timm_pool="", timm_proj="linear", image_size=224, layers=1)
    text = dict(context_length=8, vocab_size=10, width=32, heads=2, layers=1)
    return randomised(open_clip.CustomTextCLIP(embed_dim=16, vision_cfg=vision, text_cfg=text))


def images(size: int = 40, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, size, size, generator=generator) * torch.linspace(0.2, 2, count).view(-1, 1, 1, 1)


@pytest.mark.parametrize(
    ("build", "tower", "size"),
    [
        (clip, "vision_model", 40),
        (siglip, "vision_model", 40),
        (blip, "vision_model", 40),
        (llava, "model.vision_tower", 40),
        (open_clip_model, "visual", 40),
        (open_clip_timm, "visual.trunk", 224),
    ],
)
def test_the_image_tower_merges_and_the_rest_is_untouched(build: Callable[[], Any], tower: str, size: int) -> None:
    model, x = build(), images(size)
    assert tower_of(model) is model.get_submodule(tower)
    types = {name: type(module) for name, module in model.named_modules()}
    with torch.inference_mode():
        before = image_function(model)(x)
        assert tm.apply(model, tm.ToMe(4)) is model
        with tm.trace(model) as t:
            after = image_function(model)(x)
        changed = {name for name, module in model.named_modules() if type(module) is not types[name]}
        assert changed
        assert all(name.startswith(tower) for name in changed)
        assert after.shape == before.shape
        assert not torch.allclose(after, before, atol=1e-4)
        tokens = int(t.tokens_in[0][0])
        assert [int(layer[0]) for layer in t.tokens_in[:3]] == [tokens, tokens - 4, tokens - 8]
        assert t.cost().ratio < 1
        tm.apply(model, tm.NoMerge(last_layer="full"))
        torch.testing.assert_close(image_function(model)(x), before, atol=1e-5, rtol=1e-5)
        tm.remove(model)
        assert torch.equal(image_function(model)(x), before)
    assert {name: type(module) for name, module in model.named_modules()} == types


def test_image_features_and_a_zero_shot_forward_of_clip() -> None:
    model, x = clip(), images()
    with torch.inference_mode():
        texts = model.get_text_features(IDS).pooler_output
        tm.apply(model, tm.ToMe(4))
        assert torch.equal(model.get_text_features(IDS).pooler_output, texts)
        features = model.get_image_features(x).pooler_output
        torch.testing.assert_close(features, image_function(model)(x))
        out = model(input_ids=IDS, pixel_values=x)
    assert out.logits_per_image.shape == (3, 2)
    expected = torch.nn.functional.normalize(features, dim=-1) @ torch.nn.functional.normalize(texts, dim=-1).T
    torch.testing.assert_close(out.logits_per_image / model.logit_scale.exp().detach(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build", [clip, siglip, open_clip_model])
def test_a_zero_shot_classifier_is_calibrated_and_validated(build: Callable[[], Any]) -> None:
    """Text embeddings are given once; predictions are the nearest texts."""
    model, x = build(), images(count=24)
    with torch.inference_mode():
        features = image_function(model)(x)
    classifier = tm.ZeroShotClassifier(model, features[:5].clone(), names=["a", "b", "c", "d", "e"])
    with torch.inference_mode():
        assert classifier(x[:5]).argmax(1).tolist() == [0, 1, 2, 3, 4], "each image is nearest to its own features"
    found = tm.calibrate(classifier, x[:12], gmacs=0.8, sample=12, rounds=0)
    proof = tm.prove(classifier, x[12:], found.method, batch_size=4)
    assert proof.kind == "top-1 class"
    assert proof.this.ratio == pytest.approx(0.8, abs=0.06)
    merged = tm.apply(classifier, found.method)
    with torch.inference_mode():
        agree = (merged(x[12:]).argmax(1) == tm.remove(merged)(x[12:]).argmax(1)).sum()
    assert proof.unchanged == int(agree)


def test_text_embeddings_are_checked() -> None:
    with pytest.raises(ValueError, match=r"finite numbers \[classes, width\], not torch.float32 \[4\]"):
        tm.ZeroShotClassifier(clip(), torch.zeros(4))
    with pytest.raises(ValueError, match="2 names for 3 text embeddings"):
        tm.ZeroShotClassifier(clip(), torch.ones(3, 16), names=["a", "b"])
    with pytest.raises(ValueError, match="width 9 do not fit the image features of this CLIPModel, which have width 16"):
        tm.ZeroShotClassifier(clip(), torch.ones(3, 9))(images())


def test_open_clip_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ViT-B-32: which weights\? open_clip:ViT-B-32/TAG, with TAG one of openai, "):
        tm.load_model("open_clip:ViT-B-32")
    with pytest.raises(ValueError, match="unknown model open_clip:ViT-B-33; open_clip has "):
        tm.load_model("open_clip:ViT-B-33")
