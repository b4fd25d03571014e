"""The commands that run over many images or many steps: predict, finetune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..printing import print_results
from .common import BatchSize, Classes, Limit, Model, Weights, app, errors, progress_bar, setting, stderr


@app.command()
def predict(
    model: Model,
    source: Annotated[str, typer.Argument(help="A folder of images, a .tar file, or s3://… and the like (fsspec).")],
    out: Annotated[Path, typer.Option(help="The Parquet file to write.")],
    method: Annotated[str, typer.Option(help="As for evaluate, or a saved .json file.")] = "NoMerge()",
    embeddings: Annotated[bool, typer.Option("--embeddings", help="What the head reads, instead of labels.")] = False,
    weights: Weights = None,
    num_classes: Classes = None,
    batch_size: BatchSize = 32,
    limit: Limit = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps, …")] = "cpu",
    engine: Annotated[str, typer.Option(help="'here': this process; 'ray': Ray's workers.")] = "here",
    workers: Annotated[int, typer.Option(min=1, help="Of Ray.")] = 2,
) -> None:
    """Labels or embeddings of many images in one Parquet file. Take a setting with batch='each': an answer then does not
    depend on its neighbours."""
    with errors():
        from ..predicting import Job, Predictor
        from ..predicting import predict as run

        chosen = setting(method)
        options = {} if num_classes is None else {"num_classes": num_classes}
        place = None if weights is None else str(weights.absolute())
        if engine == "ray":  # whose workers may stand in other folders
            source = str(Path(source).absolute()) if Path(source).exists() else source
            model = f"hf:{Path(model[3:]).absolute()}" if model.startswith("hf:") and Path(model[3:]).exists() else model
        job = Job(model, source, chosen.to_dict(), place, options, embeddings, batch_size, limit, device)
        predictor = Predictor(job)
        with progress_bar(predictor.images.size) as progress:
            count = run(predictor, out, engine=engine, workers=workers, progress=progress)  # type: ignore[arg-type]
        print(f"{out}: {count:,} images")


@app.command()
def finetune(
    model: Model,
    data: Annotated[str, typer.Argument(help="A folder with one folder a class, a .tar file, hfds/NAME, or 'embedded'.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the curve and the weights; a run there goes on.")],
    method: Annotated[str, typer.Option(help="What merges, also in training; as for evaluate.")],
    test: Annotated[str | None, typer.Option(help="Images to measure on afterwards, in the same form.")] = None,
    weights: Weights = None,
    num_classes: Classes = None,
    epochs: Annotated[int, typer.Option(min=1)] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Of a step, over all processes.")] = 1024,
    micro_batch: Annotated[int, typer.Option(min=1, help="That goes through a device at once.")] = 64,
    lr: Annotated[float, typer.Option(min=0)] = 2e-5,
    min_lr: Annotated[float, typer.Option(min=0)] = 3e-6,
    weight_decay: Annotated[float, typer.Option(min=0)] = 0.05,
    mixup: Annotated[float, typer.Option(min=0)] = 0.8,
    cutmix: Annotated[float, typer.Option(min=0)] = 1.0,
    smoothing: Annotated[float, typer.Option(min=0, max=1)] = 0.1,
    teacher: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the loss that asks for the unmerged model's own answers.")
    ] = 0.0,
    augment: Annotated[str, typer.Option(help="timm's name of it; '' for none.")] = "rand-m9-mstd0.5-inc1",
    erase: Annotated[float, typer.Option(min=0, max=1, help="Probability of random erasing.")] = 0.25,
    ema: Annotated[float | None, typer.Option(min=0, max=1, help="Decay of a moving average of the weights.")] = None,
    clip: Annotated[float | None, typer.Option(min=0, help="Of the gradient's norm.")] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Compute activations anew, for memory.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast to bfloat16.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps from checkpoint to checkpoint.")] = 100,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Although there is a GPU.")] = False,
    log: Annotated[str | None, typer.Option(help="tensorboard:FOLDER or wandb:PROJECT.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Train a merged model: the paper's recipe, unless said otherwise. `accelerate launch -m tokenmerge finetune …` uses
    several devices."""
    with errors():
        from ..checkpoints import load_model
        from ..crew import crew
        from ..evaluation import evaluate
        from ..finetuning import finetune as run
        from ..following import logger
        from ..loading import load_images
        from ..recipe import Recipe, training_images

        chosen = setting(method)
        options = {} if num_classes is None else {"num_classes": num_classes}
        network = load_model(model, weights, **options)
        recipe = Recipe(
            epochs, batch_size, micro_batch, lr, min_lr, weight_decay, mixup, cutmix, smoothing, teacher, clip, ema,
            checkpointing, bf16, seed, save_every,
        )  # fmt: skip
        images = training_images(data, network, augment, erase)
        unseen = None if test is None else load_images(test, network, classes=test != "embedded")
        main = crew().rank == 0
        follow = logger(log) if log is not None and main else None
        with progress_bar(epochs * (images.size // batch_size), "steps", hidden=not main) as progress:

            def on_step(row: dict[str, float]) -> None:
                progress(1)
                if follow is not None:
                    follow({key: value for key, value in row.items() if key != "step"}, int(row["step"]))

            run(network, images, chosen, out, recipe, workers=workers, cpu=cpu, log=on_step)
        if not main:
            return
        stderr.print(f"{out / 'model.safetensors'}: fine-tuned with {chosen!r}", soft_wrap=True)
        if unseen is not None:
            before = evaluate(load_model(model, weights, **options), unseen, {"training-free": chosen})
            after = evaluate(network.cpu(), unseen, {"fine-tuned": chosen})
            print_results([*before, after[1]], f"{model}, {before[0].images} images of {test}", as_json)
