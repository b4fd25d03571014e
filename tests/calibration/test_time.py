"""Goals in time: the latency model, the search that pays with it, and the clock that checks it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tokenmerge as tm
from tokenmerge.calibration import clock as clock_module
from tokenmerge.calibration.candidates import candidates_for_time, whole_counts
from tokenmerge.calibration.clock import Clock
from tokenmerge.calibration.latency import LatencyModel, fit_price, measure_latency, price_configs
from tokenmerge.data import embedded
from tokenmerge.evaluation.reference import Reference

SAMPLE = {"sample": 8, "rounds": 0, "batch_size": 8}
KINDS = [repr(candidate) for candidate in candidates_for_time("ATM", 12, True)]


def linear(price: float, static_price: float | None = None) -> LatencyModel:
    """A model of 12 layers and 197 tokens whose halves take 1 ms each, in proportion to their tokens."""
    prices = {kind: ((static_price or price) if "static=True" in kind else price, 0.0, 0.0) for kind in KINDS}
    return LatencyModel("eager", 8, 2, 197, 1, 12, True, 25.0, (19.7, 197.0), (0.1, 1.0), (0.1, 1.0), 1.0, 1.0, 0.5, prices)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return embedded.load_model()


def test_a_config_is_the_sum_of_its_parts() -> None:
    found = linear(0.25)
    nothing = [197.0] * 11 + [1.0]
    assert found.predict(nothing, KINDS[0]) == pytest.approx(1 + 11 * 2 + 0.5)
    half = [98.5] * 11 + [1.0]  # merged in the first layer: attention of 197 tokens, MLP of half as many
    assert found.predict(half, KINDS[0]) == pytest.approx(1 + 1 + 0.5 + 0.25 + 10 * (0.5 + 0.5) + 0.5 * 0.5)
    assert found.ratio(half, KINDS[0]) == pytest.approx(found.predict(half, KINDS[0]) / 25)
    assert found.predict([9.85] * 11 + [1.0], KINDS[0]) > 0, "below the grid: a straight line"
    slow = replace(found, prices={KINDS[0]: (0.25, 0.001, 0.1)})
    assert slow.predict(half, KINDS[0]) == pytest.approx(found.predict(half, KINDS[0]) + 0.197 + 10 * 0.1)
    full = replace(found, cls_only=False)
    assert full.predict([197.0] * 12, KINDS[0]) == pytest.approx(25)
    assert LatencyModel.from_dict(found.to_dict()) == found


def test_prices_fit_and_are_never_negative() -> None:
    layers = ((11.0, 2000.0, 10.0), (11.0, 1200.0, 10.0), (1.0, 197.0, 10.0))

    def times(a: float, b: float, c: float) -> list[tuple[float, float, float, float]]:
        return [(*row, a * row[0] + b * row[1] + c * row[2]) for row in layers]

    assert fit_price(times(0.3, 0.002, 0.05)) == pytest.approx((0.3, 0.002, 0.05))
    assert fit_price(times(0.3, 0.002, 0.05)[:2])[2] == 0, "two rows cannot tell three prices apart"
    assert min(fit_price(times(0.3, -0.0005, 0.05))) == 0
    assert fit_price(times(-1, 0, -1)) == (0, 0, 0)


def test_counts_are_whole_and_add_up() -> None:
    assert whole_counts([0, 0.5, 1.3, 0, 2.4]) == [0, 0, 2, 0, 2]
    assert sum(whole_counts([0.4] * 10)) == 4


@pytest.mark.parametrize("runtime", ["eager", pytest.param("onnxruntime", marks=pytest.mark.slow)])
def test_a_latency_model_is_measured(model: nn.Module, runtime: str) -> None:
    reference = Reference(model, embedded.load_images("train", 4), batch_size=4)
    candidates = candidates_for_time("ATM", 12, adaptive=runtime == "eager")[:2]
    configs = price_configs(reference, candidates)
    found = measure_latency(model, reference.batches[0], configs, runtime=runtime, rounds=3)
    assert (found.tokens, found.depth, found.batch, found.cls_only) == (197, 12, 4, True)
    assert set(found.prices) == {repr(candidate) for candidate in candidates}
    assert list(found.attention) == sorted(found.attention)
    assert list(found.mlp) == sorted(found.mlp)
    assert 0 < found.predict([197.0] * 11 + [1.0], "") < 1.5 * found.baseline
    assert found.predict([60.0] * 11 + [1.0], KINDS[0]) < found.baseline
    assert not hasattr(model, "_tokenmerge")


class FakeClock:
    """Times configs by a latency model, with an error that the search does not know."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, latency: LatencyModel, error: float = 1.0) -> None:
        self.timed: list[tm.Method] = []
        self.error = {8: error}
        self.at_pixels: dict[int, float] = {}  # a known ratio for larger images
        self.latency = latency

        def measure(model: nn.Module, x: torch.Tensor, configs: Any, **options: Any) -> LatencyModel:
            self.timed.append(tm.NoMerge())
            return latency

        def seconds(variants: Any, chunks: Any, threads: int, rounds: int) -> dict[str, list[float]]:
            merged = variants[1].method
            self.timed.append(merged)
            if (pixels := chunks[0].shape[-1]) > 28:
                return {"baseline": [1.0], "merged": [self.at_pixels.get(pixels, 1.2)]}
            with tm.trace(variants[1].run, detail=False) as t:
                variants[1].run(torch.cat(chunks))
            tokens = [float(layer.double().mean()) for layer in t.tokens]
            kind = next(k for k in KINDS if ("static=True" in k) == (getattr(merged, "counts", None) is not None))
            ratio = latency.ratio(tokens, kind) * self.error.get(len(chunks[0]), 0.8)
            return {"baseline": [1.0], "merged": [ratio]}

        monkeypatch.setattr(clock_module, "measure_latency", measure)
        monkeypatch.setattr(clock_module, "time_variants", seconds)


