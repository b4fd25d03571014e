"""The whole job: calibrate, prove on other images, compare with ToMe at the same cost, write it all down."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .benchmarking import hardware
from .calibration import Calibration, Frozen, Goal, calibrate, freeze
from .evaluation import UNMERGED
from .extras import need
from .files import write_csv, write_text
from .loading import Images, Source, as_images
from .measuring import Reference
from .methods import NoMerge, ToMe, save
from .proving import OURS, Proof, prove
from .reporting import Page
from .schedule import spread
from .visualization import draw_maps, enlarge, maps_figure

TOME, FROZEN, FREE = "ToMe at the same cost", "the same, frozen", "free last layer"


@dataclass(frozen=True)
class Outcome:
    """What was found, with its evidence, and the files that say so."""

    calibration: Calibration
    frozen: Frozen
    proof: Proof
    files: tuple[Path, ...]
    skipped: dict[str, str]  # images that could not be read, and why


def optimize(
    model: nn.Module,
    images: Source,
    out: Path,
    *,
    name: str = "model",
    sample: int = 64,
    rounds: int = 6,
    batch_size: int = 32,
    seed: int = 0,
    on_trial: Callable[[int], object] = lambda trials: None,
    on_image: Callable[[int], object] = lambda images: None,
    **goal: float | None,
) -> Outcome:
    """Calibrate on `sample` images (at most half of them), prove on the others, and write into the folder `out`:
    reduction.json (load it with `tokenmerge.load`), frozen.json, report.html, results.csv, usage.py. Trials are kept in
    trials.jsonl: the same call goes on where an interrupted one stopped. `goal`: one of those of `calibrate`."""
    need("matplotlib", "reports")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out}: a file is in the way; give a folder")
    Goal(**goal)
    images = as_images(images, model).readable()
    if images.size < 6:
        raise ValueError(f"{images.name}: {images.size} images could be read; at least 6 are needed, half of them to prove")
    seen, unseen = images.split(min(sample, images.size // 2), seed)
    calibration = calibrate(
        model,
        seen,
        **goal,  # type: ignore[arg-type]
        sample=seen.size,
        rounds=rounds,
        batch_size=batch_size,
        seed=seed,
        memory=out / "trials.jsonl",
        progress=on_trial,
    )
    frozen = freeze(model, seen, calibration.method, batch_size=batch_size)
    others = {
        TOME: tome_at(Reference(model, seen.take(range(1)), batch_size=1), calibration.ratio),
        FROZEN: frozen.method,
        FREE: NoMerge(),
    }
    proof = prove(model, unseen, calibration.method, others=others, batch_size=batch_size, progress=on_image)
    page = report(model, unseen, name, calibration, frozen, proof, batch_size)
    save(calibration.method, out / "reduction.json")
    save(frozen.method, out / "frozen.json")
    write_csv([result.row() for result in proof.results], out / "results.csv")
    write_text(
        json.dumps({"calibration": _plain(calibration), "proof": proof.to_dict()}, indent=2) + "\n", out / "proof.json"
    )
    write_text(USAGE, out / "usage.py")
    write_text(str(page), out / "report.html")
    names = ("reduction.json", "frozen.json", "results.csv", "proof.json", "usage.py", "report.html")
    return Outcome(calibration, frozen, proof, tuple(out / file for file in names), dict(images.skipped))


USAGE = """from pathlib import Path

import tokenmerge


def reduce(model):
    \"\"\"The model as it was calibrated, loaded as ever; tokenmerge.remove(model) undoes it.\"\"\"
    return tokenmerge.apply(model, tokenmerge.load(Path(__file__).with_name("reduction.json")))
