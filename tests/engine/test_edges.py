"""Odd inputs: very few patches, constant images, NaN, odd counts, other resolutions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import tokenmerge as tm
from tests import tiny_models as tiny
from tests.contract.table import CONFIGS, batch, build, refusal
from tests.helpers import slow_pairs, slow_vit

every_method = pytest.mark.parametrize("method", CONFIGS)


def vit(patches: tuple[int, int], **options: object) -> VisionTransformer:
    torch.manual_seed(0)
    return tiny.vit(img_size=(patches[0] * 8, patches[1] * 8), **options).eval()


@every_method
@pytest.mark.parametrize("patches", [(1, 1), (1, 2), (1, 3), (3, 5), (2, 4)])
@pytest.mark.parametrize("class_token", [True, False])
def test_few_and_odd_patches(method: str, patches: tuple[int, int], class_token: bool) -> None:
    if not class_token and refusal("no-class-avg", method) is not None:
        return  # test_refused_with_a_reason
    model = vit(patches, class_token=class_token, global_pool="token" if class_token else "avg")
    x = torch.randn(2, 3, patches[0] * 8, patches[1] * 8)
    with torch.inference_mode():
        expected = model(x)
        tm.apply(model, CONFIGS[method])
        with tm.trace(model) as t:
            out = model(x)
    assert out.shape == expected.shape
    assert out.isfinite().all()
    assert all(int(n.min()) >= 1 for n in t.tokens)
    if patches == (1, 1) and not CONFIGS[method].trained:  # trained methods may drop the only patch
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@every_method
def test_constant_images(method: str) -> None:
    """Two equal images: finite, and both the same; methods that merge by similarity merge them more than noise."""
    config = CONFIGS[method]
    model = tm.apply(build("cls"), config)
    with torch.inference_mode():
        with tm.trace(model) as constant:
            out = model(torch.zeros(2, 3, 40, 40))
        with tm.trace(model) as noise:
            model(4 * torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(0)))
    assert out.isfinite().all()
    if method != "random":
        torch.testing.assert_close(out[0], out[1], atol=1e-5, rtol=1e-5)
    if isinstance(config, tm.ATM) and config.counts is None:
        assert constant.tokens_in[-1].sum() < noise.tokens_in[-1].sum()


@every_method
def test_a_nan_patch_stays_in_its_image(method: str) -> None:
    """The baseline returns NaN for that image, and so does the merged model; the other images are not affected."""
    model, x = build("cls"), batch("cls")
    x[1, :, :8, :8] = torch.nan
    with torch.inference_mode():
        baseline = model(x)
        merged = tm.apply(model, CONFIGS[method])(x)
        assert baseline[1].isnan().all()
        assert merged[1].isnan().all()
        assert merged[[0, 2]].isfinite().all()
        if CONFIGS[method].batch_invariant:
            torch.testing.assert_close(merged[[0, 2]], model(x[[0, 2]]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["cls", "mae-avg"])
@pytest.mark.parametrize("method", ["atm-mean", "atm-each", "atm-counts", "tome", "constant"])
def test_equals_a_slow_reference(name: str, method: str) -> None:
    """Plain formulas, image by image; real weights are in test_real_deit.py."""
    config = dataclasses.replace(CONFIGS[method], last_layer="full")
    model, images = build(name), batch(name)
    counts = getattr(config, "counts", None)

    def count(layer: int, cosines: list[float]) -> int:
        if counts is not None or isinstance(config, tm.ToMe):
            return counts[layer - 1] if counts is not None else config.r
        theta = config.threshold(layer) if isinstance(config, tm.ATM) else config.theta
        return sum(c > theta for c in cosines)

    split_layer = 3 if isinstance(config, tm.ATM) else 4
    with torch.inference_mode():
        for image in images:
            expected, tokens = slow_vit(model, image, count, split_layer)
            tm.apply(model, config)
            with tm.trace(model) as t:
                out = model(image[None])[0]
            tm.remove(model)
            assert [int(n) for n in t.tokens] == tokens
            torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_decides_as_float32_on_the_same_keys(dtype: torch.dtype) -> None:
    """The keys of a half-precision model are rounded, the decisions on them are not: compare with exact arithmetic."""
    model, x = (
        tm.apply(build("cls").to(dtype), tm.ATM(thresholds=[0.5, 0.4, 0.3, 0.2], batch="each")),
        batch("cls").to(dtype),
    )
    keys: list[torch.Tensor] = []
    model.blocks[0].attn.k_norm.register_forward_hook(lambda module, args, out: keys.append(out))
    with torch.inference_mode(), tm.trace(model) as t:
        out = model(x)
    assert out.dtype == dtype
    for image, similarities, pairs in zip(keys[0], t.similarities(1), t.pairs(1), strict=True):
        slow = slow_pairs(image.double().mean(0), [1.0] * image.shape[1], 1, by_size=False)
        torch.testing.assert_close(similarities.double(), torch.tensor([c for c, _, _ in slow]).double(), atol=1e-5, rtol=0)
        assert [tuple(p) for p in pairs.tolist()] == [(i, j) for c, i, j in slow if c > 0.5]


def test_a_wrong_image_size_is_the_models_own_error() -> None:
    with pytest.raises(AssertionError, match="doesn't match model"):
        tm.apply(build("cls"), tm.ToMe(2))(torch.randn(1, 3, 48, 48))


def test_images_of_other_sizes_on_a_dynamic_model() -> None:
    model = tm.apply(build("dynamic-non-square"), tm.ATM(thresholds=[0.3] * 4, batch="each"))
    with torch.inference_mode():
        for size in ((24, 56), (40, 40), (64, 8)):
            with tm.trace(model) as t:
                model(torch.randn(2, 3, *size))
            assert t.owner.shape == (2, size[0] * size[1] // 64 + 1)
        with tm.trace(model) as t:
            model(torch.randn(1, 3, 40, 40))
            model(torch.randn(1, 3, 24, 56))
    with pytest.raises(ValueError, match="different sizes"):
        _ = t.owner
