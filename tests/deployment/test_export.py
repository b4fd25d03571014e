"""One graph under torch.compile, files for other runtimes, and what refuses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import tokenmerge as tm
from tests.contract.table import METHODS, MODELS, batch, build
from tests.helpers import cli
from tokenmerge.data import embedded
from tokenmerge.deployment.graph import ExportWrapper, export_program
from tokenmerge.deployment.targets import TARGETS
from tokenmerge.deployment.targets.pt2 import Pt2

# torch's exporters and compilers warn of their own deprecations
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

# The second layer matches by size, and finds tokens merged before; the last one has nothing to merge.
MEAN = tm.ATM(thresholds=[0.9, 0.8, 1.0], split_layer=1)
CONFIGS = {
    "mean": MEAN,
    "each": tm.ATM(thresholds=[0.9, 0.8, 1.0], split_layer=1, batch="each"),
    "frozen": tm.ATM(counts=[20, 10, 0], split_layer=1),
    "weighted": tm.ATM(thresholds=[0.9, 0.7, 1.0], batch="each", metric="tokens", size_weight=0.25, attention_weight=0.5),
    "none": tm.NoMerge(),
}
MERGES = ("mean", "each", "weighted")


def open_file(path: Path) -> Callable[[Tensor], Tensor]:
    (target,) = (target for target in TARGETS.values() if target.suffix == path.suffix)
    return target.open(path, threads=1)


@pytest.fixture
def model() -> nn.Module:
    """The first three blocks of the embedded model: real weights, so that thresholds mean something."""
    found = embedded.load_model()
    found.blocks = found.blocks[:3]
    return found


@pytest.fixture(scope="module")
def images() -> Tensor:
    return next(tm.load_images("embedded").batches(32)).images


@pytest.mark.parametrize(
    "name", ["mean", "each", "frozen", *(pytest.param(name, marks=pytest.mark.slow) for name in ("weighted", "none"))]
)
def test_one_graph_for_all_batches(model: nn.Module, images: Tensor, name: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    tm.apply(model, CONFIGS[name])
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    seen = set()
    with torch.no_grad():
        for part in (images[:4], images[4:8], images[8:11], images[11:26], images[26:31]):
            with tm.trace(model) as t:
                expected = model(part)
            seen.add(tuple(float(n.float().mean()) for n in t.tokens))
            torch.testing.assert_close(compiled(part), expected, atol=1e-5, rtol=1e-5)
    assert counter.frame_count == 1
    assert len(seen) > 1 or name not in MERGES  # the batches did merge different numbers


FAMILIES = (
    "hf-beit", "hf-videomae", "hf-msn", "hf-ijepa", "hf-ast", "hf-vitpose", "hf-yolos", "hf-dinov3", "hf-data2vec",
    "hf-blip", "hf-blip2", "timm-beit", "timm-beit-shared", "open-clip", "open-clip-custom", "open-clip-attn-pool",
    "open-clip-lnd", "hub-dinov2", "hub-dinov2-chunks", "hub-dinov3", "post-norm", "eva-post-norm",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in FAMILIES[:2] else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_goes_to_onnx(name: str, tmp_path: Path) -> None:
    made = tm.export(build(name), tm.ToMe(4), batch(name, 4), tmp_path / "merged.onnx", to="onnx")
    assert made.largest < 1e-3
    assert (tmp_path / "merged.onnx").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", "each", "frozen"])
def test_inductor(model: nn.Module, images: Tensor, name: str) -> None:
    """Where two pairs are so similar that rounding decides, the float64 model decides differently, too; a compiler
    cannot be blamed for that."""
    torch._dynamo.reset()
    tm.apply(model, CONFIGS[name])
    compiled, exact = torch.compile(model, fullgraph=True, dynamic=True), copy.deepcopy(model).double()
    decided = 0
    with torch.no_grad():
        for part in (images[:4], images[4:8], images[8:11], images[11:26]):
            expected = model(part)
            if float((exact(part.double()) - expected).abs().max()) < 1e-5:
                torch.testing.assert_close(compiled(part), expected, atol=1e-5, rtol=1e-5)
                decided += 1
    assert decided >= 3


@pytest.mark.parametrize(
    ("name", "to", "merge"),
    [
        ("mean", "onnx", "scatter"),
        ("each", "onnx", "scatter"),
        pytest.param("frozen", "openvino", "matmul", marks=pytest.mark.slow),
        pytest.param("mean", "pt2", "scatter", marks=pytest.mark.slow),
        pytest.param("each", "onnx", "matmul", marks=pytest.mark.slow),
        pytest.param("mean", "openvino", "scatter", marks=pytest.mark.slow),
        pytest.param("frozen", "onnx", "scatter", marks=pytest.mark.slow),
        pytest.param("each", "openvino", "scatter", marks=pytest.mark.slow),
    ],
)
def test_files_compute_what_the_model_does(
    model: nn.Module, images: Tensor, tmp_path: Path, name: str, to: str, merge: str
) -> None:
    path = tmp_path / f"merged{TARGETS[to].suffix}"
    made = tm.export(model, CONFIGS[name], images[:16], path, to=to, merge=merge)  # type: ignore[arg-type]
    assert made.largest < 1e-4
    run, merged = open_file(path), tm.apply(model, CONFIGS[name])
    with torch.no_grad():
        for part in (images[16:17], images[17:22], images[:32]):  # other images and sizes than those it was tried with
            torch.testing.assert_close(run(part), merged(part), atol=1e-4, rtol=1e-4)
    record = json.loads((tmp_path / f"{path.name}.json").read_text())
    assert tm.parse(record["method"]) == CONFIGS[name]
    assert set(record["differences"]) >= {"images, batch 1", "blank, batch 4", "noise, batch 16"}
    extra = {"merged.bin"} if to == "openvino" else set()
    assert {p.name for p in tmp_path.iterdir()} == {path.name, f"{path.name}.json"} | extra


def test_normalisation_in_the_graph(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    mean, std = (embedded.MEAN,), (embedded.STD,)
    tm.export(model, MEAN, images[:16], tmp_path / "m.pt2", to="pt2", normalise=(mean, std))
    pixels = ((images[:8] * embedded.STD + embedded.MEAN) * 255).round().to(torch.uint8)
    torch.testing.assert_close(
        open_file(tmp_path / "m.pt2")(pixels), tm.apply(model, MEAN)(images[:8]), atol=1e-4, rtol=1e-4
    )


FROZEN = tm.ATM(counts=[3, 2, 2, 0])
ALSO = ("hf-vit", "torchvision", "lvvit", "t2t", "registers", "mae-avg", "eva02", "dinov3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name in ALSO for method in (METHODS["atm-mean"], FROZEN)],
)
def test_models_export_to_onnx(name: str, method: tm.Method, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    x = torch.randn(16, *MODELS[name].image)
    assert tm.export(model, method, x, tmp_path / "m.onnx", to="onnx").largest < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_one_graph(name: str) -> None:
    torch.manual_seed(0)
    model = tm.apply(MODELS[name].build().eval(), METHODS["atm-mean"])
    x = torch.randn(5, *MODELS[name].image)
    wrapper = ExportWrapper(model).eval()
    run = export_program(wrapper, x[:3]).module()
    with torch.no_grad():
        for part in (x[:1], x):
            torch.testing.assert_close(run(part), wrapper(part), atol=1e-5, rtol=1e-5)


def test_what_cannot_be_exported_says_why(model: nn.Module, images: Tensor, tmp_path: Path) -> None:
    with pytest.raises(tm.Unsupported, match="lists of merged tokens"):
        tm.export(model, tm.ToFu(4), images, tmp_path / "m.pt2", to="pt2")
    with pytest.raises(ValueError, match=r"end in \.onnx"):
        tm.export(model, MEAN, images, tmp_path / "m.pt2", to="onnx")
    with pytest.raises(ValueError, match="no such folder"):
        tm.export(model, MEAN, images, tmp_path / "no" / "m.pt2", to="pt2")
    assert list(tmp_path.iterdir()) == []


def test_a_mismatch_leaves_no_file(
    model: nn.Module, images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = Pt2.open
    monkeypatch.setattr(Pt2, "open", lambda self, path, threads: lambda x: true(self, path, threads)(x) + 0.01)
    with pytest.raises(ValueError, match=r"differs from the eager model by 0\.01 on images, batch 1"):
        tm.export(model, MEAN, images, tmp_path / "m.pt2", to="pt2")
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path: Path) -> None:
    call = ("export", "embedded", "--method", f"ATM(counts={[0] * 5 + [8] + [0] * 6})", "--out", tmp_path / "m.pt2")
    done = cli(*call, "--to", "pt2")
    assert done.returncode == 0, done.stderr
    assert "differs from the eager model by" in done.stdout
    assert "scatter" in cli(*call, "--merge", "x").stderr
    assert "--layers goes with --freeze" in cli(*call, "--layers", "3").stderr


REAL = [tm.ATM(counts=[0, 4, 8, 10, 12, 14, 16, 14, 12, 10, 8, 0]), tm.ATM(0.98, 0.035, 0.84)]


@pytest.mark.slow
@pytest.mark.parametrize("method", REAL, ids=repr)
def test_real_deit_keeps_its_predictions(deit_tiny: nn.Module, photo_folder: Path, tmp_path: Path, method: tm.ATM) -> None:
    """The table of docs/deployment.md: all photographs, in batches of 16; some in batches of 1 and 4."""
    photos = tm.load_images(photo_folder, deit_tiny, crop=0.875)
    x = torch.cat([batch.images for batch in photos.batches(16)])
    merged = tm.apply(deit_tiny, method)
    parts = [*x.split(16), *x[:40].split(4), *x[:20].split(1)]
    with torch.no_grad():
        expected = [merged(part) for part in parts]
    limits: dict[str, float] = {"pt2": 0.0, "onnx": 1e-4, "openvino": 1e-4}
    for to, limit in limits.items():
        path = tmp_path / f"m{TARGETS[to].suffix}"
        tm.export(deit_tiny, method, x[::20][:16], path, to=to)
        run = open_file(path)
        found = [run(part) for part in parts]
        differences = [float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)]
        print(f"{to}: {max(differences):.1e}")
        assert max(differences) <= limit, to
        assert torch.equal(torch.cat(found).argmax(1), torch.cat(expected).argmax(1))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "lite"])
@pytest.mark.parametrize("method", REAL, ids=repr)
def test_inductor_on_real_deit(deit_tiny: nn.Module, photo_folder: Path, method: tm.ATM, mode: str) -> None:
    """One graph for five batches. Fused kernels round otherwise, as eager float32 itself does from float64; Inductor's lite
    mode calls the eager ones, and differs by nothing."""
    photos = tm.load_images(photo_folder, deit_tiny, crop=0.875)
    x = torch.cat([batch.images for batch in photos.batches(16)])
    torch._dynamo.reset()
    counters.clear()
    merged = tm.apply(deit_tiny, method)
    compiled = torch.compile(merged, fullgraph=True, dynamic=True, mode=mode)
    with torch.no_grad():
        for part in (x[:4], x[4:6], x[6:22], x[22:52], x[52:59]):
            expected = merged(part)
            difference, largest = float((compiled(part) - expected).abs().max()), float(expected.abs().max())
            print(f"{mode}: {difference:.1e} of {largest:.1f} in a batch of {len(part)}")
            assert difference <= (1e-5 if mode == "lite" else 1e-5 * largest)
    assert counters["stats"]["unique_graphs"] == 1
