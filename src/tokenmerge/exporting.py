"""A merged model as a file that other runtimes run: torch.export's .pt2, ONNX, OpenVINO. Every file is run against the eager
model before it takes its place."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .backbones import Unsupported, find_backbone
from .extras import need
from .files import write_text
from .methods import Method
from .surgery import apply, is_applied, plan_of, twin, with_matmul

Target = Literal["pt2", "onnx", "openvino"]
SUFFIX = {"pt2": ".pt2", "onnx": ".onnx", "openvino": ".xml"}
TOLERANCE = {"pt2": 1e-5, "onnx": 1e-4, "openvino": 1e-4}  # of the largest output, or of 1
BATCHES = (1, 4, 16)  # that a file is tried with; the graph takes any
OPSET = 20


@dataclass(frozen=True)
class Exported:
    """What is written beside the file."""

    file: str
    target: str
    method: str  # evaluates back
    merge: str  # scatter or matmul
    input: tuple[int, ...]  # shape of one image
    preprocess: bool
    differences: dict[str, float]  # by kind of images and batch size: the largest, of any output
    largest: float
    torch: str


class Shipped(nn.Module):
    """What goes into the file: images in, answers out; with the normalisation, if that is wanted."""

    def __init__(self, model: nn.Module, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> None:
        super().__init__()
        self.model = model
        self.answer = (plan_of(model).backbone if is_applied(model) else find_backbone(model)).answer
        self.preprocess = mean is not None
        if mean is not None and std is not None:
            self.register_buffer("scale", 1 / (255 * torch.tensor(std).view(1, -1, 1, 1)))
            self.register_buffer("shift", torch.tensor(mean).view(1, -1, 1, 1) / torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        if self.preprocess:
            images = images.float() * self.scale - self.shift  # type: ignore[operator]
        return self.answer(self.model(images))


def program_of(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """A graph for any batch size. The model is a merged one, or `Shipped`."""
    if len(example) < 2:
        example = example.repeat(2, 1, 1, 1)  # one image alone would be taken for the only size
    try:
        with torch.no_grad(), quiet():
            batch = torch.export.Dim("batch", min=1, max=65536)
            return torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # torch's own errors have many classes
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise Unsupported(
            f"torch.export cannot take this {type(model).__name__} as one graph ({reason[:300]}). ATM, ToMe, TopR and "
            "ConstantThreshold can be exported, on hosts that torch.export takes unmerged"
        ) from error


def write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    need("onnxscript", "ONNX files")
    with quiet():
        made: Any = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False)
    made.save(str(path))


def write_openvino(onnx: Path, path: Path) -> None:
    """From ONNX; weights stay float32, decisions need it."""
    need("openvino", "OpenVINO files")
    import openvino

    openvino.save_model(openvino.convert_model(onnx), path, compress_to_fp16=False)


def open_file(path: Path, threads: int | None = None) -> Callable[[Tensor], Tensor]:
    """The file as a function, in the runtime that its name says."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    if path.suffix == ".onnx":
        need("onnxruntime", "ONNX files")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or torch.get_num_threads()
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])
    if path.suffix == ".xml":
        need("openvino", "OpenVINO files")
        import openvino

        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads or torch.get_num_threads()}
        compiled = openvino.Core().compile_model(path, "CPU", settings)
        return lambda x: torch.from_numpy(compiled(x.numpy())[0].copy())
    raise ValueError(f"{path}: no exported model; they end in {', '.join(SUFFIX.values())}")


def export(
    model: nn.Module,
    method: Method,
    images: Tensor,
    path: str | Path,
    *,
    to: Target,
    merge: Literal["scatter", "matmul"] = "scatter",
    normalise: tuple[Sequence[float], Sequence[float]] | None = None,
    say: Callable[[str], object] = lambda what: None,
) -> Exported:
    """Write the merged model to `path`. It is then run beside the eager model on `images` [n,3,H,W] (normalised as the
    model wants them), on blank ones, which merge much, and on noise, which merges little or not at all, at several batch
    sizes: a mismatch is an error, and leaves no file. `normalise`, mean and deviation: the graph takes pixels from 0 to
    255. The model is left as it was found."""
    path = Path(path)
    if to not in SUFFIX or path.suffix != SUFFIX[to]:
        raise ValueError(f"{path}: files for {to!r} end in {SUFFIX.get(to, 'one of ' + ', '.join(SUFFIX.values()))}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder to write into")
    merged = with_matmul(apply(twin(model).cpu().float(), method), merge == "matmul")
    shipped = Shipped(merged, *(normalise or ())).eval()
    inputs = _probes(images, normalise)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        draft = Path(folder) / path.name
        say("torch.export")
        program = program_of(shipped, inputs["images"][:4])
        if to == "pt2":
            torch.export.save(program, draft)
        else:
            onnx = draft.with_suffix(".onnx")
            say("ONNX")
            write_onnx(program, onnx)
            if to == "openvino":
                say("OpenVINO")
                write_openvino(onnx, draft)
                onnx.unlink()
        say("comparing with the eager model")
        differences = compare(shipped, open_file(draft), inputs, TOLERANCE[to], path.name)
        record = Exported(
            path.name, to, repr(method), merge, tuple(images.shape[1:]), normalise is not None, differences,
            max(differences.values()), torch.__version__,
        )  # fmt: skip
        for made in Path(folder).iterdir():
            shutil.move(made, path.parent / made.name)
    write_text(json.dumps(asdict(record), indent=2) + "\n", path.with_name(path.name + ".json"))
    return record


@torch.no_grad()
def compare(
    eager: nn.Module, run: Callable[[Tensor], Tensor], inputs: dict[str, Tensor], tolerance: float, name: str
) -> dict[str, float]:
    """The largest difference of any output, by kind of images and batch size."""
    found = {}
    for kind, pool in inputs.items():
        for size in BATCHES:
            x = pool.repeat(-(-size // len(pool)), 1, 1, 1)[:size]
            expected = eager(x)
            difference = float((run(x) - expected).abs().max())
            found[f"{kind}, batch {size}"] = difference
            if not difference <= tolerance * max(1.0, float(expected.abs().max())):
                raise ValueError(
                    f"{name} differs from the eager model by {difference:.2g} on {kind}, batch {size} (outputs up to "
                    f"{float(expected.abs().max()):.3g}); no file was written. Take a frozen setting: it decides nothing "
                    "by thresholds, which rounding can cross"
                )
    return found


def _probes(images: Tensor, normalise: tuple[Sequence[float], Sequence[float]] | None) -> dict[str, Tensor]:
    """As they are; each one's mean colour; noise of the same colours."""
    generator = torch.Generator().manual_seed(0)
    images = images[: max(BATCHES)].cpu().float()
    if normalise is not None:
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in normalise)
        images = ((images * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)
    flat = images.flatten(2)
    noise = flat[:, :, torch.randperm(flat.shape[2], generator=generator)].reshape(images.shape)
    blank = flat.float().mean(2).to(images.dtype)[:, :, None, None].expand(images.shape).contiguous()
    return {"images": images, "blank": blank, "noise": noise}


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn of their own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
