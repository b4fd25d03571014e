"""The benchmark as a tool: what it writes and counts. Speeds themselves are in docs/speed.md; a busy machine proves none."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import tokenmerge as tm
from tests.integration.test_embedded_and_cli import cli
from tokenmerge import embedded
from tokenmerge.benchmarking import peak_mb
from tokenmerge.joining import join_mean
from tokenmerge.matching import best_pairs, split_alternate
from tokenmerge.tokens import Tokens, merge


def test_bench_writes_table_csv_and_plot(tmp_path: Path) -> None:
    args = ["bench", "--method", "ToMe(r=16)", "--method", "ATM(0.98, 0.05, 0.8, batch='each')", "--rounds", "2"]
    done = cli(*args, "--batch-size", "1", "--batch-size", "4", "--threads", "1", "--json", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(r["method"].partition("(")[0], r["batch"]) for r in rows] == [
        (name, batch) for batch in (1, 4) for name in ("unmerged", "ToMe", "ATM")
    ]
    for row in rows:
        assert row["tokens"] == 197
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["macs_ratio"])
        assert row["low"] <= row["milliseconds"] <= row["high"]
    assert rows[0]["speedup"] == rows[0]["macs_ratio"] == 1
    assert rows[1]["macs_ratio"] > 1.5
    assert 0 < rows[1]["matching_share"] < 1
    files = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert [Path(f).suffix for f in files] == [".csv", ".png"]
    assert f"torch-{torch.__version__.partition('+')[0]}" in files[0]
    assert len(list(csv.DictReader((tmp_path / "out" / files[0]).read_text().splitlines()))) == 6


def test_bench_leaves_the_model_as_it_was_and_times_other_runtimes() -> None:
    model = embedded.load_model()
    model.blocks = model.blocks[:3]
    tm.apply(model, tm.ToMe(4))
    timings = tm.bench(
        model, embedded.load_images("test", 4), [tm.ToMe(r=8)], batch_sizes=[2], rounds=1, runtimes=["eager", "onnxruntime"]
    )
    assert [(t.runtime, t.method) for t in timings] == [
        (runtime, method) for runtime in ("eager", "onnxruntime") for method in ("unmerged", "ToMe(r=8)")
    ]
    with tm.trace(model, detail=False) as t:
        model(next(embedded.load_images("test", 1).batches(1)).images)
    assert int(t.tokens[0]) == 193


@pytest.mark.parametrize("method", [tm.ATM(1.0, 0.02, 0.945), tm.ATM(1.0, 0.02, 0.945, batch="each"), tm.ToMe(8)], ids=repr)
@pytest.mark.parametrize("batch", [1, 4, 16])
def test_merging_needs_no_more_memory_than_the_unmerged_model(method: tm.Method, batch: int) -> None:
    model = embedded.load_model()
    x = next(embedded.load_images("test", batch).batches(batch)).images
    with torch.inference_mode():
        unmerged = peak_mb(lambda: model(x), x.device)
        tm.apply(model, method)
        assert peak_mb(lambda: model(x), x.device) <= unmerged * 1.001


def test_matching_4097_tokens_takes_little_memory() -> None:
    """1,024 pixels, patch 16: under 200 MB beyond the tokens themselves, and it does not grow with the square of N."""
    peaks = {}
    for n in (4097, 8193):
        tokens = Tokens.start(torch.randn(1, n, 192))
        keys = torch.randn(1, n, 64)

        def match(tokens: Tokens = tokens, keys: torch.Tensor = keys) -> Tokens:
            pairs = best_pairs(keys, split_alternate(tokens, 1))
            assert pairs is not None
            move = join_mean(tokens, 1, pairs, 0.3)
            assert move is not None
            return merge(tokens, move)

        peaks[n] = peak_mb(match, tokens.x.device)
    assert peaks[4097] < 200
    assert peaks[8193] < 2 * peaks[4097]
