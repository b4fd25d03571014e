"""`tokenmerge finetune`."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from . import options
from .output import print_results


@options.command
def finetune(
    model: options.Model,
    images: options.ImagesArgument,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the curve and the weights; a run there resumes.")],
    method: options.Method,
    recipe: Annotated[str, typer.Option(help="Published schedule to start from, by the name of a method.")] = "atm",
    labels: Annotated[
        str | None, typer.Option(help="CSV with labels; 'none': train without labels. Default: subfolders are classes.")
    ] = None,
    test: Annotated[str | None, typer.Option(help="Images to evaluate on afterwards, in the same form.")] = None,
    crop: options.Crop = None,
    weights: options.Weights = None,
    num_classes: options.NumClasses = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the images.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of a step, over all processes.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Images whose gradients are computed at once.")] = None,
    lr: Annotated[float | None, typer.Option(min=0, help="Highest learning rate, for 512 images per step.")] = None,
    unscaled_lr: Annotated[bool, typer.Option("--unscaled-lr", help="Take --lr as it is, whatever the batch.")] = False,
    min_lr: Annotated[float | None, typer.Option(min=0, help="Last learning rate.")] = None,
    module_lr: Annotated[
        float | None, typer.Option(min=0, help="Factor of the learning rate of the method's own modules.")
    ] = None,
    warmup: Annotated[float | None, typer.Option(min=0, help="Epochs of warm-up.")] = None,
    cooldown: Annotated[float | None, typer.Option(min=0, help="Last epochs, at --min-lr.")] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0, help="Of AdamW.")] = None,
    mixup: Annotated[float | None, typer.Option(min=0, help="α of mixup; 0: off.")] = None,
    cutmix: Annotated[float | None, typer.Option(min=0, help="α of CutMix; 0: off.")] = None,
    smoothing: Annotated[float | None, typer.Option(min=0, max=1, help="Label smoothing.")] = None,
    teacher: Annotated[
        float | None, typer.Option(min=0, max=1, help="Weight of distillation from the baseline model in the loss.")
    ] = None,
    consistency: Annotated[
        float | None, typer.Option(min=0, help="Weight of MCTF's loss between a strong and a weak reduction.")
    ] = None,
    augment: Annotated[str, typer.Option(help="Augmentation in timm's notation; '' for none.")] = "rand-m9-mstd0.5-inc1",
    erase: Annotated[float, typer.Option(min=0, max=1, help="Probability of random erasing.")] = 0.25,
    drop_path: Annotated[float | None, typer.Option(min=0, max=1, help="Stochastic depth of the last block.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeated augmentation: times that an image is shown.")] = None,
    ema: Annotated[float | None, typer.Option(min=0, max=1, help="Decay of an EMA of the weights; 0: none.")] = None,
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
        from ..training.recipe import WITHOUT_LABELS, find_recipe, training_images
        from ..utils.distributed import current_process_group
        from ..utils.logging import make_logger, no_log

        config = load_or_parse(method)
        network = options.load_model(model, weights, num_classes)
        given = {
            "epochs": epochs,
            "batch_size": batch_size,
            "micro_batch": micro_batch,
            "lr": lr,
            "min_lr": min_lr,
            "module_lr": module_lr,
            "warmup": warmup,
            "cooldown": cooldown,
            "weight_decay": weight_decay,
            "mixup": mixup,
            "cutmix": cutmix,
            "smoothing": smoothing,
            "teacher": teacher,
            "consistency": consistency,
            "clip": clip,
            "drop_path": drop_path,
            "repeats": repeats,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if unscaled_lr:
            changes["lr_batch"] = None
        if ema is not None:
            changes["ema"] = ema or None
        labelled = labels != "none"
        if not labelled:
            changes.setdefault("consistency", find_recipe(recipe).consistency or WITHOUT_LABELS)
        schedule = replace(
            find_recipe(recipe), **changes, use_ema=use_ema, checkpointing=checkpointing, bf16=bf16, seed=seed,
            save_every=save_every, labels=labelled,
        )  # fmt: skip
        data = training_images(images, network, augment, erase, labels if labelled else None, labelled)
        unseen = None if test is None else load_images(test, network, classes=test != "embedded", crop=crop)
        main = current_process_group().is_main
        logger = make_logger(log) if log is not None and main else no_log
        with options.progress_bars(hidden=not main) as progress:
            trained = run(network, data, config, out, schedule, workers=workers, cpu=cpu, log=logger, progress=progress)
        if not main:
            return
        took = timedelta(seconds=round(training_seconds(out)))
        options.stderr.print(f"{out / 'model.safetensors'}: fine-tuned with {config!r} in {took}", soft_wrap=True)
        if unseen is not None:
            original = options.load_model(model, weights, num_classes)
            before = evaluate(original, unseen, {"training-free": config})
            after = evaluate(network.cpu(), unseen, {"fine-tuned": trained}, baseline=original)
            print_results([*before, after[1]], f"{model}, {before[0].images} images of {test}", as_json)
