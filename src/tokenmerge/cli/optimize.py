"""`tokenmerge optimize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import print_outcome


@options.command
def optimize(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for the config, the report and the table; a run there resumes.")],
    gmacs: Annotated[float | None, typer.Option(help="Reach this fraction of the baseline's GMACs.")] = None,
    min_agreement: options.MinAgreement = None,
    max_distance: Annotated[float | None, typer.Option(help="Stay within this mean cosine distance.")] = None,
    speedup: Annotated[float | None, typer.Option(help="Reach this speed-up, measured on this machine.")] = None,
    time: Annotated[float | None, typer.Option(help="Reach this fraction of the baseline's time.")] = None,
    certify: Annotated[
        float | None,
        typer.Option(help="Certify that this fraction of all such predictions stays: the cheapest config that is shown to."),
    ] = None,
    order: Annotated[str, typer.Option(help="What --certify makes cheaper: 'gmacs' or 'time'.")] = "gmacs",
    confidence: options.Confidence = 0.95,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also where the images cannot certify the level.")] = False,
    runtime: Annotated[str, typer.Option(help="Where --speedup and --time are measured: {runtimes}.")] = "eager",
    batch: Annotated[int, typer.Option(help="The batch size at which they are measured.", min=1)] = 32,
    int8: options.Int8Mode = None,
    int8_keep: options.Int8Keep = None,
    smooth: options.Smooth = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    image_size: options.ImageSize = None,
    zero_shot: options.ZeroShot = None,
    limit: options.Limit = None,
    sample: options.Sample = 64,
    batch_size: options.BatchSize = 32,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Find the cheapest config for a model and unlabelled images, validate it on other images, and write a report.

    Without a goal: keep 99.5 % of the predictions. With --int8, also the files of --runtime: float, merged, int8, and merged
    in int8."""
    with options.errors():
        from ..calibration.optimize import optimize as run
        from ..engine.features import counted_part

        quantise = options.int8_options(int8, int8_keep, smooth)
        network, data = options.load(model, images, weights, num_classes, image_size, zero_shot=zero_shot, limit=limit)
        options.advise_kernels()
        if gmacs is min_agreement is max_distance is speedup is time is certify is None:
            min_agreement = 0.995
        with options.progress_bars() as progress:
            outcome = run(
                network,
                data,
                out,
                name=model,
                gmacs=gmacs,
                min_agreement=min_agreement,
                max_distance=max_distance,
                speedup=speedup,
                time=time,
                runtime=runtime,
                batch=batch,
                certify=certify,
                order=order,  # type: ignore[arg-type]
                confidence=confidence,
                anyway=anyway,
                int8=quantise,
                sample=sample,
                batch_size=batch_size,
                seed=seed,
                progress=progress,
            )
    print_outcome(outcome, as_json, counted_part(network))
