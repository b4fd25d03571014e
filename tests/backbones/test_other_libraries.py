"""Hugging Face's and torchvision's models: the same figures as timm's with the same weights, and the tools around them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchvision.models import VisionTransformer as TorchvisionViT
from torchvision.models import vit_b_32

import tokenmerge as tm
from tests.contract.table import batch, build, output

ATM = tm.ATM(1.0, 0.03, 0.8)
SMALL = dict(image_size=40, patch_size=8, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64)


def as_hugging_face(weights: dict[str, Tensor]) -> nn.Module:
    """timm's DeiT-Tiny (without distillation, a plain ViT) in transformers' layout."""
    config = hf.ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        num_labels=1000,
        layer_norm_eps=1e-6,
    )
    names = {
        "cls_token": "vit.embeddings.cls_token",
        "pos_embed": "vit.embeddings.position_embeddings",
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
    }
    state = {}
    for key, value in weights.items():
        name, _, kind = key.rpartition(".")
        if key in names:
            state[names[key]] = value
        elif not name.startswith("blocks."):
            state[f"{names[name]}.{kind}"] = value
        else:
            _, layer, inside = name.split(".", 2)
            if inside == "attn.qkv":
                for part, rows in zip("qkv", value.chunk(3), strict=True):
                    state[f"vit.layers.{layer}.attention.{part}_proj.{kind}"] = rows
            else:
                state[f"vit.layers.{layer}.{names.get(inside, inside)}.{kind}"] = value
    model = hf.ViTForImageClassification(config)
    model.load_state_dict(state)
    return model.eval()


def as_torchvision(weights: dict[str, Tensor]) -> nn.Module:
    model = TorchvisionViT(image_size=224, patch_size=16, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768)
    names = {
        "cls_token": "class_token",
        "pos_embed": "encoder.pos_embedding",
        "patch_embed.proj.": "conv_proj.",
        "norm.": "encoder.ln.",
        "head.": "heads.head.",
    }
    inside = {
        "norm1.": "ln_1.",
        "norm2.": "ln_2.",
        "attn.qkv.": "self_attention.in_proj_",
        "attn.proj.": "self_attention.out_proj.",
        "mlp.fc1.": "mlp.0.",
        "mlp.fc2.": "mlp.3.",
    }
    state = {}
    for key, value in weights.items():
        if key.startswith("blocks."):
            _, layer, rest = key.split(".", 2)
            old = next(name for name in inside if rest.startswith(name))
            state[f"encoder.layers.encoder_layer_{layer}.{rest.replace(old, inside[old])}"] = value
        else:
            old = next(name for name in names if key.startswith(name))
            state[key.replace(old, names[old])] = value
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize("convert", [as_hugging_face, as_torchvision])
@pytest.mark.parametrize(
    "method", [ATM, tm.ATM(1.0, 0.03, 0.8, batch="each"), tm.ToMe(8), tm.EViT(0.7)], ids=["mean", "each", "tome", "evit"]
)
def test_equals_timm_with_the_same_weights(
    convert: Callable[[dict[str, Tensor]], nn.Module],
    method: tm.Method,
    deit_tiny: nn.Module,
    deit_tiny_weights: dict[str, Tensor],
    photos: Tensor,
) -> None:
    other = convert(deit_tiny_weights)
    with torch.inference_mode():
        torch.testing.assert_close(output(other(photos)), deit_tiny(photos), atol=1e-4, rtol=0)
        logits, traces = [], []
        for model in (deit_tiny, other):
            with tm.trace(tm.apply(model, method), detail=False) as t:
                logits.append(output(model(photos)))
            traces.append(t)
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=0)
    assert [layer.tolist() for layer in traces[1].tokens] == [layer.tolist() for layer in traces[0].tokens]
    assert int(traces[0].tokens_in[-1].sum()) < 16 * 150, "something should merge"
    assert traces[1].cost("paper").gmacs == pytest.approx(traces[0].cost("paper").gmacs, rel=1e-6)


@pytest.mark.parametrize("convert", [as_hugging_face, as_torchvision])
def test_the_whole_job_on_another_library(
    convert: Callable[[dict[str, Tensor]], nn.Module], deit_tiny_weights: dict[str, Tensor], photos: Tensor
) -> None:
    model = convert(deit_tiny_weights)
    found = tm.calibrate(model, photos, gmacs=0.7, sample=8, rounds=0)
    result = tm.evaluate(model, photos, [found.method], batch_size=16)[1]
    assert result.gmacs_ratio == pytest.approx(0.7, abs=0.02)
    assert result.agreement is not None
    assert result.agreement >= 0.8
    assert "tokenmerge" not in repr([set(vars(module)) for module in model.modules()])


@pytest.mark.parametrize(
    "name", ["hf-vit", "hf-vit-model", "hf-deit", "hf-dinov2", "hf-dinov2-registers", "hf-clip", "hf-siglip"]
)
@pytest.mark.parametrize("method", [tm.NoMerge(), tm.ToMe(4), tm.ATM(thresholds=[0.5, 0.4, 0.3, 0.2], batch="each")])
def test_hidden_states_are_whole(name: str, method: tm.Method) -> None:
    model, x = build(name), batch(name)
    with torch.inference_mode():
        before = model(x, output_hidden_states=True)
        tm.apply(model, method)
        after, plain = model(x, output_hidden_states=True), model(x)
        kept = model(x, output_hidden_states=True, return_dict=False)
    assert plain.hidden_states is None
    assert [h.shape for h in after.hidden_states] == [h.shape for h in before.hidden_states]
    torch.testing.assert_close(output(after), output(plain), atol=1e-5, rtol=1e-5)
    assert isinstance(kept, tuple)
    if hasattr(before, "last_hidden_state"):
        assert after.last_hidden_state.shape == before.last_hidden_state.shape
        torch.testing.assert_close(after.last_hidden_state, plain.last_hidden_state, atol=1e-5, rtol=1e-5)
    if isinstance(method, tm.NoMerge):
        torch.testing.assert_close(after.hidden_states, before.hidden_states, atol=1e-5, rtol=1e-5)
    else:
        with torch.inference_mode():
            states = [
                tm.apply(model, method, restore=restore)(x, output_hidden_states=True).hidden_states[-1][0]  # type: ignore[arg-type]
                for restore in ("group", "residual")
            ]
        rows = [len(state.unique(dim=0)) for state in (*states, before.hidden_states[-1][0])]
        assert rows[0] < rows[1] == rows[2], "tokens of a group are equal, unless they get their own part back"


def test_attentions_and_masks_are_refused() -> None:
    model, x = tm.apply(build("hf-vit"), tm.ToMe(4)), batch("hf-vit")
    with pytest.raises(ValueError, match="returns no attentions"):
        model(x, output_attentions=True)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        model(x, attention_mask=torch.ones(3, 26))
    with pytest.raises(ValueError, match="takes pixel_values"):
        model()
    with pytest.raises(RuntimeError, match="called on its own"):
        model.vit.layers[0](torch.zeros(1, 26, 32))
    eager = tm.apply(build("hf-vit-eager"), tm.ToMe(4))
    eager.config.output_attentions = True
    with pytest.raises(ValueError, match="returns no attentions"):
        eager(x)


def test_keywords_labels_and_the_signature_that_trainers_read() -> None:
    model, x = build("hf-vit"), batch("hf-vit")
    labels = torch.tensor([0, 3, 6])
    before = inspect.signature(model.forward)
    tm.apply(model, tm.NoMerge())
    assert inspect.signature(model.forward) == before
    with torch.inference_mode():
        merged = model(pixel_values=x, labels=labels, interpolate_pos_encoding=True)
        tm.remove(model)
        torch.testing.assert_close(merged.loss, model(x, labels=labels).loss, atol=1e-5, rtol=1e-5)
        with tm.trace(tm.apply(model, tm.ToMe(4))) as t:
            model(torch.randn(1, 3, 56, 56), interpolate_pos_encoding=True)
    assert int(t.tokens_in[0][0]) == 50
    assert t.cost().ratio < 1


class NoKeywords(hf.ViTForImageClassification):
    def forward(self, pixel_values: Tensor) -> Any:  # type: ignore[override]
        return super().forward(pixel_values)


def test_a_forward_without_keywords_is_refused() -> None:
    with pytest.raises(tm.Unsupported, match=r"NoKeywords\.forward takes no other keywords"):
        tm.apply(NoKeywords(hf.ViTConfig(**SMALL)), tm.ToMe(4))


def test_saved_models_have_no_trace_of_the_patch(tmp_path: Path) -> None:
    model, x = build("hf-vit"), batch("hf-vit")
    model.save_pretrained(tmp_path / "plain")
    with torch.inference_mode():
        expected = model(x).logits
        tm.apply(model, tm.ToMe(4))
        merged = model(x).logits
    model.save_pretrained(tmp_path / "merged")
    plain, patched = (sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("plain", "merged"))
    assert plain == patched
    assert (tmp_path / "plain/config.json").read_text() == (tmp_path / "merged/config.json").read_text()
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "merged"))
    assert old.keys() == new.keys()
    assert all(torch.equal(old[k], new[k]) for k in old)
    again = hf.AutoModelForImageClassification.from_pretrained(tmp_path / "merged").eval()
    assert type(again) is hf.ViTForImageClassification
    with torch.inference_mode():
        torch.testing.assert_close(again(x).logits, expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(tm.apply(again, tm.ToMe(4))(x).logits, merged, atol=1e-6, rtol=0)


def lora(model: nn.Module) -> Any:
    torch.manual_seed(5)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "fc1"], init_lora_weights=False))
    return wrapped.eval()


def test_lora_before_or_after() -> None:
    x = batch("hf-vit")
    with torch.inference_mode():
        before = lora(build("hf-vit"))
        plain = before(x).logits
        with pytest.raises(tm.Unsupported, match=r"contains one at \.base_model\.model: apply there"):
            tm.apply(before, tm.ToMe(4))
        tm.apply(before.base_model.model, tm.ToMe(4))
        after = lora(tm.apply(build("hf-vit"), tm.ToMe(4)))
        torch.testing.assert_close(before(x).logits, after(x).logits, atol=1e-6, rtol=0)
        assert not torch.allclose(before(x).logits, plain, atol=1e-3)
        merged = after.merge_and_unload()
        torch.testing.assert_close(merged(x).logits, before(x).logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(tm.remove(merged)(x).logits, plain, atol=1e-4, rtol=0)


def test_lora_learns_in_a_merged_model() -> None:
    model, x = lora(tm.apply(build("hf-vit"), tm.ToMe(4))).train(), batch("hf-vit")
    model(x, labels=torch.tensor([0, 1, 2])).loss.backward()
    touched = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert touched
    assert all("lora_" in name for name in touched)


@pytest.mark.parametrize("name", ["hf-vit", "cls", "torchvision"])
def test_int8_weights_before_or_after(name: str) -> None:
    x = batch(name)
    with torch.inference_mode():
        exact = output(tm.apply(build(name), tm.ToMe(4))(x))
        before, after = build(name), tm.apply(build(name), tm.ToMe(4))
        quantize_(before, Int8WeightOnlyConfig())
        tm.apply(before, tm.ToMe(4))
        quantize_(after, Int8WeightOnlyConfig())
        torch.testing.assert_close(output(before(x)), output(after(x)), atol=1e-5, rtol=0)
        assert 0 < float((output(before(x)) - exact).abs().max()) < 0.3, "int8 rounds, and little"


@pytest.mark.parametrize(("package", "name"), [("transformers", "hf-vit"), ("timm", "cls"), ("torchvision", "torchvision")])
def test_an_old_release_is_refused_with_the_range(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmerge.backbones.helpers.version", lambda name: "0.9.1")
    with pytest.raises(tm.Unsupported, match=rf"{package} 0\.9\.1 is installed; supported is {package} ≥ "):
        tm.apply(build(name), tm.ToMe(4))


def test_what_goes_past_the_merging_is_refused() -> None:
    model = build("hf-vit")
    model.vit.layers[1].forward = model.vit.layers[1].forward  # as a device map of accelerate's does
    with pytest.raises(tm.Unsupported, match="ViTLayer has a `forward` of its own"):
        tm.apply(model, tm.ToMe(4))
    model = build("torchvision")
    tm.apply(model, tm.ToMe(4)).encoder.register_forward_hook(lambda *args: None)
    with pytest.raises(tm.Unsupported, match="encoder has hooks"):
        model(batch("torchvision"))
    model = build("hf-vit")
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(tm.Unsupported, match="computes attention by 'paged"):
        tm.apply(model, tm.ToMe(4))


def test_models_by_name(tmp_path: Path, photo_folder: Path) -> None:
    build("hf-vit").save_pretrained(tmp_path / "vit")
    (tmp_path / "vit/preprocessor_config.json").write_text(
        json.dumps(
            dict(
                image_processor_type="ViTImageProcessor",
                size=dict(height=40, width=40),
                image_mean=[0.5] * 3,
                image_std=[0.5] * 3,
            )
        )
    )
    model = tm.load_model(f"hf:{tmp_path / 'vit'}")
    assert type(model) is hf.ViTForImageClassification
    images = tm.load_images(photo_folder / "ai_benchmark", model, limit=3)
    x = next(images.batches(3)).images
    assert x.shape == (3, 3, 40, 40)
    assert -1 <= float(x.min()) < 0 < float(x.max()) <= 1
    assert tm.evaluate(model, images, [tm.ToMe(4)])[1].images == 3

    hf.CLIPModel(hf.CLIPConfig(vision_config=SMALL, text_config=dict(num_hidden_layers=1))).save_pretrained(
        tmp_path / "clip"
    )
    assert type(tm.load_model(f"hf:{tmp_path / 'clip'}")) is hf.CLIPVisionModelWithProjection
    with pytest.raises(ValueError, match="no image processor was found"):
        tm.load_images(photo_folder, tm.load_model(f"hf:{tmp_path / 'clip'}"))
    with pytest.raises(ValueError, match="not a folder or name that transformers can load"):
        tm.load_model(f"hf:{tmp_path / 'nothing'}")
    with pytest.raises(ValueError, match=r"torchvision has vit_b_16, vit_b_32"):
        tm.load_model("torchvision:resnet18")


def test_torchvision_by_name_with_local_weights(tmp_path: Path, photo_folder: Path) -> None:
    torch.manual_seed(0)
    torch.save(vit_b_32().state_dict(), tmp_path / "vit.pth")
    model = tm.load_model("torchvision:vit_b_32", tmp_path / "vit.pth")
    assert next(tm.load_images(photo_folder, model, limit=1).batches(1)).images.shape == (1, 3, 224, 224)
    with pytest.raises(ValueError, match=r"does not fit torchvision:vit_b_16: keys .* of another shape"):
        tm.load_model("torchvision:vit_b_16", tmp_path / "vit.pth")
