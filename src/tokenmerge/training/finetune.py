"""Fine-tuning with merging on: the paper's recipe, on one device or many.

What a step computes depends on its number alone. It is cut into micro-batches; each has its own images, its own seed for
augmentation and dropout, and belongs to one process. So two processes compute what one does with accumulation, and a run
that was killed resumes on the same curve.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from ..data.checkpoint import weights_digest
from ..data.images import Images
from ..data.load import Source, as_images
from ..engine.forward import Plan, method_modules
from ..engine.patch import apply, backbone_of, plan_of, shared_weights_copy
from ..methods.base import Method
from ..methods.learning import MODULES, TrainingStep
from ..methods.no_merge import NoMerge
from ..utils.files import Journal
from ..utils.logging import Log, no_log
from ..utils.optional import require_package
from ..utils.progress import Progress, no_progress
from .checkpoints import Checkpoints, trained_method, write_ema, write_trained
from .drop_path import StochasticDepth
from .passes import Pass, Passes, difference, label_probability, run_with
from .recipe import MicroBatches, Recipe, seed_all
from .whole_batch import averages_over_batch, count_whole_batch


def finetune(
    model: nn.Module,
    images: Source,
    method: Method,
    out: str | Path,
    recipe: Recipe | None = None,
    *,
    workers: int = 0,
    cpu: bool = False,
    log: Log = no_log,
    progress: Progress = no_progress,
) -> Method:
    """Train the model with the method applied, in place. The weights are then in `model.safetensors` of the folder `out`,
    their moving average in `ema.safetensors`, the curve and the seconds of each step in `steps.jsonl`. The method is in
    `method.json`, with the weights of its modules next to it; it is also returned. The same call resumes from the last
    checkpoint there. `recipe`: the paper's by default. `images` need labels, unless the recipe does without;
    `tokenmerge.training.recipe.training_images` augments a folder as the recipe does."""
    training = _Training(model, as_images(images, model), method, Path(out), recipe or Recipe(), cpu)
    try:
        for row in training.steps(workers):
            progress("steps", 1, training.count)
            log(int(row["step"]), {key: value for key, value in row.items() if key != "step"})
    finally:
        training.drop_path.restore()
    return training.finish()


class _Input(NamedTuple):
    """One micro-batch, ready for the model."""

    x: Tensor
    labels: Tensor
    smoothing: float


def _check(method: Method, recipe: Recipe, model: nn.Module) -> None:
    """Refuse what a method cannot be trained with, before anything is changed."""
    if method.trained and not recipe.labels:
        raise ValueError(f"{type(method).__name__} learns from labels; leave out --labels none")
    if method.trained and recipe.eval_mode:
        raise ValueError(f"{type(method).__name__} does not learn in eval mode; choose another recipe than evit or bat")
    if method.distils_tokens:
        backbone_of(model).final_norm(model)


class _Training:
    def __init__(self, model: nn.Module, images: Images, method: Method, out: Path, recipe: Recipe, cpu: bool) -> None:
        require_package("accelerate", "training runs")
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from timm.data import Mixup
        from timm.optim import create_optimizer_v2
        from timm.utils import ModelEmaV3

        self.model = model
        self.images = images
        self.out = out
        self.recipe = recipe
        self.count = recipe.epochs * (images.size // recipe.batch_size)
        if self.count == 0:
            raise ValueError(f"{images.name}: {images.size} images are fewer than one batch of {recipe.batch_size}")
        # Some models have parts that do not influence the output. (accelerate's own autocast would stay on the forward.)
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[unused])
        micros = recipe.batch_size // recipe.micro_batch
        processes = self.accelerator.num_processes
        if micros % processes:
            raise ValueError(f"{micros} micro-batches of a step cannot be divided among {processes} processes")
        self.own = range(self.accelerator.process_index, micros, processes)
        self.main = self.accelerator.is_main_process

        self.method = method
        self.teacher: nn.Module | None = None  # the model as it was
        _check(method, recipe, model)
        if recipe.teacher or not recipe.labels or method.distils_tokens:
            self.teacher = deepcopy(shared_weights_copy(model)).requires_grad_(False).to(self.accelerator.device)
            apply(self.teacher, NoMerge(last_layer="full") if recipe.labels else method)
        self.backbone = backbone_of(apply(model.to(self.accelerator.device), method).train(not recipe.eval_mode))
        self.drop_path = StochasticDepth(self.backbone, model, recipe.drop_path)
        self.micros = micros
        if recipe.shrink is not None or recipe.consistency:
            method.scaled(0.5, plan_of(model).depth)  # refused now, not in the first step
        self.classes = self.backbone.num_classes(model)
        if not self.classes and recipe.labels:
            raise ValueError(f"this {type(model).__name__} has no classes to learn; give it a head first")
        if recipe.checkpointing:
            self.backbone.enable_checkpointing(model)
        self.mixup: Any = None
        if recipe.labels and (recipe.mixup > 0 or recipe.cutmix > 0):
            self.mixup = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=self.classes)
        optimizer = create_optimizer_v2(self._parameter_groups(), "adamw", lr=recipe.lr, weight_decay=0.0)
        self.ema: Any = None if recipe.ema is None else ModelEmaV3(model, decay=recipe.ema)
        key = f"{weights_digest(model)} {asdict(recipe)} {method!r} {images.identity}"
        self.run = f"steps, version 6, {hashlib.sha256(key.encode()).hexdigest()}"
        self.checkpoints = Checkpoints(out, self.run)
        self.done = self.checkpoints.load(model, optimizer, self._ema)
        self.wrapped, self.optimizer = self.accelerator.prepare(Passes(model), optimizer)

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Those of the method, for modules of its own and for the model, each with and without weight decay, as timm decides
        it."""
        from timm.optim import param_groups_weight_decay

        model: Any = self.model
        skipped = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
        group_of = {
            id(p): (self.method.parameter_group(name), name.startswith(MODULES)) for name, p in model.named_parameters()
        }
        groups = []
        for made in param_groups_weight_decay(model, self.recipe.weight_decay, no_weight_decay_list=skipped):
            for key in sorted({group_of[id(p)] for p in made["params"]}):
                part, of_method = key
                params = [p for p in made["params"] if group_of[id(p)] == key]
                groups.append({**made, "params": params, "part": part, "of_method": of_method})
        return groups

    def steps(self, workers: int) -> Iterator[dict[str, float]]:
        """Train; yields the metrics of each step."""
        recipe = self.recipe
        indices = [(step, micro) for step in range(self.done, self.count) for micro in self.own]
        batches = iter(DataLoader(MicroBatches(self.images, recipe, indices), batch_size=None, num_workers=workers))
        journal = self._journal()
        for step in range(self.done, self.count):
            done = step / self.count
            rate = recipe.learning_rate(done)
            for group in self.optimizer.param_groups:
                own = recipe.module_lr if group["of_method"] else 1.0
                group["lr"] = rate * own * self.method.learning_rate_factor(group["part"], done)
            began = time.perf_counter()
            inputs: Iterable[_Input] = (self._prepare(step, micro, *next(batches)) for micro in self.own)
            plans = self._plans(step)
            if self.micros > 1 and any(averages_over_batch(plan) for plan in plans):
                inputs = list(inputs)
                whole = torch.cat([one.x for one in inputs])
                weak = self.teacher if self.teacher is not None and not recipe.labels else self.model
                plans = [self._count(model, plan, whole) for model, plan in zip((self.model, weak), plans, strict=False)]
            losses = [self._backward(step, micro, one, plans) for micro, one in zip(self.own, inputs, strict=True)]
            if recipe.clip is not None:
                self.accelerator.clip_grad_norm_(self.wrapped.parameters(), recipe.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.ema is not None:
                self.ema.update(self.model)
            loss = float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))
            if not math.isfinite(loss):
                raise ValueError(f"the loss of step {step} is {loss}; a lower learning rate or bf16 may help")
            row = {"step": step, "loss": loss, "lr": rate, "seconds": time.perf_counter() - began}
            if self.main:
                journal.add(row)
                if (step + 1) % recipe.save_every == 0 or step + 1 == self.count:
                    self.checkpoints.save(step + 1, self.model, self.optimizer, self._ema)
            yield row

    def _prepare(self, step: int, micro: int, x: Tensor, labels: Tensor) -> _Input:
        """Mix the images of one micro-batch."""
        recipe = self.recipe
        device = self.accelerator.device
        x = x.to(device)
        labels = labels.to(device)
        if recipe.labels and len(labels) and int(labels.max()) >= self.classes:
            raise ValueError(f"label {int(labels.max())} does not fit a model with {self.classes} classes")
        seed_all(recipe.seed, 2, step, micro)
        smoothing = recipe.smoothing
        if self.mixup is not None:
            if len(x) % 2:  # images are mixed in pairs; the last of an odd number, with the first
                x = torch.cat((x, x[:1]))
                labels = torch.cat((labels, labels[:1]))
            x, labels = self.mixup(x, labels)
            smoothing = 0.0  # Mixup smooths by itself
        return _Input(x, labels, smoothing)

    def _plans(self, step: int) -> list[Plan]:
        """What the model does in this step: with the reduction of the schedule, and with a weaker one where two are
        compared."""
        recipe, plan = self.recipe, plan_of(self.model)
        method = self.method.at(step / self.count)
        full = recipe.reduction(step / self.count)
        fractions = [full]
        if recipe.consistency:
            draw = np.random.default_rng((recipe.seed, 4, step)).uniform(*recipe.weak)
            fractions.append(full * float(draw))
        scaled = [method if part == 1 else method.scaled(part, plan.depth) for part in fractions]
        return [self._plan(one) for one in scaled]

    def _plan(self, method: Method) -> Plan:
        plan = plan_of(self.model)
        return plan if method == plan.method else Plan.of(self.model, method, self.backbone)

    def _count(self, model: nn.Module, plan: Plan, x: Tensor) -> Plan:
        """What merges in each layer, from all images of the step: x are those of this process."""
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.recipe.bf16):
            return count_whole_batch(model, plan, x, lambda count: self.accelerator.reduce(count, "sum"))

    def _backward(self, step: int, micro: int, one: _Input, plans: Sequence[Plan]) -> Tensor:
        """Add the gradient of one micro-batch; its loss is returned. Processes exchange gradients with the last one."""
        recipe = self.recipe
        x = one.x
        device = x.device
        seed_all(recipe.seed, 3, step, micro)  # of stochastic depth
        last = micro == self.own[-1]
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16)
        with nullcontext() if last else self.accelerator.no_sync(self.wrapped), autocast:
            loss = self._loss(one, plans) if recipe.labels else self._loss_without_labels(x, plans)
            self.accelerator.backward(loss / len(self.own))
        return loss.detach()

    def _loss(self, one: _Input, plans: Sequence[Plan]) -> Tensor:
        companions = [self._plan(companion) for companion in plans[0].method.companions()]
        loss: Tensor = self.wrapped(one.x, plans, companions, partial(self._loss_of, one, plans[0].method))
        return loss

    def _loss_of(self, one: _Input, method: Method, passes: list[Pass], companions: list[Pass]) -> Tensor:
        """Cross-entropy, distillation from the baseline, MCTF's loss between two reductions, and what the method adds."""
        recipe = self.recipe

        def cross_entropy(logits: Tensor) -> Tensor:
            return F.cross_entropy(logits, one.labels, label_smoothing=one.smoothing)

        strong, *others = passes
        loss = cross_entropy(strong.logits)
        teacher: Pass | None = None
        wanted: Tensor | None = None
        if self.teacher is not None:
            with torch.no_grad():
                teacher = run_with(self.teacher, one.x, plan_of(self.teacher))
                wanted = self._normed(self.teacher, teacher)
            loss = loss.lerp(F.cross_entropy(strong.logits, teacher.logits.softmax(1)), recipe.teacher)
        for weak in others:
            sure = label_probability(strong.logits.detach(), one.labels) > recipe.confidence
            loss = loss + cross_entropy(weak.logits)
            loss = loss + recipe.consistency * difference(strong.features, weak.features.detach(), sure)
        return method.loss(
            TrainingStep(
                task=loss,
                logits=strong.logits,
                labels=one.labels,
                cross_entropy=cross_entropy,
                notes=strong.notes,
                tokens=strong.tokens,
                normed_tokens=self._normed(self.model, strong),
                modules=method_modules(self.model),
                teacher_logits=None if teacher is None else teacher.logits,
                teacher_tokens=wanted,
                companions=[(companion.logits, companion.notes) for companion in companions],
            )
        )

    def _normed(self, model: nn.Module, made: Pass) -> Tensor | None:
        """The tokens of the last block after the final norm of this model, for methods that distil them."""
        if made.tokens is None or not self.method.distils_tokens:
            return None
        normed: Tensor = self.backbone.final_norm(model)(made.tokens)
        return normed

    def _loss_without_labels(self, x: Tensor, plans: Sequence[Plan]) -> Tensor:
        """Features under the strong reduction, compared with those of the model as it was under the weak one."""
        assert self.teacher is not None
        strong, weak = plans
        with torch.no_grad():
            wanted = run_with(self.teacher, x, weak).features
        weight = self.recipe.consistency
        loss: Tensor = self.wrapped(x, [strong], [], lambda passes, _: weight * difference(passes[0].features, wanted))
        return loss

    def finish(self) -> Method:
        """Write weights and method, and leave the model with them."""
        if self.recipe.use_ema:
            self.model.load_state_dict(self.ema.module.state_dict())
        if self.main:
            write_trained(self.model, self.method, self.out)
            if self._ema is not None:
                write_ema(self._ema, self.method, self.out)
        self.accelerator.wait_for_everyone()
        self.model.eval()
        return trained_method(self.model, self.method, self.out)

    @property
    def _ema(self) -> nn.Module | None:
        return None if self.ema is None else self.ema.module

    def _journal(self) -> Journal:
        """The curve up to the checkpoint: later steps are run again."""
        journal = Journal(self.out / "steps.jsonl" if self.main else None, self.run, "steps")
        journal.rewrite([row for row in journal.rows if row["step"] < self.done])
        return journal


def training_seconds(out: Path) -> float:
    """How long the training in this folder took, over all its runs."""
    lines = (out / "steps.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    return sum(json.loads(line)["seconds"] for line in lines)