"""


def _plain(calibration: Calibration) -> dict[str, Any]:
    plain = {key: value for key, value in vars(calibration).items() if key not in ("method", "trials")}
    return plain | {"method": calibration.method.to_dict(), "trials": len(calibration.trials)}


def tome_at(reference: Reference, ratio: float) -> ToMe:
    """ToMe at a given cost: the same r in every layer, and one more in the first few, to come as near as possible."""
    depth = reference.depth

    def reached(total: int) -> float:
        return reference.expected(reference.possible(spread(total, depth)))

    low, high = 0, depth * reference.tokens // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reached(middle) > ratio else (low, middle)
    return ToMe(spread(min(low, high, key=lambda total: abs(reached(total) - ratio)), depth))


def report(
    model: nn.Module, images: Images, name: str, calibration: Calibration, frozen: Frozen, proof: Proof, batch_size: int
) -> Page:
    """Everything that was found, for a reader without Python."""
    ours = next(result for result in proof.results if result.name == OURS)
    page = Page(f"tokenmerge: {name}")
    page.text(proof.sentence, "claim")
    page.text(
        f"{1 - ours.gmacs_ratio:.1%} fewer GMACs ({ours.gmacs:.3f} instead of {proof.results[0].gmacs:.3f}), "
        f"{proof.speedup:.2f} × the images per second. Asked for: {calibration.goal}"
        + (", reached" if calibration.met else "; it cannot be reached, this is the nearest that can")
        + f" on the {calibration.images} calibration images."
    )
    page.heading("On images that calibration did not see")
    page.table(
        ("", "agreement", "distance", "GMACs", "of unmerged", "images/s"),
        [
            (
                r.name,
                "–" if r.agreement is None else f"{r.agreement:.2%}",
                f"{r.distance:.5f}",
                f"{r.gmacs:.3f}",
                f"{r.gmacs_ratio:.1%}",
                f"{r.images_per_second:.1f}",
            )
            for r in proof.results
        ],
    )
    page.text(
        f"{proof.images:,} images, batches of {batch_size}. Agreement: the same {proof.kind} as the unmerged model. "
        "Distance: cosine distance of what the head reads, mean. "
        f"{calibration.images} other images were used to calibrate.",
        "dim",
    )
    page.figure(_plots(calibration, proof), "distance and GMACs per image, tokens per layer")
    page.heading("The images that changed most")
    page.figure(_worst(model, images, calibration, proof), "the images that changed most, and their merge maps")
    page.heading("Use it")
    page.code(f'tokenmerge.apply(model, tokenmerge.load("reduction.json"))\n\n{calibration.method!r}')
    page.text(
        "frozen.json merges the same number in every image, for compilers and exports: "
        f"distance {frozen.distance:.5f} instead of {frozen.distance_before:.5f}, "
        f"{frozen.ratio:.1%} of the GMACs instead of {frozen.ratio_before:.1%} (calibration images)."
    )
    page.text(f"Measured on {hardware()}, {torch.get_num_threads()} threads.", "dim")
    return page


def _plots(calibration: Calibration, proof: Proof) -> Any:
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2))
    for trial in calibration.trials:
        left.plot(trial.ratio, trial.distance, ".", color="grey", markersize=4)
    left.plot(calibration.ratio, calibration.distance, "o", color="C0", label="chosen")
    left.set(xlabel="GMACs of unmerged", ylabel="distance", title="trials of the calibration", yscale="log")
    left.legend(frameon=False)
    looks = {UNMERGED: ("grey", "."), OURS: ("C0", "o"), TOME: ("C1", "s")}
    for result in proof.results:
        if result.each is not None and result.name in (OURS, TOME):
            ratio, (color, marker) = result.each.gmacs / proof.results[0].gmacs, looks[result.name]
            style: dict[str, Any] = {"color": color, "markersize": 3, "label": result.name}
            middle.plot(ratio, result.each.distance.clamp(min=1e-7), marker, **style)
    middle.set(xlabel="GMACs of unmerged", title="unseen images, one by one", yscale="log")
    middle.legend(fontsize=8)  # framed: it lies over points
    for result in proof.results:
        if result.name in looks:
            layers, (color, _) = range(1, len(result.tokens)), looks[result.name]
            right.plot(layers, result.tokens[:-1], marker=".", color=color, label=result.name)
    right.set(xlabel="layer", title="tokens after each layer, mean", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def _worst(model: nn.Module, images: Images, calibration: Calibration, proof: Proof) -> Any:
    """The pictures and merge maps of the images that changed most."""
    wanted = [name for name, _, _ in proof.changed_most]
    found: dict[str, Tensor] = {}
    for batch in images.batches(32):
        found |= {name: x.cpu().float() for name, x in zip(batch.names, batch.images, strict=True) if name in wanted}
        if len(found) == len(wanted):
            break
    pictures = [enlarge(images.picture(found[name])) for name in wanted]
    maps = draw_maps(model, torch.stack([found[name] for name in wanted]), pictures, calibration.method)
    captions = [f"{distance:.4f}{'' if same else ', changed'}" for _, distance, same in proof.changed_most]
    left = [f"{one.tokens[-1]} tokens" for one in maps]
    return maps_figure([("image", pictures, captions), ("merged", [one.pictures[-1] for one in maps], left)])
