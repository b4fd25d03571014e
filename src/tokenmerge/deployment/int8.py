"""int8 files: an ONNX graph whose products with constant weights are quantised.

Only MatMul and Gemm with constant weights are. Matching, merging, softmax, norms and the products of attention have none, so
they stay in float. Of the convolution that embeds patches, the weights are quantised, and its input is not: it is the most
sensitive layer for its size. Outputs of products stay in float, too. Other runtimes read the same graph, so there is one
quantisation for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..utils.bisect import bisect_int
from ..utils.environment import int8_features
from ..utils.optional import require_package
from ..utils.progress import Progress, no_progress
from .graph import quiet

Mode = Literal["static", "dynamic", "weights"]
PRODUCTS = ("MatMul", "Gemm")
EMBEDDING = "Conv"  # of which the weights alone are quantised
CHUNK = 8  # images per call while ranges and predictions are measured


@dataclass(frozen=True)
class Int8:
    """How a file is quantised.

    mode: "static" (weights and inputs, with ranges measured on images), "dynamic" (ranges are found in every call; no
        images are needed), or "weights" (weights alone: a smaller file, computed in float).
    keep: give layers back to float, the most sensitive first, until this fraction of the images keeps the prediction that
        the float baseline makes.
    smooth: SmoothQuant's α: moves outliers of the channels behind a norm from the inputs into the weights. Exact in float.
    full_range: weights of 8 bits; 7 bits where sums of products would overflow. Default: as this CPU needs it.
    """

    mode: Mode = "static"
    keep: float | None = None
    smooth: float | None = None
    full_range: bool | None = None

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"int8 is one of {', '.join(get_args(Mode))}, not {self.mode!r}")
        for name in ("keep", "smooth"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value <= 1):
                raise ValueError(f"int8: {name} must be above 0 and at most 1, not {value!r}")

    @property
    def bits(self) -> int:
        """Of the weights."""
        full = bool(int8_features()) if self.full_range is None else self.full_range
        return 8 if full else 7


@dataclass(frozen=True)
class Quantised:
    """What became of the layers."""

    mode: Mode
    bits: int  # of the weights
    quantised: tuple[str, ...]  # products with constant weights, by the module they come from
    given_back: tuple[str, ...]  # those that are float again, the most sensitive first
    agreement: float | None  # with the float baseline, on the calibration images; of models with classes
    distance: float  # mean cosine distance of the outputs to those of the float baseline, on the same images
    images: int

    @property
    def sentence(self) -> str:
        layers = len(self.quantised) + len(self.given_back)
        back = f" ({len(self.given_back)} given back to float)" if self.given_back else ""
        kept = "" if self.agreement is None else f"top-1 agreement {self.agreement:.1%}, "
        return (
            f"int8 ({self.mode}, {self.bits}-bit weights): {len(self.quantised)} of {layers} layers{back}; with the float "
            f"baseline on the {self.images} calibration images: {kept}distance of the outputs {self.distance:.4f}"
        )


class Quantiser:
    """Quantises one float graph, again and again with other layers. `images` [n,…]: as the graph takes them."""

    def __init__(self, source: Path, images: Tensor, options: Int8) -> None:
        require_package("onnxruntime", "int8 files")
        import onnx
        from onnxruntime.quantization.quant_utils import add_pre_process_metadata

        self.options = options
        self.images = images
        self.folder = source.parent
        self.source = source.with_name(f"float-{source.name}")
        model = onnx.load(source)
        self.input = model.graph.input[0].name
        if options.smooth is not None:
            smooth(model, self._channel_ranges(model), options.smooth)
        kinds = ("MatMul",) if options.mode == "dynamic" else (EMBEDDING, *PRODUCTS)
        self.kinds = {node.name: node.op_type for node in _weighted(model.graph, kinds)}
        self.names = tuple(self.kinds)
        if not self.names:
            raise ValueError(
                f"int8: nothing in this graph has constant weights ({', '.join(kinds)}), so nothing can be quantised; "
                "export it in float"
            )
        add_pre_process_metadata(model)  # constants are folded already
        del model.graph.value_info[:]  # shapes that rewriting makes wrong
        onnx.save(model, self.source)

    def write(self, names: Sequence[str], path: Path) -> None:
        """The graph with these layers quantised."""
        from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_dynamic, quantize_static

        products = [name for name in names if self.kinds[name] in PRODUCTS and self.options.mode != "weights"]
        _weights_only(self.source, [name for name in names if name not in products], path, self.options.bits)
        if not products:
            return
        common: dict[str, Any] = dict(
            op_types_to_quantize=list(PRODUCTS), nodes_to_quantize=products, per_channel=True,
            weight_type=QuantType.QInt8, reduce_range=self.options.bits < 8,
        )  # fmt: skip
        with quiet(), _silent():
            if self.options.mode == "dynamic":
                quantize_dynamic(path, path, extra_options={"MatMulConstBOnly": True}, **common)
                return
            quantize_static(
                path,
                path,
                _Reader(self.input, self.images),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                calibrate_method=CalibrationMethod.MinMax,
                calibration_cache_path=self._cache(names),
                extra_options={"OpTypesToExcludeOutputQuantization": list(PRODUCTS)},
                **common,
            )

    def _cache(self, names: Sequence[str]) -> Path | None:
        """Ranges are measured once, with all products; without the file, by the first call."""
        path = self.folder / "ranges.json"
        return path if path.exists() or len(names) == len(self.names) else None

    def _channel_ranges(self, model: Any) -> dict[str, np.ndarray]:
        """The largest absolute value of each channel, of the inputs of products with constant weights."""
        import onnx
        import onnxruntime

        probe = onnx.ModelProto()
        probe.CopyFrom(model)
        known = {value.name for value in probe.graph.output}
        inputs = {node.input[0] for node in _weighted(probe.graph, PRODUCTS)}
        probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(inputs - known))
        session = onnxruntime.InferenceSession(probe.SerializeToString(), providers=["CPUExecutionProvider"])
        names = sorted(inputs)
        largest: dict[str, np.ndarray] = {}
        for part in torch.split(self.images, CHUNK):
            for name, value in zip(names, session.run(names, {self.input: part.numpy()}), strict=True):
                found = np.abs(value).reshape(-1, value.shape[-1]).max(0)
                largest[name] = np.maximum(largest.get(name, found), found)
        return largest


@dataclass
class LayerSearch:
    """Finds out which layers int8 may have. `expected` [n,K]: the outputs of the float baseline on the quantiser's images;
    with `classes`, they are logits. `open_file`: an ONNX file → a function of images."""

    quantiser: Quantiser
    expected: Tensor
    classes: bool
    open_file: Callable[[Path], Any]
    path: Path  # of the ONNX file
    progress: Progress = no_progress

    def run(self) -> Quantised:
        """Write the file, with as many layers in int8 as the goal allows."""
        import onnx

        options, names = self.quantiser.options, self.quantiser.names
        self.progress("quantising", 0)
        agreement, distance = self._try(names)
        back: list[str] = []
        if options.keep is not None and (agreement is None or agreement < options.keep):
            self._check_goal(options.keep)
            order = self._by_sensitivity()
            back = order[: self._fewest(order, options.keep)]
            agreement, distance = self._try([name for name in names if name not in back])
        check_quantised(onnx.load(self.path).graph)
        kept = tuple(name for name in names if name not in back)
        images = len(self.quantiser.images)
        return Quantised(options.mode, options.bits, kept, tuple(back), agreement, distance, images)

    def _check_goal(self, keep: float) -> None:
        if not self.classes:
            raise ValueError("int8: keep compares predicted classes, and this model returns features; leave it out")
        limit, _ = self._try(())
        if limit is None or limit < keep:
            raise ValueError(
                f"int8: keep {keep:g} cannot be reached: in float, too, this config keeps {limit:.1%} of the predictions on "
                f"the {len(self.quantiser.images)} calibration images; merge less, or ask for less"
            )

    def _by_sensitivity(self) -> list[str]:
        """The layers by the distance that each alone in int8 adds, the largest first."""
        losses = {}
        for name in self.quantiser.names:
            _, losses[name] = self._try((name,))
            self.progress("layers tried in int8", 1, len(self.quantiser.names))
        return sorted(losses, key=lambda name: -losses[name])

    def _fewest(self, order: Sequence[str], keep: float) -> int:
        """How many of these layers have to be float."""

        def misses(count: int) -> bool:
            self.progress(f"{count} of {len(order)} layers in float", 0)
            agreement, _ = self._try([name for name in self.quantiser.names if name not in order[:count]])
            return agreement is None or agreement < keep

        return bisect_int(misses, 0, len(order))[1]

    def _try(self, names: Sequence[str]) -> tuple[float | None, float]:
        """Agreement with the float baseline, and mean cosine distance of the outputs."""
        self.quantiser.write(names, self.path)
        run = self.open_file(self.path)
        found = torch.cat([run(part) for part in torch.split(self.quantiser.images, CHUNK)]).flatten(1)
        expected = self.expected.flatten(1)
        distance = float((1 - F.cosine_similarity(found.double(), expected.double())).clamp(min=0).mean())
        agreement = float((found.argmax(1) == expected.argmax(1)).double().mean()) if self.classes else None
        return agreement, distance


class _Reader:
    """Calibration images, as onnxruntime reads them."""

    def __init__(self, name: str, images: Tensor) -> None:
        self.name = name
        self.parts = iter(torch.split(images, CHUNK))

    def get_next(self) -> dict[str, Any] | None:
        part = next(self.parts, None)
        return None if part is None else {self.name: part.numpy()}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get_next, None)


def _weighted(graph: Any, kinds: Sequence[str]) -> list[Any]:
    """The nodes of these kinds whose second factor is a constant."""
    constants = {value.name for value in graph.initializer}
    return [node for node in graph.node if node.op_type in kinds and node.input[1] in constants]


def check_quantised(graph: Any) -> list[str]:
    """The names of the nodes that read int8 values. An error where one of them is anything but a layer with constant
    weights: matching and merging decide in float."""
    produced = {name: node for node in graph.node for name in node.output}
    constants = {value.name for value in graph.initializer}
    found = []
    for node in graph.node:
        sources = [produced[name] for name in node.input if name in produced]
        if node.op_type != "MatMulInteger" and not any(source.op_type == "DequantizeLinear" for source in sources):
            continue
        weights = produced.get(node.input[1]) if len(node.input) > 1 else None
        constant = node.input[1:2] and (node.input[1] in constants or (weights and weights.input[0] in constants))
        if node.op_type not in (EMBEDDING, *PRODUCTS, "MatMulInteger") or not constant:
            raise ValueError(f"int8: {node.name} ({node.op_type}) reads int8 values and has no constant weights")
        found.append(node.name)
    return found


def smooth(model: Any, largest: dict[str, np.ndarray], alpha: float) -> int:
    """SmoothQuant, folded: divide the channels behind a norm by s = max|x|^α / max|w|^(1 − α), and multiply the weights that
    read them by s. The graph computes the same. Only where weighted products alone read the norm. Returns how many norms."""
    from onnx import numpy_helper

    graph = model.graph
    values = {value.name: value for value in graph.initializer}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    weighted = {id(node) for node in _weighted(graph, ["MatMul"])}
    done = 0
    for norm in graph.node:
        if norm.op_type != "LayerNormalization" or not all(name in values for name in norm.input[1:]):
            continue
        found = readers.get(norm.output[0], [])
        if not found or not all(id(n) in weighted and n.input[0] == norm.output[0] for n in found):
            continue
        if any(len(readers[name]) > 1 for name in (*norm.input[1:], *(n.input[1] for n in found))):
            continue  # shared weights
        weights = [numpy_helper.to_array(values[n.input[1]]) for n in found]
        rows = np.max([np.abs(w).max(1) for w in weights], axis=0)
        x = largest[norm.output[0]]
        s = np.where((x > 0) & (rows > 0), np.maximum(x, 1e-8) ** alpha / np.maximum(rows, 1e-8) ** (1 - alpha), 1.0)
        s = s.astype(np.float32)
        for name in norm.input[1:]:
            _replace(values[name], numpy_helper.to_array(values[name]) / s)
        for node, w in zip(found, weights, strict=True):
            _replace(values[node.input[1]], w * s[:, None])
        done += 1
    return done


def _replace(value: Any, array: np.ndarray) -> None:
    from onnx import numpy_helper

    value.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array), value.name))


def _weights_only(source: Path, names: Sequence[str], path: Path, bits: int) -> None:
    """Weights in int8, one scale per output channel; the layers compute in float."""
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(source)
    graph = model.graph
    values = {value.name: value for value in graph.initializer}
    most = 2 ** (bits - 1) - 1
    added: dict[str, Any] = {}
    for node in [node for node in _weighted(graph, (EMBEDDING, *PRODUCTS)) if node.name in names]:
        name = node.input[1]
        if name not in added:
            w = numpy_helper.to_array(values[name])
            by_rows = node.op_type == EMBEDDING or any(a.name == "transB" and a.i for a in node.attribute)
            axis = 0 if by_rows else w.ndim - 1  # of the output channels
            others = tuple(i for i in range(w.ndim) if i != axis)
            scale = np.maximum(np.abs(w).max(others), 1e-12).astype(np.float32) / most
            whole = np.rint(w / np.expand_dims(scale, others)).astype(np.int8)
            graph.initializer.extend(
                [numpy_helper.from_array(whole, f"{name}.int8"), numpy_helper.from_array(scale, f"{name}.scale")]
            )
            added[name] = helper.make_node(
                "DequantizeLinear", [f"{name}.int8", f"{name}.scale"], [f"{name}.float"], f"{name}.dequantise", axis=axis
            )
        node.input[1] = f"{name}.float"
    read = {name for node in graph.node for name in node.input}
    for value in [value for name, value in values.items() if name in added and name not in read]:
        graph.initializer.remove(value)
    nodes = [*added.values(), *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, path)


@contextmanager
def _silent() -> Iterator[None]:
    """onnxruntime logs advice that is not for users of this library."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
