"""The HTML report of `optimize`, for readers without Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.images import Images
from ..engine.features import counted_part
from ..evaluation.certify import Certificate
from ..evaluation.measurement import percent
from ..evaluation.prove import THIS, Proof
from ..methods.no_merge import BASELINE
from ..utils.environment import cpu_features, describe_hardware
from ..utils.rounding import percent_down
from ..visualization.html_report import HtmlReport
from ..visualization.merge_maps import draw_maps, enlarge, maps_figure
from .calibrate import Calibration

if TYPE_CHECKING:
    from .optimize import Outcome

TOME = "ToMe at the same cost"
TOME_IN_TIME = "ToMe at the same time"
STATIC = "the same with static r"
FLOAT_FILE = "file: float"
MERGED_FILE = "file: merged, static r"
INT8_FILE = "file: int8"
BOTH_FILE = "file: merged, static r, int8"


def optimization_report(model: nn.Module, images: Images, name: str, outcome: Outcome, batch_size: int) -> HtmlReport:
    """Everything that `optimize` found."""
    calibration, frozen, proof, certificate = outcome.calibration, outcome.frozen, outcome.proof, outcome.certificate
    report = HtmlReport(f"tokenmerge: {name}")
    claim, *more = outcome.claims
    report.text(claim, "claim")
    for sentence in (*more, outcome.power):
        report.text(sentence)
    report.text(
        f"{1 - proof.this.ratio:.1%} fewer GMACs ({proof.this.gmacs:.3f} instead of {proof.baseline.gmacs:.3f}), "
        f"{proof.speedup:.2f} × the images per second. Goal: {calibration.goal}"
        + (", reached" if calibration.met else "; it cannot be reached, this is the nearest that can")
        + f" on the {calibration.images} calibration images."
        + ("" if calibration.time is None else f" Measured time there: {calibration.time:.1%} of the baseline's")
        + ("" if calibration.time_p95 is None else f" (95 % of the images: at most {calibration.time_p95:.1%}).")
        + (f" Note: {calibration.note}." if calibration.note else "")
    )
    report.heading(f"On images that calibration did not see{counted_part(model)}")
    files = any(r.file_mb is not None for r in proof.results)
    report.table(
        ("", "agreement", "at least", "distance", "GMACs", "of baseline", "images/s", *(["MB"] if files else [])),
        [
            (
                r.name,
                percent(r.agreement, 2),
                percent_down(proof.bounds[r.name]) if r.name in proof.bounds else "–",
                f"{r.distance:.5f}",
                f"{r.gmacs:.3f}",
                percent(r.ratio),
                f"{r.images_per_second:.1f}",
                *(["" if r.file_mb is None else f"{r.file_mb:.1f}"] if files else []),
            )
            for r in proof.results
        ],
    )
    report.text(
        f"{proof.images:,} images, batches of {batch_size}. Agreement: the same {proof.kind} as the baseline. "
        f"At least: lower bounds that hold together with {proof.confidence:.0%} confidence. "
        f"Distance: mean cosine distance of the pre-logits features; of this config: {proof.distance_sentence}. "
        f"{calibration.images} other images were used to calibrate.",
        "dim",
    )
    if proof.accuracy is not None:
        found = proof.accuracy
        report.text(
            f"Top-1 accuracy: {found.lost} images lost, {found.gained} gained; a loss of {100 * found.loss:.2f} points, "
            f"at most {100 * found.bound:.2f} for all such images (McNemar's exact test: p = {found.p_value:.2g})."
        )
    for recall in proof.recall:
        report.text(
            f"Recall@{recall.k}: {recall.hits} of {recall.queries} queries find the baseline's nearest neighbour, "
            f"≥ {percent_down(recall.bound)} of all such queries."
        )
    if certificate is not None:
        report.heading("The chain of configs that was tested")
        report.table(
            ("config", "GMACs", "changed", "p-value", "alone at least", "certified"),
            [
                (
                    f"{number}",
                    percent(one.ratio),
                    f"{one.changed} of {one.images}",
                    f"{one.p_value:.2g}",
                    percent_down(one.bound),
                    "yes" if one.certified else "no: the chain ends",
                )
                for number, one in enumerate(certificate.tested, 1)
            ],
        )
        report.text(
            f"Tested in this order on the images that calibration did not see; certified while p ≤ "
            f"{1 - certificate.confidence:.3g} (Learn then Test, fixed sequence).",
            "dim",
        )
        report.figure(_chain(certificate), "GMACs and lower bound of the tested configs")
    report.figure(_plots(calibration, proof), "distance and GMACs per image, tokens per layer")
    report.heading("The images that changed most")
    report.figure(_changed_most(model, images, calibration, proof), "the images that changed most, and their merge maps")
    report.heading("Use it")
    report.code(f'tokenmerge.apply(model, tokenmerge.load("reduction.json"))\n\n{calibration.method!r}')
    report.text(
        "frozen.json merges the same number of tokens in every image, for compilers and exports: "
        f"distance {frozen.distance:.5f} instead of {frozen.distance_before:.5f}, "
        f"{frozen.ratio:.1%} of the GMACs instead of {frozen.ratio_before:.1%} (calibration images)."
    )
    report.text(
        f"Measured on {describe_hardware()} ({', '.join(cpu_features())}), {torch.get_num_threads()} threads.", "dim"
    )
    return report


def _chain(certificate: Certificate) -> Any:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3))
    ratios = [one.ratio for one in certificate.tested]
    axes.plot(ratios, [one.bound for one in certificate.tested], color="grey", marker=".", label="tested")
    if (best := certificate.certified) is not None:
        axes.plot(best.ratio, best.bound, "o", color="C0", label="certified")
    axes.axhline(certificate.level, color="C3", linewidth=1, label=f"level {certificate.level:g}")
    axes.set(xlabel="GMACs of baseline", ylabel="lower bound, this config alone")
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def _plots(calibration: Calibration, proof: Proof) -> Any:
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.2))
    for trial in calibration.trials:
        left.plot(trial.ratio, trial.distance, ".", color="grey", markersize=4)
    left.plot(calibration.ratio, calibration.distance, "o", color="C0", label="chosen")
    left.set(xlabel="GMACs of baseline", ylabel="distance", title="trials of the calibration", yscale="log")
    left.legend(frameon=False)
    looks = {BASELINE: ("grey", "."), THIS: ("C0", "o"), TOME: ("C1", "s")}
    for result in proof.results:
        if result.per_image is not None and result.name in (THIS, TOME):
            color, marker = looks[result.name]
            ratio = result.per_image.gmacs / proof.baseline.gmacs
            style: dict[str, Any] = {"color": color, "markersize": 3, "label": result.name}
            middle.plot(ratio, result.per_image.distance.clamp(min=1e-7), marker, **style)
    middle.set(xlabel="GMACs of baseline", title="unseen images, one by one", yscale="log")
    middle.legend(fontsize=8)  # with a frame: it lies over points
    for result in proof.results:
        if result.name in looks:
            color, _ = looks[result.name]
            layers = range(1, len(result.tokens))
            right.plot(layers, result.tokens[:-1], marker=".", color=color, label=result.name)
    right.set(xlabel="layer", title="tokens after each layer, mean", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    return figure


def _changed_most(model: nn.Module, images: Images, calibration: Calibration, proof: Proof) -> Any:
    """The pictures and merge maps of the images that changed most."""
    wanted = [name for name, _, _ in proof.changed_most]
    read: dict[str, Tensor] = {}
    for batch in images.batches(32):
        read |= {name: x.cpu().float() for name, x in zip(batch.names, batch.images, strict=True) if name in wanted}
        if len(read) == len(wanted):
            break
    pictures = [enlarge(images.denormalise(read[name])) for name in wanted]
    maps = draw_maps(model, torch.stack([read[name] for name in wanted]), pictures, calibration.method)
    captions = [f"{distance:.4f}{'' if agrees else ', changed'}" for _, distance, agrees in proof.changed_most]
    remaining = [f"{one.tokens[-1]} tokens" for one in maps]
    return maps_figure([("image", pictures, captions), ("merged", [one.pictures[-1] for one in maps], remaining)])
