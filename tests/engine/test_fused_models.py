"""Whole models with the fused kernels: when they run, how many calls they make, threads and processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import tokenmerge as tm
from tests.contract.table import CONFIGS, PAIRS, batch, build, output
from tokenmerge.core import fused
from tokenmerge.core.fused import use_fused
from tokenmerge.data import embedded

pytest.importorskip("numba", reason="the CPU kernels need numba")

# As `optimize` ships it.
SHIPPED = tm.ATM(0.98, 0.04, 0.84, batch="each", metric="tokens", size_weight=0.25, attention_weight=0.5)
FUSED = ("atm-mean", "atm-each", "tome", "topr", "constant", "atm-tokens", "atm-no-prop", "atm-weighted", "atm-attended",
         "atm-counts")  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that were called."""
    kernels = fused._kernels()
    names: list[str] = []

    class Counted:
        def __init__(self, device: str = "cpu") -> None:
            assert device == "cpu"

        def __getattr__(self, name: str) -> Any:
            found = getattr(kernels, name)
            if name not in ("prepare", "choose", "merge_rows"):
                return found
            return lambda *args: (names.append(name), found(*args))[1]

    monkeypatch.setattr(fused, "_kernels", Counted)
    return names


def embedded_batch(count: int) -> Tensor:
    return next(embedded.load_images("test", count).batches(count)).images


@pytest.mark.parametrize(("name", "method"), [pair for pair in PAIRS if pair[1] in FUSED])
def test_equals_the_reference(name: str, method: str, calls: list[str]) -> None:
    model, x = tm.apply(build(name), CONFIGS[method]), batch(name, 3)
    with torch.inference_mode():
        found = output(model(x))
        assert calls
        calls.clear()
        with use_fused(False):
            expected = output(model(x))
    assert not calls
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


# Operators that compute nothing: a copy would show as `copy_`, below its `to`.
VIEWS = {"empty", "as_strided", "mT", "transpose", "slice", "detach", "to", "resolve_conj", "resolve_neg", "resize_"}


@pytest.mark.parametrize("images", [1, 8])
@pytest.mark.parametrize("method", [tm.ToMe(4), tm.TopR(4), tm.ATM(0.98, 0.04, 0.84), SHIPPED], ids=repr)
def test_three_kernels_and_one_product_per_merging_layer(
    method: tm.Method, images: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = tm.apply(embedded.load_model(), method), embedded_batch(images)
    layers: list[tuple[Any, Any]] = []
    merge = fused.select_and_merge
    monkeypatch.setattr(fused, "select_and_merge", lambda *args: (layers.append(args), merge(*args))[1])
    with torch.inference_mode():
        model(x)
        assert len(layers) >= 3
        for layer in layers:
            calls.clear()
            with torch.profiler.profile() as profile:
                merge(*layer)
            assert calls in (["prepare", "choose", "merge_rows"], ["prepare", "choose"])  # the second where nothing merges
            operators = [e.name.removeprefix("aten::") for e in profile.events() if e.name.startswith("aten::")]
            assert [name for name in operators if name not in VIEWS] == ["bmm"]


def test_the_reference_runs_where_it_must(calls: list[str]) -> None:
    model, x = tm.apply(embedded.load_model(), tm.ATM(0.98, 0.04, 0.84)), embedded_batch(2)

    def ran() -> bool:
        found = bool(calls)
        calls.clear()
        return found

    model(x).sum().backward()
    assert not ran()  # gradients
    with torch.inference_mode():
        model(x)
        assert ran()
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
        assert not ran()
        with use_fused(False):
            model(x)
        assert not ran()
        model.train()(x)
        assert not ran()
        model.eval()
    with torch.no_grad():
        model.double()(x.double())
        assert not ran()
        model.float()
        model(x)
        assert ran()
        with torch.utils.flop_counter.FlopCounterMode(display=False):
            model(x)
        assert not ran()
        torch.export.export(model, (x,))
        assert not ran()
    model.requires_grad_(False)(x)
    assert ran()  # nothing needs a gradient


def test_threads_share_the_kernels() -> None:
    """8 threads × 200 calls give what one thread gives."""
    model = tm.apply(build("cls"), CONFIGS["atm-attended"])
    inputs = [batch("cls", 1 + i % 3, seed=i) for i in range(8)]
    with torch.inference_mode():
        expected = [output(model(x)) for x in inputs]

    def work(i: int) -> int:
        with torch.inference_mode():
            return sum(not torch.equal(output(model(inputs[i])), expected[i]) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) == 0


class Features(Dataset[Tensor]):
    """Runs a merged model in the workers of a DataLoader."""

    def __init__(self) -> None:
        self.model = tm.apply(build("cls"), CONFIGS["atm-attended"])

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        with torch.inference_mode():
            return output(self.model(batch("cls", 1, seed=index)))[0].clone()


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader(start: str) -> None:
    """The kernels run in this process first, and then in its workers."""
    dataset = Features()
    expected = torch.stack([dataset[i] for i in range(6)])
    context = multiprocessing.get_context(start)
    found = torch.cat(list(DataLoader(dataset, 2, num_workers=2, multiprocessing_context=context)))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_without_numba_everything_works(tmp_path: Path) -> None:
    """The same predictions, and `bench` says once what to install."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n\n\nclass Hidden:\n    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numba':\n            raise ModuleNotFoundError(name)\n\n\nsys.meta_path.insert(0, Hidden())\n"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    args = ["bench", "embedded", "--batch-size", "1", "--timing-rounds", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "tokenmerge", *args], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stderr.count("pip install 'tokenmerge[fast]'") == 1
    assert '"speedup"' in done.stdout
