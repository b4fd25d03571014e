"""A canary on the embedded model: what it samples, counts, promises and does when it rings."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import uvicorn
from scipy import stats
from torch import Tensor

import tokenmerge as tm
from examples.canary import make_app
from tokenmerge.calibration.clock import Clock
from tokenmerge.data import embedded
from tokenmerge.deployment.canary import DriftTest
from tokenmerge.engine.trace import count_tokens

STRONG = tm.ToMe(22)


@pytest.fixture(scope="module")
def x() -> Tensor:
    return next(iter(embedded.load_images("test", 256).batches(256))).images


def merged(method: tm.Method = STRONG) -> Any:
    return tm.apply(embedded.load_model(), method)


@pytest.fixture(scope="module")
def baseline(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return embedded.load_model()(x)


def test_it_returns_what_the_model_returns_and_counts_what_changed(x: Tensor, baseline: Tensor) -> None:
    model = merged()
    with torch.inference_mode():
        expected = model(x)
    canary = tm.Canary(model, fraction=1.0, promise=0.5, background=False)
    assert torch.equal(canary(x), expected)
    found = canary.metrics()
    assert found["images"] == found["sampled"] == 256
    assert found["disagreements"] == int((expected.argmax(1) != baseline.argmax(1)).sum()) > 0
    assert found["disagreement_low"] < found["disagreements"] / 256 < found["disagreement_high"]
    assert 0 < found["mean_distance"] < 0.1
    assert found["alarm"] == 0


def test_the_same_images_are_sampled_each_time(x: Tensor) -> None:
    canary = tm.Canary(merged(), fraction=0.2, background=False)
    chosen, ties = canary._choose(x)
    assert canary._choose(x) == (chosen, ties)
    assert [i for i in range(256) if canary._choose(x[i : i + 1])[0]] == chosen, "whatever batch they are in"
    assert stats.binom.cdf(len(chosen), 256, 0.2) > 0.001 < stats.binom.sf(len(chosen), 256, 0.2)
    assert stats.kstest(ties, "uniform").pvalue > 0.001


def test_it_rings_once_and_falls_back_to_the_baseline(x: Tensor, baseline: Tensor) -> None:
    """A promise that this config cannot keep, on real images and on shifted ones."""
    alarms: list[tm.Alarm] = []
    canary = tm.Canary(merged(), 1.0, 0.999, on_alarm=alarms.append, fallback=True, background=False)
    shifted = torch.cat((x, x + 0.8 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)), -x))
    for batch in shifted.split(32):
        canary(batch)
        if alarms:
            break
    assert [alarm.kind for alarm in alarms] == ["predictions"]
    assert "promised were at most 0.10%" in alarms[0].message
    assert canary.falling_back
    with torch.inference_mode():
        torch.testing.assert_close(canary(x), baseline, atol=0, rtol=0)
    canary(shifted[:64])
    assert len(alarms) == 1
    silent = tm.Canary(merged(), 1.0, 0.999, background=False)
    with pytest.warns(RuntimeWarning, match="canary: .* sampled predictions changed"):
        silent(shifted)


def test_drift_of_the_tokens_left(x: Tensor) -> None:
    method = tm.ATM(0.98, 0.04, 0.84, batch="each")
    model = merged(method)
    with torch.inference_mode(), tm.trace(model, detail=False) as t:
        model(x[:128])
    expected = tm.Canary.tokens_left(t)
    assert len(set(expected)) > 5
    with torch.inference_mode(), count_tokens(model) as counter:
        model(x[:64])
        model(x[64:128])
    assert torch.cat(counter.calls).tolist() == expected
    alarms: list[tm.Alarm] = []

    def watch() -> tm.Canary:
        return tm.Canary(model, 1e-9, on_alarm=alarms.append, background=False, expected_tokens=expected)

    canary = watch()
    for batch in x[128:].split(16):
        canary(batch)
    assert not alarms
    assert canary.metrics()["drift_evidence"] < 20
    noisy = x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    for batch in noisy.split(16):
        canary(batch)
    assert [alarm.kind for alarm in alarms] == ["drift"]
    assert not canary.falling_back


def test_drift_rings_falsely_in_one_of_twenty_streams_at_the_most() -> None:
    rng = np.random.default_rng(0)
    alarms = found = 0
    delays = []
    for _ in range(200):
        first, stream = rng.poisson(60, 64).tolist(), rng.poisson(60, 400).tolist()
        test = DriftTest(first, 0.05)
        for value in stream:
            test.add(value, rng.random())
        alarms += test.alarm
        test = DriftTest(first, 0.05)
        for n, value in enumerate(rng.poisson(66, 400).tolist()):
            test.add(value, rng.random())
            if test.alarm:
                found += 1
                delays.append(n)
                break
    assert alarms <= stats.binom.ppf(0.999, 200, 0.05)
    assert found > 180
    assert median(delays) < 60


def test_state_goes_on_where_it_was(x: Tensor) -> None:
    model = merged()
    options: dict[str, Any] = {"background": False, "expected_tokens": [5, 6, 7], "on_alarm": lambda alarm: None}
    whole, first = (tm.Canary(model, 1.0, 0.9, **options) for _ in range(2))
    whole(x)
    first(x[:100])
    state = json.loads(json.dumps(first.state()))
    second = tm.Canary(model, 1.0, 0.9, **options, state=state)
    second(x[100:])
    assert second.metrics() == pytest.approx(whole.metrics())
    with pytest.raises(ValueError, match="of another config or promise"):
        tm.Canary(model, 1.0, 0.95, state=state)
    with pytest.raises(ValueError, match="state of a canary, version 7"):
        tm.Canary(model, 1.0, 0.9, state=state | {"version": 7})


def test_what_it_refuses(x: Tensor) -> None:
    with pytest.raises(ValueError, match="apply\\(model, method\\) first"):
        tm.Canary(embedded.load_model())
    for options in ({"fraction": 0.0}, {"fraction": 1.5}, {"promise": 1.0}, {"confidence": 0.0}):
        with pytest.raises(ValueError, match="must be a number between 0 and 1"):
            tm.Canary(merged(), **options)  # type: ignore[arg-type]
    features = embedded.load_model()
    features.head = torch.nn.Identity()
    with pytest.raises(ValueError, match="compares predicted classes"):
        tm.Canary(tm.apply(features, STRONG))


def test_prometheus_text(x: Tensor) -> None:
    canary = tm.Canary(merged(), 1.0, 0.5, background=False)
    canary(x[:32])
    text = canary.prometheus().decode()
    assert "tokenmerge_canary_images 32.0" in text
    assert "# TYPE tokenmerge_canary_disagreements gauge" in text


def test_eight_threads_share_a_canary(x: Tensor) -> None:
    """Counts are exact, and a slow worker drops samples, never requests, and holds a bounded number of them."""
    model = merged(tm.ToMe(22))
    canary = tm.Canary(model, 1.0, 0.5, waiting=10**6)
    with torch.inference_mode():
        expected = model(x[:16])
    wrong = [0] * 8

    def work(i: int) -> None:
        for _ in range(20):
            wrong[i] += not torch.equal(canary(x[2 * i : 2 * i + 2]), expected[2 * i : 2 * i + 2])

    with torch.inference_mode():
        expected = torch.cat([model(x[i : i + 2]) for i in range(0, 16, 2)])
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    canary.flush()
    found = canary.metrics()
    assert sum(wrong) == 0
    assert found["images"] == found["sampled"] == 8 * 20 * 2
    assert found["dropped"] == 0
    canary.close()

    slow = tm.Canary(model, 1.0, 0.5, waiting=4)
    check, hold = slow._check, threading.Event()
    slow._check = lambda *sample: (hold.wait(), check(*sample))[1]  # type: ignore[method-assign, func-returns-value]
    began = time.perf_counter()
    for _ in range(30):
        slow(x[:2])
    assert time.perf_counter() - began < 20
    assert slow._queue.qsize() == 4
    assert slow.metrics()["dropped"] >= 2 * (30 - 6)
    hold.set()
    slow.close()
    found = slow.metrics()
    assert found["sampled"] + found["dropped"] == found["images"] == 60


def test_optimize_keeps_what_a_canary_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "solve", lambda clock, cls, *goal: cls(8))  # timing ToMe is not what is tested
    model, images = embedded.load_model(), embedded.load_images("test", 24)
    outcome = tm.optimize(model, images, tmp_path, name="embedded", gmacs=0.6, sample=12, rounds=0)
    about = tm.load_about(tmp_path / "reduction.json")
    assert about["model"] == "embedded"
    assert len(about["tokens_left"]) == 12
    assert about["gmacs_ratio"] == outcome.calibration.ratio
    assert tm.load(tmp_path / "reduction.json") == outcome.calibration.method
    seen, _ = images.split(12, 0)
    with torch.inference_mode(), tm.trace(tm.apply(model, outcome.calibration.method), detail=False) as t:
        for batch in seen.batches(12):
            model(batch.images)
    assert sorted(tm.Canary.tokens_left(t)) == sorted(about["tokens_left"])
    tm.save(tm.ToMe(3), tmp_path / "plain.json")
    assert tm.load_about(tmp_path / "plain.json") == {}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_serves_predictions_and_metrics_on_loopback() -> None:
    """A real server and a real client."""
    server = uvicorn.Server(uvicorn.Config(make_app(fraction=1.0), host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        port = server.servers[0].sockets[0].getsockname()[1]
        images = embedded.load_images("test", 8)
        batch = next(iter(images.batches(8))).images
        pixels = (torch.stack([images.denormalise(image)[0] for image in batch]) * 255).round().byte()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            labels = [client.post("/predict", content=one.numpy().tobytes()).json()["label"] for one in pixels]
            assert client.post("/predict", content=b"123").status_code == 422
            for _ in range(100):
                text = client.get("/metrics").text
                if "tokenmerge_canary_sampled 8.0" in text:
                    break
                time.sleep(0.1)
        assert "tokenmerge_canary_images 8.0" in text
        assert "tokenmerge_canary_sampled 8.0" in text
        with torch.inference_mode():
            expected = tm.apply(embedded.load_model(), tm.ATM(0.98, 0.04, 0.84, batch="each"))(batch).argmax(1)
        assert labels == expected.tolist()
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.slow
def test_eight_threads_times_500_calls_and_what_a_call_costs(x: Tensor) -> None:
    """Counts are exact under load; requests whose images are not sampled take as long as without a canary."""
    model = merged(tm.ToMe(22))
    canary = tm.Canary(model, 0.2, 0.5, waiting=8)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: [canary(x[i : i + 1]) for _ in range(500)], range(8)))
    canary.flush()
    found = canary.metrics()
    assert found["images"] == 8 * 500
    chosen = sum(bool(canary._choose(x[i : i + 1])[0]) for i in range(8))
    assert found["sampled"] + found["dropped"] == chosen * 500
    canary.close()
    quiet = tm.Canary(model, 1e-9, 0.9)
    ratios = []
    with torch.inference_mode():
        for _ in range(300):
            times = []
            for run in (model, quiet):
                began = time.perf_counter()
                run(x[:8])
                times.append(time.perf_counter() - began)
            ratios.append(times[1] / times[0])
    assert median(ratios) < 1.05
