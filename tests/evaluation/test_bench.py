"""The benchmark as a tool: what it writes and counts. Speeds themselves are in docs/speed.md; a busy machine proves none."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tokenmerge as tm
from tests.helpers import cli
from tokenmerge.core.matching import assign_mean, best_pairs, split_alternate
from tokenmerge.core.tokens import Tokens, merge
from tokenmerge.data import embedded
from tokenmerge.evaluation import bench
from tokenmerge.evaluation.bench import peak_mb


def test_bench_writes_table_csv_and_plot(tmp_path: Path) -> None:
    args = ["bench", "--method", "ToMe(r=16)", "--method", "ATM(0.98, 0.05, 0.8, batch='each')", "--timing-rounds", "2"]
    done = cli(*args, "--batch-size", "1", "--batch-size", "4", "--threads", "1", "--json", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(r["method"].partition("(")[0], r["batch"]) for r in rows] == [
        (name, batch) for batch in (1, 4) for name in ("baseline", "ToMe", "ATM")
    ]
    for row in rows:
        assert row["tokens"] == 197
        assert row["low"] <= row["milliseconds"] <= row["high"]
    assert rows[0]["speedup"] == rows[0]["macs_ratio"] == 1
    assert rows[1]["macs_ratio"] > 1.5
    assert 0 < rows[1]["matching_share"] < 1
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert [Path(f).suffix for f in files] == [".csv", ".png"]
    assert f"torch-{torch.__version__.partition('+')[0]}" in files[0]
    assert len(list(csv.DictReader((tmp_path / "out" / files[0]).read_text().splitlines()))) == 6


class KnownTimes:
    """In place of `seconds_of`: known seconds per batch, by method; the second round is disturbed for all alike."""

    SECONDS = {"VisionTransformer": 4.0, "ToMe": 2.0, "EViT": 8.0}  # noqa: RUF012

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, run: nn.Module, chunks: Sequence[Tensor], threads: int) -> float:
        self.calls += 1
        disturbed = 3 < self.calls <= 6  # of three variants and four rounds, the first of which warms up
        plan = getattr(run, "_tokenmerge", None)
        name = "VisionTransformer" if plan is None else type(plan.method).__name__
        return self.SECONDS[name] * len(chunks) * (10 if disturbed else 1)


def test_speedups_and_efficiency_of_known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "seconds_of", times := KnownTimes())
    model, images = embedded.load_model(), embedded.load_images("test", 4)
    baseline, tome, evit = tm.bench(model, images, [tm.ToMe(16), tm.EViT(0.99)], batch_sizes=[2], rounds=3)
    assert times.calls == 3 * 4
    assert (baseline.speedup, tome.speedup, evit.speedup) == (1, 2, 0.5)
    assert (baseline.milliseconds, tome.milliseconds, evit.milliseconds) == (4000, 2000, 8000)
    assert tome.images_per_second == 1
    assert tome.macs_ratio > 1.5
    assert tome.efficiency == pytest.approx(2 / tome.macs_ratio)
    assert evit.efficiency == pytest.approx(0.5 / evit.macs_ratio)


def test_bench_leaves_the_model_as_it_was_and_times_other_runtimes() -> None:
    model = embedded.load_model()
    model.blocks = model.blocks[:3]
    tm.apply(model, tm.ToMe(4))
    timings = tm.bench(
        model, embedded.load_images("test", 4), [tm.ToMe(r=8)], batch_sizes=[2], rounds=1, runtimes=["eager", "onnxruntime"]
    )
    assert [(t.runtime, t.method) for t in timings] == [
        (runtime, method) for runtime in ("eager", "onnxruntime") for method in ("baseline", "ToMe(r=8)")
    ]
    with tm.trace(model, detail=False) as t:
        model(next(embedded.load_images("test", 1).batches(1)).images)
    assert int(t.tokens[0]) == 193


@pytest.mark.parametrize("method", [tm.ATM(1.0, 0.02, 0.945), tm.ATM(1.0, 0.02, 0.945, batch="each"), tm.ToMe(8)], ids=repr)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_merging_needs_no_more_memory_than_the_baseline(method: tm.Method, batch: int) -> None:
    model = embedded.load_model()
    x = next(embedded.load_images("test", batch).batches(batch)).images
    with torch.inference_mode():
        baseline = peak_mb(model, x)
        tm.apply(model, method)
        assert peak_mb(model, x) <= baseline * 1.001


def test_matching_4097_tokens_takes_little_memory() -> None:
    """1,024 pixels, patch 16: under 200 MB beyond the tokens themselves, and it does not grow with the square of N."""
    peaks = {}
    for n in (4097, 8193):
        tokens = Tokens.start(torch.randn(1, n, 192))
        keys = torch.randn(1, n, 64)

        def match(x: torch.Tensor, tokens: Tokens = tokens, keys: torch.Tensor = keys) -> Tokens:
            pairs = best_pairs(keys, split_alternate(tokens, 1))
            assert pairs is not None
            decision = assign_mean(tokens, 1, pairs, 0.3)
            assert decision is not None
            return merge(tokens, decision)

        peaks[n] = peak_mb(match, tokens.x)
    assert peaks[4097] < 200
    assert peaks[8193] < 2 * peaks[4097]
