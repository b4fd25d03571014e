"""`tokenmerge finetune`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from . import options
from .output import print_results


@options.command
def finetune(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the curve and the weights; a run there resumes.")],
    method: options.Method,
    labels: Annotated[Path | None, typer.Option(help="CSV with labels. Default: subfolders are classes.")] = None,
    test: Annotated[str | None, typer.Option(help="Images to evaluate on afterwards, in the same form.")] = None,
    crop: options.Crop = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the images.")] = 30,
    batch_size: Annotated[int, typer.Option(min=1, help="Of a step, over all processes.")] = 1024,
    micro_batch: Annotated[int, typer.Option(min=1, help="Images whose gradients are computed at once.")] = 64,
    lr: Annotated[float, typer.Option(min=0, help="First learning rate for 512 images per step.")] = 2e-5,
    unscaled_lr: Annotated[bool, typer.Option("--unscaled-lr", help="Take --lr as it is, whatever the batch.")] = False,
    min_lr: Annotated[float, typer.Option(min=0, help="Last learning rate.")] = 3e-6,
    weight_decay: Annotated[float, typer.Option(min=0, help="Of AdamW.")] = 0.05,
    mixup: Annotated[float, typer.Option(min=0, help="α of mixup; 0: off.")] = 0.8,
    cutmix: Annotated[float, typer.Option(min=0, help="α of CutMix; 0: off.")] = 1.0,
    smoothing: Annotated[float, typer.Option(min=0, max=1, help="Label smoothing.")] = 0.1,
    teacher: Annotated[
        float, typer.Option(min=0, max=1, help="Weight of distillation from the baseline model in the loss.")
    ] = 0.0,
    augment: Annotated[str, typer.Option(help="Augmentation in timm's notation; '' for none.")] = "rand-m9-mstd0.5-inc1",
    erase: Annotated[float, typer.Option(min=0, max=1, help="Probability of random erasing.")] = 0.25,
    drop_path: Annotated[float, typer.Option(min=0, max=1, help="Stochastic depth of the last block.")] = 0.1,
    repeats: Annotated[int, typer.Option(min=1, help="Repeated augmentation: times that an image is in a batch.")] = 3,
    ema: Annotated[float, typer.Option(min=0, max=1, help="Decay of an EMA of the weights; 0: none.")] = 0.99996,
    use_ema: Annotated[bool, typer.Option("--use-ema", help="Leave the model with the EMA, not with its weights.")] = False,
    clip: Annotated[float | None, typer.Option(min=0, help="Clip the gradient's norm.")] = None,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Gradient checkpointing.")] = False,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast to bfloat16.")] = False,
    seed: options.Seed = 0,
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    workers: options.Workers = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Force CPU.")] = False,
    log: options.Log = None,
    as_json: options.Json = False,
) -> None:
    """Fine-tune a merged model, by default with the paper's recipe. For several devices: `accelerate launch -m tokenmerge
    finetune …`."""
    with options.errors():
        from ..data.load import load_images
        from ..evaluation.evaluate import evaluate
        from ..methods import load_or_parse
        from ..training.finetune import finetune as run
        from ..training.finetune import training_seconds
        from ..training.recipe import Recipe, training_images
        from ..utils.distributed import current_process_group
        from ..utils.logging import make_logger, no_log

        config = load_or_parse(method)
        network = options.load_model(model, weights, num_classes)
        recipe = Recipe(
            epochs=epochs,
            batch_size=batch_size,
            micro_batch=micro_batch,
            lr=lr,
            lr_batch=None if unscaled_lr else 512,
            min_lr=min_lr,
            weight_decay=weight_decay,
            mixup=mixup,
            cutmix=cutmix,
            smoothing=smoothing,
            teacher=teacher,
            clip=clip,
            drop_path=drop_path,
            repeats=repeats,
            ema=ema or None,
            use_ema=use_ema,
            checkpointing=checkpointing,
            bf16=bf16,
            seed=seed,
            save_every=save_every,
        )
        data = training_images(images, network, augment, erase, labels)
        unseen = None if test is None else load_images(test, network, classes=test != "embedded", crop=crop)
        main = current_process_group().is_main
        logger = make_logger(log) if log is not None and main else no_log
        with options.progress_bars(hidden=not main) as progress:
            run(network, data, config, out, recipe, workers=workers, cpu=cpu, log=logger, progress=progress)
        if not main:
            return
        took = timedelta(seconds=round(training_seconds(out)))
        options.stderr.print(f"{out / 'model.safetensors'}: fine-tuned with {config!r} in {took}", soft_wrap=True)
        if unseen is not None:
            original = options.load_model(model, weights, num_classes)
            before = evaluate(original, unseen, {"training-free": config})
            after = evaluate(network.cpu(), unseen, {"fine-tuned": config}, baseline=original)
            print_results([*before, after[1]], f"{model}, {before[0].images} images of {test}", as_json)
