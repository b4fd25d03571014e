"""Images of unequal size in one batch, as patches with padding: NaFlex models of timm and SigLIP 2 of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from timm.models.naflexvit import batch_patchify
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import tokenmerge as tm
from tests import tiny_models as tiny
from tests.backbones.test_towers import randomised
from tests.contract.table import CONFIGS

GRIDS = ((5, 5), (4, 5), (3, 6), (2, 4))
LENGTHS = tuple(height * width for height, width in GRIDS)
Batch = dict[str, Tensor]


def patches_of(index: int) -> Tensor:
    height, width = GRIDS[index]
    generator = torch.Generator().manual_seed(index)
    image = torch.randn(1, 3, 8 * height, 8 * width, generator=generator) * (0.4 + 0.5 * index)
    return batch_patchify(image, (8, 8))[0]


def timm_batch(indices: tuple[int, ...]) -> Batch:
    longest = max(LENGTHS[i] for i in indices)
    patches = torch.full((len(indices), longest, 192), 50.0)  # what is in the padding must not matter
    coord = torch.zeros(len(indices), longest, 2, dtype=torch.int64)
    valid = torch.zeros(len(indices), longest, dtype=torch.bool)
    for row, i in enumerate(indices):
        n, (height, width) = LENGTHS[i], GRIDS[i]
        patches[row, :n] = patches_of(i)
        coord[row, :n] = torch.cartesian_prod(torch.arange(height), torch.arange(width))
        valid[row, :n] = True
    return {"patches": patches, "patch_coord": coord, "patch_valid": valid}


def hf_batch(indices: tuple[int, ...]) -> Batch:
    batch = timm_batch(indices)
    return {
        "pixel_values": batch["patches"],
        "pixel_attention_mask": batch["patch_valid"].int(),
        "spatial_shapes": torch.tensor([GRIDS[i] for i in indices]),
    }


def siglip2() -> Any:
    return tiny.hugging_face(hf.Siglip2VisionModel, hf.Siglip2VisionConfig, num_patches=25)


def siglip2_classes() -> Any:
    return hf.Siglip2ForImageClassification(hf.Siglip2Config(vision_config=tiny.HF | {"num_patches": 25}, num_labels=7))


def run_timm(model: Any, indices: tuple[int, ...]) -> Tensor:
    return model(timm_batch(indices))


def run_hf(model: Any, indices: tuple[int, ...]) -> Tensor:
    out = model(**hf_batch(indices))
    return out.logits if "logits" in out else out.pooler_output


FORMS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], int]] = {
    "map": (lambda: tiny.naflex(global_pool="map"), run_timm, 0),
    "avg": (lambda: tiny.naflex(global_pool="avg", reg_tokens=2), run_timm, 2),
    "token": (lambda: tiny.naflex(global_pool="token", class_token=True), run_timm, 1),
    "rope": (lambda: tiny.naflex(rope_type="axial"), run_timm, 0),
    "siglip2": (siglip2, run_hf, 0),
    "siglip2-classes": (siglip2_classes, run_hf, 0),
}
every_form = pytest.mark.parametrize("form", FORMS)
ALL = tuple(range(len(GRIDS)))
# Each image is merged in the same way in any batch.
EQUAL_ALONE = ("atm-each", "atm-counts", "tome", "topr", "ats")


def build(form: str) -> tuple[nn.Module, Callable[..., Tensor], int]:
    make, run, prefix = FORMS[form]
    torch.manual_seed(0)
    return randomised(make()), run, prefix


@every_form
def test_nothing_merged_is_the_baseline(form: str) -> None:
    model, run, _ = build(form)
    with torch.inference_mode():
        expected = run(model, ALL)
        tm.apply(model, tm.NoMerge(last_layer="full"))
        torch.testing.assert_close(run(model, ALL), expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(run(tm.remove(model), ALL), expected)


@every_form
@pytest.mark.parametrize("method", EQUAL_ALONE)
def test_padding_never_merges_and_never_counts(form: str, method: str) -> None:
    model, run, prefix = build(form)
    tm.apply(model.requires_grad_(False), CONFIGS[method])
    with torch.inference_mode(), tm.trace(model) as t:
        together = run(model, ALL)
    with torch.inference_mode(), tm.trace(model) as each:
        alone = torch.cat([run(model, (i,)) for i in ALL])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert t.tokens_in[0].tolist() == [prefix + n for n in LENGTHS]
    assert [layer.tolist() for layer in t.tokens] == [layer.tolist() for layer in each.tokens]
    assert int(t.tokens_in[-1].sum()) < sum(LENGTHS) + len(LENGTHS) * prefix, "something should merge"
    for row, n in enumerate(LENGTHS):
        assert (t.owner[row, prefix + n :] == -1).all()
        if not CONFIGS[method].drops_tokens:
            assert (t.owner[row, : prefix + n] >= 0).all()
            assert [int(size[row].sum()) for size in map(t.sizes, (1, 2, 3))] == [prefix + n] * 3
    torch.testing.assert_close(t.cost().baseline, each.cost().baseline + (t.cost().outside - each.cost().outside))


@every_form
def test_no_multiplication_is_spent_on_padding(form: str) -> None:
    model, run, _ = build(form)
    tm.apply(model.requires_grad_(False), tm.NoMerge(last_layer="full"))

    def macs(indices: tuple[int, ...]) -> float:
        math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with torch.no_grad(), math, FlopCounterMode(display=False) as counter, tm.trace(model) as t:
            run(model, indices)
        counted = float(t.cost().per_image.sum()) * 1e9
        return counter.get_total_flops() / 2 if len(indices) == 1 else counted

    outside = 25 * 192 * 32 * 4  # patches are embedded with their padding, by the model itself
    assert sum(macs((i,)) for i in ALL) <= macs(ALL) <= sum(macs((i,)) for i in ALL) + outside


def test_restored_tokens_of_a_padded_batch() -> None:
    model, _, _ = build("siglip2")
    with torch.inference_mode():
        tm.apply(model, CONFIGS["atm-each"])
        whole = model(**hf_batch(ALL)).last_hidden_state
        for i, n in enumerate(LENGTHS):
            alone = model(**hf_batch((i,))).last_hidden_state
            torch.testing.assert_close(whole[i, :n], alone[0], atol=1e-5, rtol=1e-5)


@every_form
def test_training_pads_and_gives_the_same(form: str) -> None:
    model, run, _ = build(form)
    tm.apply(model, CONFIGS["atm-each"])
    with torch.no_grad():
        packed = run(model.eval(), ALL)
    padded = run(model.train(), ALL)
    torch.testing.assert_close(padded, packed, atol=1e-5, rtol=1e-5)
    padded.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_methods_that_need_equal_images_say_so() -> None:
    model, run, _ = build("token")
    for method in (tm.EViT(0.7, layers=[2, 3]), tm.MCTF(5), tm.PiToMe(0.8), tm.DynamicViT(0.7, layers=[2, 3])):
        tm.apply(model, method)
        with torch.inference_mode():
            assert run(model, (1,)).isfinite().all(), "one image has no padding"
            with pytest.raises(ValueError, match=f"{type(method).__name__} keeps equal numbers of tokens.* 9 to 26"):
                run(model, ALL)


def test_padding_does_not_compile_to_one_graph() -> None:
    model, _, _ = build("token")
    tm.apply(model, tm.ToMe(2))
    with pytest.raises(RuntimeError, match="padded inputs do not compile or export"):
        torch.compile(model, backend="eager", fullgraph=True)(timm_batch(ALL))


def test_masks_of_the_caller_are_refused() -> None:
    model, _, _ = build("token")
    batch = timm_batch(ALL) | {"attn_mask": torch.zeros(4, 1, 26, 26)}
    with pytest.raises(ValueError, match="takes no attn_mask"):
        tm.apply(model, tm.ToMe(2))(batch)
