"""int8 files: what is quantised, what stays in float, layers given back, the simulation, and files as configs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
from onnx import numpy_helper
from scipy import stats
from torch import Tensor, nn

import tokenmerge as tm
from tests.helpers import cli
from tokenmerge.calibration import chain
from tokenmerge.data import embedded
from tokenmerge.deployment import int8 as int8_module
from tokenmerge.deployment.int8 import Int8, check_quantised, smooth
from tokenmerge.deployment.int8_simulation import simulate_int8
from tokenmerge.deployment.model_file import ModelFile
from tokenmerge.deployment.targets.onnx import Onnx
from tokenmerge.utils import environment

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

STATIC_R = tm.ATM(counts=[20, 10, 0], split_layer=1)
EACH = tm.ATM(thresholds=[0.9, 0.8, 1.0], split_layer=1, batch="each")
SUFFIX = {"onnx": ".onnx", "openvino": ".xml"}


def shortened() -> Any:
    """The first three blocks of the embedded model."""
    found: Any = embedded.load_model()
    found.blocks = found.blocks[:3]
    return found


@pytest.fixture(scope="module")
def images() -> Tensor:
    return next(tm.load_images("embedded").batches(96)).images


@pytest.fixture(scope="module")
def float_file(images: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("float") / "model.onnx"
    tm.export(shortened(), EACH, images[:16], path, to="onnx")
    return path


@pytest.fixture(scope="module")
def int8_file(images: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "model.onnx"
    tm.export(shortened(), EACH, images[:32], path, to="onnx", int8=Int8(full_range=True))
    return path


def plain_onnxruntime(path: Path, x: Tensor) -> Tensor:
    """As a user runs it, without anything of ours."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def plain_openvino(path: Path, x: Tensor) -> Tensor:
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return torch.from_numpy(compiled({"images": x.numpy()})["logits"].copy())


def check_openvino(path: Path) -> None:
    """Only weighted products are quantised."""
    graph = openvino.Core().read_model(path)

    def constant(node: Any) -> bool:
        return node.get_type_name() == "Constant" or (
            node.get_input_size() > 0 and all(constant(node.input_value(i).get_node()) for i in range(node.get_input_size()))
        )

    fakes = [op for op in graph.get_ops() if op.get_type_name() == "FakeQuantize"]
    assert len(fakes) > 10
    for fake in fakes:
        for reader in fake.output(0).get_target_inputs():
            node = reader.get_node()
            assert node.get_type_name() in ("MatMul", "Convolution"), node.get_friendly_name()
            assert any(constant(node.input_value(i).get_node()) for i in range(2))
    small = {str(op.get_element_type()) for op in graph.get_ops() if op.get_type_name() == "Constant"}
    assert any("8" in name for name in small), small


PLAIN = {"onnx": plain_onnxruntime, "openvino": plain_openvino}


