"""A merged model as a file for other runtimes. Every file is run and compared with the eager model before it is kept."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..engine.features import has_classes, run_model
from ..engine.patch import adapter_of, apply, shared_weights_copy, use_matmul
from ..methods.base import Method
from ..utils.files import write_text
from ..utils.progress import Progress, no_progress
from .graph import ExportWrapper, export_program
from .int8 import Int8, LayerSearch, Quantised, Quantiser
from .targets import TARGETS, find_target

BATCHES = (1, 4, 16)  # that a file is tested with; the graph takes any

Normalisation = tuple[Sequence[float], Sequence[float]]  # mean and standard deviation


@dataclass(frozen=True)
class Exported:
    """Written next to the file."""

    file: str
    target: str
    method: str  # evaluates back
    merge: str  # scatter or matmul
    input: tuple[int, ...]  # shape of one image
    preprocess: bool
    differences: dict[str, float]  # largest difference of any output, by kind of images and batch size
    largest: float
    torch: str
    int8: Quantised | None = None  # the differences are those of the float graph before


def export(
    model: nn.Module,
    method: Method,
    images: Tensor,
    path: str | Path,
    *,
    to: str,
    merge: Literal["scatter", "matmul"] = "scatter",
    normalise: Normalisation | None = None,
    int8: bool | Int8 = False,
    progress: Progress = no_progress,
) -> Exported:
    """Write the merged model to `path`. `to` names a target: pt2, onnx, openvino, …

    The file is then compared with the eager model on `images` [n,3,H,W] (normalised for the model), on blank images, which
    merge much, and on noise, which merges little or not at all, at several batch sizes: a mismatch is an error, and no file
    is left. `normalise`, mean and standard deviation: the graph takes pixels from 0 to 255. `int8`: quantise the products
    with constant weights, with ranges measured on all of `images` (see `Int8`). The model is not changed."""
    path = Path(path)
    target = find_target(to)
    options = int8 if isinstance(int8, Int8) else Int8() if int8 else None
    if options is not None and options.mode not in target.int8:
        able = [name for name, one in TARGETS.items() if options.mode in one.int8]
        raise ValueError(f"int8 files of mode {options.mode!r} are written to {', '.join(able)}, not to {to}")
    check_images(model, images)
    if path.suffix != target.suffix:
        raise ValueError(f"{path}: files for {to!r} end in {target.suffix}")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent}: no such folder to write into")
    merged = use_matmul(apply(shared_weights_copy(model).cpu().float(), method), merge == "matmul")
    wrapper = ExportWrapper(merged, *(normalise or ())).eval()
    given = _as_pixels(images, normalise)
    inputs = _test_inputs(given[: max(BATCHES)])
    output = "logits" if has_classes(model) else "features"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        draft = Path(folder) / path.name
        source = Path(folder) / "int8" / "float.onnx"  # what is quantised
        source.parent.mkdir()
        progress("torch.export", 0)
        program = export_program(wrapper, inputs["images"][:4])
        progress(f"writing {to}", 0)
        if options is None:
            target.write(program, draft, output)
        else:
            TARGETS["onnx"].write(program, source, output)
            target.convert(source, draft)
        progress("comparing with the eager model", 0)
        run = target.open(draft, torch.get_num_threads())
        differences = check_outputs(wrapper, run, inputs, target.tolerance, path.name)
        quantised = None
        if options is not None:
            baseline = ExportWrapper(shared_weights_copy(model).cpu().float(), *(normalise or ())).eval()
            expected = torch.cat([_run(baseline, part) for part in torch.split(given, max(BATCHES))])

            def open_file(onnx: Path) -> Callable[[Tensor], Tensor]:
                target.convert(onnx, draft)
                return target.open(draft, torch.get_num_threads())

            search = LayerSearch(
                Quantiser(source, given, options),
                expected,
                output == "logits",
                open_file,
                source.with_name("int8.onnx"),
                progress,
            )
            quantised = search.run()
        record = Exported(
            file=path.name,
            target=to,
            method=repr(method),
            merge=merge,
            input=tuple(images.shape[1:]),
            preprocess=normalise is not None,
            differences=differences,
            largest=max(differences.values()),
            torch=torch.__version__,
            int8=quantised,
        )
        for made in Path(folder).glob(f"{path.stem}.*"):
            if made.is_file():
                shutil.move(made, path.parent / made.name)
    write_text(json.dumps(asdict(record), indent=2) + "\n", path.with_name(path.name + ".json"))
    return record


def check_images(model: nn.Module, images: Tensor) -> None:
    """What is exported runs on images of one size."""
    if images.ndim < 3 or len(images) == 0:
        raise ValueError(f"export needs images [n,3,H,W] to compare and to calibrate with, not {list(images.shape)}")
    wanted = adapter_of(model).input_size(model)
    if images.ndim == len(wanted) + 1 and images.shape[1] != wanted[0]:
        raise ValueError(f"images have {images.shape[1]} channels, and this {type(model).__name__} takes {wanted[0]}")
    plain = shared_weights_copy(model)
    try:
        with torch.no_grad():
            run_model(plain, images[:1].to(next(plain.parameters())))
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"images are {list(images.shape[1:])}, and this {type(model).__name__} cannot run on them ({error}); it takes "
            f"{list(wanted)}"
        ) from None


@torch.no_grad()
def _run(model: nn.Module, x: Tensor) -> Tensor:
    found: Tensor = model(x)
    return found


@torch.no_grad()
def check_outputs(
    eager: nn.Module, run: Callable[[Tensor], Tensor], inputs: dict[str, Tensor], tolerance: float, name: str
) -> dict[str, float]:
    """The largest difference of any output, by kind of images and batch size; an error beyond the tolerance."""
    differences = {}
    for kind, pool in inputs.items():
        for size in BATCHES:
            x = torch.cat([pool] * -(-size // len(pool)))[:size]
            expected = eager(x)
            difference = float((run(x) - expected).abs().max())
            differences[f"{kind}, batch {size}"] = difference
            if not difference <= tolerance * max(1.0, float(expected.abs().max())):
                raise ValueError(
                    f"{name} differs from the eager model by {difference:.2g} on {kind}, batch {size} (outputs up to "
                    f"{float(expected.abs().max()):.3g}); no file was written. Use a static config (freeze): it decides "
                    "nothing by thresholds, which rounding can cross"
                )
    return differences


def _as_pixels(images: Tensor, normalise: Normalisation | None) -> Tensor:
    """The images as the graph takes them: as they are, or as pixels from 0 to 255."""
    images = images.cpu().float()
    if normalise is None:
        return images
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in normalise)
    return ((images * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def _test_inputs(images: Tensor) -> dict[str, Tensor]:
    """The images as they are; each one's mean colour; noise of the same colours."""
    generator = torch.Generator().manual_seed(0)
    flat = images.flatten(-2)
    noise = flat[..., torch.randperm(flat.shape[-1], generator=generator)].reshape(images.shape)
    blank = flat.float().mean(-1).to(images.dtype)[..., None, None].expand(images.shape).contiguous()
    return {"images": images, "blank": blank, "noise": noise}
