"""`tokenmerge predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import say


@options.command
def predict(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    method: options.Method = "NoMerge()",
    embeddings: Annotated[bool, typer.Option("--embeddings", help="Write pre-logits features instead of labels.")] = False,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    batch_size: options.BatchSize = 32,
    limit: options.Limit = None,
    device: options.Device = "cpu",
    audit: Annotated[
        int,
        typer.Option(min=0, help="Number of images that also run through the baseline, to bound the changes."),
    ] = 0,
    confidence: options.Confidence = 0.95,
    seed: options.Seed = 0,
    engine: Annotated[str, typer.Option(help="'local': this process; 'ray': Ray's workers.")] = "local",
    workers: Annotated[int, typer.Option(min=1, help="Of Ray.")] = 2,
) -> None:
    """Labels or embeddings of many images in one Parquet file. Use a config with batch='each' for batch-invariant
    predictions."""
    with options.errors():
        from ..deployment.predict import predict as run
        from ..methods import load_or_parse

        config = load_or_parse(method)
        with options.progress_bars() as progress:
            done = run(
                model,
                images,
                config,
                out,
                weights=weights,
                options={} if num_classes is None else {"num_classes": num_classes},
                embeddings=embeddings,
                batch_size=batch_size,
                limit=limit,
                device=device,
                engine=engine,  # type: ignore[arg-type]
                workers=workers,
                audit=audit,
                seed=seed,
                confidence=confidence,
                progress=progress,
            )
    say(f"{out}: {done.images:,} images")
    if done.audit is not None:
        say(done.audit.sentence, "bold")