@pytest.mark.parametrize(
    ("to", "mode", "method"),
    [
        ("onnx", "static", EACH),
        ("onnx", "dynamic", STATIC_R),
        ("openvino", "static", EACH),
        ("onnx", "weights", STATIC_R),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("onnx", "static", STATIC_R),
                ("onnx", "dynamic", EACH),
                ("onnx", "weights", EACH),
                ("openvino", "weights", STATIC_R),
                ("openvino", "static", STATIC_R),
                ("openvino", "weights", EACH),
            )
        ),
    ],
)
def test_files_run_in_plain_runtimes_with_any_batch_size(
    to: str, mode: Any, method: tm.Method, images: Tensor, tmp_path: Path
) -> None:
    model, path = shortened(), tmp_path / f"model{SUFFIX[to]}"
    made = tm.export(model, method, images[:32], path, to=to, int8=Int8(mode))
    assert made.int8 is not None
    with torch.inference_mode():
        expected = tm.apply(model, method)(images)
    for size in (1, 5, 32):
        found = PLAIN[to](path, images[:size])
        assert found.shape == (size, 10)
        distance = 1 - torch.nn.functional.cosine_similarity(found, expected[:size])
        assert distance.mean() < 0.01
    assert not torch.equal(found, expected[:32])
    left_out = {"dynamic": {"patch_embed.proj", "head"}}.get(mode, set())
    layers = {f"blocks.{i}.{name}" for i in range(2) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert layers | ({"patch_embed.proj", "head"} - left_out) <= set(made.int8.quantised)
    record = json.loads((tmp_path / f"{path.name}.json").read_text())
    assert record["int8"]["mode"] == mode
    if (to, mode) == ("openvino", "static"):
        check_openvino(path)
    assert set(tmp_path.iterdir()) == {path, path.with_name(f"{path.name}.json"), *tmp_path.glob("*.bin")}


def test_nothing_of_matching_and_merging_reads_int8_values(float_file: Path, int8_file: Path) -> None:
    """Products are named after the module that computes them: those of attention and matching belong to no linear layer."""
    plain, graph = onnx.load(float_file).graph, onnx.load(int8_file).graph
    constants = {value.name for value in graph.initializer}
    produced = {name: node for node in graph.node for name in node.output}
    readers = [n for n in graph.node if any(produced[i].op_type == "DequantizeLinear" for i in n.input if i in produced)]
    assert len(readers) > 10
    for node in readers:
        assert node.op_type in ("MatMul", "Gemm", "Conv")
        weights = produced[node.input[1]]
        assert weights.op_type == "DequantizeLinear"
        assert weights.input[0] in constants, "a product of two computed values is one of attention or matching"
    assert sorted(check_quantised(graph)) == sorted(n.name for n in readers)
    computed = [
        n.name for n in graph.node if n.op_type == "MatMul" and re.fullmatch(r"blocks\.\d+(\.attn)?(\.\d+)?", n.name)
    ]
    assert len(computed) == 3 * 2 + 2, "QKᵀ and AV of three layers, cosines of two"
    assert not set(computed) & {n.name for n in readers}
    # Every other node is as it was.
    before = [n.op_type for n in plain.node]
    after = [n.op_type for n in graph.node if n.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    assert sorted(before) == sorted(after)
    wrong = onnx.GraphProto()
    wrong.CopyFrom(graph)
    quantised = next(n for n in wrong.node if n.op_type == "DequantizeLinear").output[0]
    next(n for n in wrong.node if n.op_type == "Softmax").input[0] = quantised
    with pytest.raises(ValueError, match=r"\(Softmax\) reads int8 values and has no constant weights"):
        check_quantised(wrong)


@pytest.mark.parametrize(("full", "most"), [(True, 127), (False, 64)])
def test_weights_have_seven_bits_where_sums_would_overflow(
    full: bool, most: int, images: Tensor, int8_file: Path, tmp_path: Path
) -> None:
    path = int8_file
    if not full:
        path = tmp_path / "model.onnx"
        tm.export(shortened(), STATIC_R, images[:16], path, to="onnx", int8=Int8(full_range=False))
    weights = [numpy_helper.to_array(v) for v in onnx.load(path).graph.initializer if v.data_type == onnx.TensorProto.INT8]
    largest = max(int(np.abs(w.astype(int)).max()) for w in weights if w.ndim > 1)
    assert most - 2 <= largest <= most


def test_the_cpu_decides_about_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    for features, bits in ((("avx2",), 7), (("avx2", "avx512_vnni"), 8), (("avx2", "avx_vnni"), 8), (("amx_int8",), 8)):
        monkeypatch.setattr(environment, "cpu_features", lambda found=features: found)
        assert Int8().bits == bits


def with_outliers(model: Any, factor: float = 100.0) -> Any:
    """The same function, with a few channels blown up behind every norm of the MLPs: what ruins plain quantisation."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in model.blocks:
            for norm, linear in ((block.norm1, block.attn.qkv), (block.norm2, block.mlp.fc1)):
                channels = torch.randperm(len(norm.weight), generator=generator)[:3]
                norm.weight[channels] *= factor
                norm.bias[channels] *= factor
                linear.weight[:, channels] /= factor
    return model


def test_layers_are_given_back_until_the_goal_is_reached(images: Tensor, tmp_path: Path) -> None:
    model = with_outliers(shortened())
    with torch.inference_mode():
        expected = shortened()(images).argmax(1)
        torch.testing.assert_close(model(images), shortened()(images), atol=1e-3, rtol=1e-3)
    paths = {name: tmp_path / f"{name}.onnx" for name in ("plain", "kept", "smooth")}
    plain = tm.export(model, tm.NoMerge(), images[:64], paths["plain"], to="onnx", int8=True).int8
    assert plain is not None
    assert plain.agreement is not None
    assert plain.agreement < 0.9
    kept = tm.export(model, tm.NoMerge(), images[:64], paths["kept"], to="onnx", int8=Int8(keep=0.98)).int8
    assert kept is not None
    assert 0 < len(kept.given_back) < len(plain.quantised)
    assert set(kept.given_back) | set(kept.quantised) == set(plain.quantised)
    assert any("fc1" in name or "qkv" in name for name in kept.given_back[:3]), "the layers behind the outliers"
    found = plain_onnxruntime(paths["kept"], images).argmax(1)
    assert (found == expected)[:64].double().mean() == kept.agreement >= 0.98
    graph = onnx.load(paths["kept"]).graph
    assert set(check_quantised(graph)) == set(kept.quantised)
    smoothed = tm.export(model, tm.NoMerge(), images[:64], paths["smooth"], to="onnx", int8=Int8(smooth=0.5)).int8
    assert smoothed is not None
    assert smoothed.agreement is not None
    assert smoothed.agreement > plain.agreement + 0.05
    assert "given back to float" in kept.sentence


def test_smoothing_changes_nothing_in_float(float_file: Path, images: Tensor, tmp_path: Path) -> None:
    graph = onnx.load(float_file)
    quantiser = int8_module.Quantiser(tmp_path_copy(float_file, tmp_path), images[:16], Int8())
    ranges = quantiser._channel_ranges(graph)
    before = {v.name: numpy_helper.to_array(v).copy() for v in graph.graph.initializer}
    norms = smooth(graph, ranges, 0.5)
    assert norms == 5, "all but the one before the last layer's queries, which reads a part, and the last"
    assert any((numpy_helper.to_array(v) != before[v.name]).any() for v in graph.graph.initializer)
    onnx.save(graph, tmp_path / "smooth.onnx")
    torch.testing.assert_close(
        plain_onnxruntime(tmp_path / "smooth.onnx", images), plain_onnxruntime(float_file, images), atol=1e-4, rtol=1e-4
    )


def tmp_path_copy(path: Path, folder: Path) -> Path:
    copied = folder / path.name
    copied.write_bytes(path.read_bytes())
    return copied


def test_the_simulation_computes_what_a_file_does(images: Tensor, tmp_path: Path) -> None:
    model = shortened()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    path = tmp_path / "model.onnx"
    tm.export(model, STATIC_R, images[:64], path, to="onnx", int8=True)
    simulated = tm.apply(simulate_int8(model, images[:64]), STATIC_R)
    with torch.inference_mode():
        whole = tm.apply(shortened(), STATIC_R)(images)
        found = simulated(images)
    file = plain_onnxruntime(path, images)
    error = (file - whole).norm()
    assert (found - file).norm() < error, "nearer to the file than float is"
    assert 0.7 < (found - whole).norm() / error < 1.4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_calibration_for_int8_measures_the_quantised_model(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its loss is against the float baseline: merging nothing loses what int8 loses."""
    model = with_outliers(shortened(), 30.0)
    plain = tm.calibrate(model, images[:24], gmacs=1.0, sample=24, rounds=0)
    quantised = tm.calibrate(model, images[:24], gmacs=1.0, sample=24, rounds=0, int8=True)
    assert plain.distance == pytest.approx(0, abs=1e-9)
    with torch.inference_mode():
        simulated = simulate_int8(model, images[:24][torch.randperm(24, generator=torch.Generator().manual_seed(0))])
        expected = 1 - torch.nn.functional.cosine_similarity(
            simulated.forward_head(simulated.forward_features(images[:24]), pre_logits=True).double(),
            model.forward_head(model.forward_features(images[:24]), pre_logits=True).double(),
        )
    assert quantised.distance == pytest.approx(float(expected.mean()), rel=0.05)
    assert tm.calibrate(model, images[:24], gmacs=0.6, sample=24, rounds=0, int8=True).ratio == pytest.approx(0.6, abs=0.03)
    with pytest.raises(ValueError, match="int8 files do not run in 'eager'; they run in onnxruntime, openvino"):
        tm.calibrate(model, images[:24], speedup=1.2, int8=True)


def test_files_are_validated_and_certified_like_configs(int8_file: Path, images: Tensor) -> None:
    model = shortened()
    file = ModelFile(int8_file)
    found = plain_onnxruntime(int8_file, images)
    with torch.inference_mode():
        expected = model(images)
    changed = int((found.argmax(1) != expected.argmax(1)).sum())
    proof = tm.prove(model, images, file, others={"config": EACH}, batch_size=32)
    assert proof.unchanged == 96 - changed
    assert proof.bound == pytest.approx(
        stats.binomtest(96 - changed, 96, alternative="greater").proportion_ci(0.95, "exact").low, rel=1e-9
    )
    distance = 1 - torch.nn.functional.cosine_similarity(found.double(), expected.double())
    assert proof.distance["mean"] == pytest.approx(float(distance.mean()), abs=1e-9)
    row = proof.results[1]
    assert row.method == EACH
    assert row.gmacs == pytest.approx(proof.results[2].gmacs)
    assert row.file_mb == pytest.approx(int8_file.stat().st_size / 1e6)
    certificate = tm.certify(model, images, [file], level=0.9)
    assert certificate.tested[0].changed == changed
    assert json.loads(json.dumps(certificate.to_dict()))["tested"][0]["method"] == "model.onnx"
    assert certificate.method in (file, None)


def test_bench_times_int8_runtimes(images: Tensor, tmp_path: Path) -> None:
    (baseline, merged) = tm.bench(
        shortened(), images[:8], [STATIC_R], batch_sizes=[4], rounds=1, runtimes=["onnxruntime-int8"]
    )
    assert baseline.runtime == merged.runtime == "onnxruntime-int8"


@pytest.mark.parametrize(
    ("options", "to", "says"),
    [
        (dict(mode="half"), "onnx", "int8 is one of static, dynamic, weights, not 'half'"),
        (dict(keep=1.5), "onnx", "keep must be above 0 and at most 1, not 1.5"),
        (dict(), "pt2", "int8 files of mode 'static' are written to onnx, openvino, not to pt2"),
        (dict(mode="dynamic"), "openvino", "int8 files of mode 'dynamic' are written to onnx, not to openvino"),
        (dict(keep=1.0), "onnx", "keep 1 cannot be reached: in float, too, this config keeps"),
    ],
)
def test_what_is_refused_leaves_nothing(options: dict[str, Any], to: str, says: str, images: Tensor, tmp_path: Path) -> None:
    suffix = {**SUFFIX, "pt2": ".pt2"}[to]
    strong = tm.ATM(counts=[95, 0, 0], split_layer=3)
    with pytest.raises(ValueError, match=says):
        tm.export(shortened(), strong, images, tmp_path / f"model{suffix}", to=to, int8=Int8(**options))
    assert not list(tmp_path.iterdir())


def test_other_bad_input(images: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(ValueError, match=r"export needs images \[n,3,H,W\] to compare and to calibrate with"):
        tm.export(shortened(), STATIC_R, images[:0], path, to="onnx", int8=True)
    with pytest.raises(ValueError, match="images have 3 channels, and this VisionTransformer takes 1"):
        tm.export(shortened(), STATIC_R, torch.randn(4, 3, 28, 28), path, to="onnx", int8=True)
    with pytest.raises(ValueError, match=r"images are \[1, 40, 40\], and this VisionTransformer cannot run on them"):
        tm.export(shortened(), STATIC_R, torch.randn(4, 1, 40, 40), path, to="onnx", int8=True)
    features = shortened()
    features.head = nn.Identity()
    with pytest.raises(ValueError, match="keep compares predicted classes, and this model returns features"):
        tm.export(features, STATIC_R, images[:8], path, to="onnx", int8=Int8(keep=0.5))
    monkeypatch.setattr("tokenmerge.utils.optional.find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(ValueError, match="need onnxruntime, which is not installed"):
        tm.export(shortened(), STATIC_R, images[:8], path, to="onnx", int8=True)
    assert not list(tmp_path.iterdir())


def test_a_graph_without_weights_cannot_be_quantised(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return images.sum((1, 2))

    batch = torch.export.Dim("batch")
    program = torch.export.export(Sum(), (torch.randn(2, 3, 4, 4),), dynamic_shapes=({0: batch},))
    Onnx().write(program, tmp_path / "sum.onnx")
    with pytest.raises(ValueError, match="nothing in this graph has constant weights"):
        int8_module.Quantiser(tmp_path / "sum.onnx", torch.randn(2, 3, 4, 4), Int8())


def test_files_that_are_no_exports(int8_file: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file"):
        ModelFile(tmp_path / "none.onnx")
    alone = tmp_path_copy(int8_file, tmp_path)
    with pytest.raises(ValueError, match=r"model\.onnx\.json is missing"):
        ModelFile(alone)
    for text in ("{", "[]", '{"target": "onnx"}', '{"target": "x", "method": "", "preprocess": false}'):
        (tmp_path / "model.onnx.json").write_text(text)
        with pytest.raises(ValueError, match="not a record of an exported file"):
            ModelFile(alone)
    record = json.loads((int8_file.parent / "model.onnx.json").read_text())
    (tmp_path / "model.onnx.json").write_text(json.dumps(record | {"preprocess": True}))
    with pytest.raises(ValueError, match="takes pixels from 0 to 255; export it without"):
        ModelFile(alone)


def test_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    args = ("export", "embedded", "--method", "ToMe(r=8)", "--out", path)
    assert "--int8-keep and --smooth go with --int8" in cli(*args, "--int8-keep", 0.9).stderr
    done = cli(*args, "--int8", "static")
    assert done.returncode == 0, done.stderr
    assert "int8 (static, " in done.stdout
    done = cli("prove", "embedded", "embedded", "--limit", 64, "--file", path, "--method", "ToMe(r=8)", "--json")
    found = json.loads(done.stdout)
    assert [row["name"] for row in found["results"]] == ["baseline", "this config", str(path)]
    assert found["results"][2]["file_mb"] < 1.1
    assert "give a config (--method) or an exported file (--file)" in cli("prove", "embedded", "embedded").stderr


def test_optimize_writes_four_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "BUDGETS", (0.65, 0.3))
    images = embedded.load_images("test", 24)
    with pytest.raises(ValueError, match="int8 files do not run in 'eager'"):
        tm.optimize(shortened(), images, tmp_path / "none", gmacs=0.8, int8=True)
    assert not (tmp_path / "none").exists()
    outcome = tm.optimize(
        shortened(), images, tmp_path, certify=0.6, sample=12, rounds=0, int8=True, runtime="onnxruntime", batch=4
    )
    names = {"float.onnx", "merged.onnx", "int8.onnx", "merged_int8.onnx"}
    assert names <= {path.name for path in outcome.files}
    assert all(path.exists() for path in outcome.files)
    rows = {row.name: row for row in outcome.proof.results}
    assert rows["file: float"].agreement == 1
    assert rows["file: merged, static r, int8"].file_mb < 0.6 * rows["file: merged, static r"].file_mb  # type: ignore[operator]
    certificate = outcome.certificate
    assert certificate is not None
    assert isinstance(certificate.method, ModelFile), "the statement is about the file that ships"
    assert "file: int8" in (tmp_path / "report.html").read_text()