def test_a_speedup_is_reached_although_the_prediction_is_off(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeClock(monkeypatch, linear(0.2), error=1.06)
    found = tm.calibrate(model, embedded.load_images("train", 8), speedup=1.25, batch=8, **SAMPLE)
    assert found.goal == "speedup=1.25 (eager, batch 8)"
    assert found.met
    assert found.time is not None
    assert 0.78 <= found.time <= 0.81
    assert "of the time" in found.sentence
    same = tm.calibrate(model, embedded.load_images("train", 8), time=0.8, batch=8, **SAMPLE)
    assert same.method == found.method


def test_images_that_take_longer(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """With thresholds, images differ in time; with static r, they do not."""
    FakeClock(monkeypatch, linear(0.2, static_price=9.0))
    found = tm.calibrate(model, embedded.load_images("train", 8), time=0.8, batch=8, **SAMPLE)
    assert found.time is not None
    assert found.time_p95 is not None
    assert found.per_image is not None
    assert found.time < found.time_p95 < 1
    assert found.per_image.tokens.shape == (8, 12)
    assert f"(95 % of the images: at most {found.time_p95:.1%})" in found.sentence
    FakeClock(monkeypatch, linear(9.0, static_price=0.2))
    static = tm.calibrate(model, embedded.load_images("train", 8), time=0.8, batch=8, **SAMPLE)
    assert static.time_p95 == static.time
    assert "95 %" not in static.sentence


def test_dear_layers_are_few(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the cheaper batch rule wins."""
    layers = []
    for price in (0.01, 1.5):
        FakeClock(monkeypatch, linear(price))
        found = tm.calibrate(model, embedded.load_images("train", 8), time=0.75, batch=8, **SAMPLE)
        layers.append(sum(pairs > 0.5 for pairs in found.pairs))
    assert layers[0] > layers[1] <= 2
    FakeClock(monkeypatch, linear(1.5, static_price=0.01))
    found = tm.calibrate(model, embedded.load_images("train", 8), time=0.75, batch=8, **SAMPLE)
    assert isinstance(found.method, tm.ATM)
    assert found.method.counts is not None


def test_nothing_slower_than_the_baseline_is_returned(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeClock(monkeypatch, linear(30.0))
    found = tm.calibrate(model, embedded.load_images("train", 8), speedup=2, batch=8, **SAMPLE)
    assert not found.met
    assert found.time is not None
    assert found.time <= 1
    assert sum(found.pairs) == 0
    assert "slower than the baseline at batch 8, and at larger batches, too, up to images of 84 pixels" in found.sentence
    fake.at_pixels[56] = 0.9
    again = tm.calibrate(model, embedded.load_images("train", 8), speedup=2, batch=8, **SAMPLE)
    assert "with images of 56 pixels it pays" in again.sentence
    fake.error[32] = 0.1
    again = tm.calibrate(model, embedded.load_images("train", 8), speedup=2, batch=8, **SAMPLE)
    assert "it pays from batch 32" in again.sentence


def test_a_run_resumes_without_timing_again(model: nn.Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeClock(monkeypatch, linear(0.2), error=1.06)
    images = embedded.load_images("train", 8)
    first = tm.calibrate(model, images, speedup=1.25, batch=8, resume=tmp_path, **SAMPLE)
    assert fake.timed
    fake.timed.clear()
    again = tm.calibrate(model, images, speedup=1.25, batch=8, resume=tmp_path, **SAMPLE)
    assert not fake.timed
    assert again.method == first.method
    with pytest.raises(ValueError, match=r"timings\.jsonl: timings of another model, other images or options"):
        tm.calibrate(model, images, speedup=1.25, batch=4, resume=tmp_path, **SAMPLE)


def test_what_cannot_be_timed_is_refused(model: nn.Module) -> None:
    images = embedded.load_images("train", 8)
    with pytest.raises(ValueError, match="unknown runtime 'tpu'; known: eager"):
        tm.calibrate(model, images, speedup=1.2, runtime="tpu", **SAMPLE)
    with pytest.raises(ValueError, match="batch must be 1 or more"):
        tm.calibrate(model, images, speedup=1.2, batch=0, **SAMPLE)
    with pytest.raises(ValueError, match="time must be a number"):
        tm.calibrate(model, images, time=0.0)


def test_a_real_clock(model: nn.Module) -> None:
    """Against itself, and against a baseline that runs three times."""
    clock = Clock(model, torch.cat([b.images for b in embedded.load_images("train", 8).batches(8)]), batch=4, rounds=3)
    assert len(clock.chunks) == 2
    assert 0.5 < clock.time_ratio(tm.NoMerge(last_layer="full")) < 2
    clock._runs[repr(None)] = lambda x: (model(x), model(x), model(x))
    assert clock.time_ratio(tm.NoMerge()) < 0.6
