"""Fine-tuning with merging on: the paper's recipe, on one device or many.

What a step computes depends on its number alone. It is cut into micro-batches; each has its own images, its own seed for
augmentation and dropout, and belongs to one process. So two processes compute what one does with accumulation, and a run
that was killed goes on along the same curve.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from .extras import need
from .files import Journal, write_text
from .loading import Images
from .measuring import weights_digest
from .methods import Method
from .recipe import MicroBatches, Recipe, seed_all
from .surgery import apply, plan_of, twin


def finetune(
    model: nn.Module,
    images: Images,
    method: Method,
    out: Path,
    recipe: Recipe,
    *,
    workers: int = 0,
    cpu: bool = False,
    log: Callable[[dict[str, float]], object] = lambda row: None,
) -> None:
    """Train the model with the method on, in place; the weights are then in `model.safetensors` of the folder `out`, the
    curve in `steps.jsonl`. The same call goes on from the last checkpoint there."""
    training = _Training(model, images, method, out, recipe, cpu)
    for row in training.steps(workers):
        log(row)
    training.finish()


class _Training:
    def __init__(self, model: nn.Module, images: Images, method: Method, out: Path, recipe: Recipe, cpu: bool) -> None:
        need("accelerate", "training runs")
        from accelerate import Accelerator, DistributedDataParallelKwargs
        from timm.data import Mixup
        from timm.optim import create_optimizer_v2

        self.model, self.images, self.out, self.recipe = model, images, out, recipe
        self.count = recipe.epochs * (images.size // recipe.batch_size)
        if self.count == 0:
            raise ValueError(f"{images.name}: {images.size} images make no batch of {recipe.batch_size}")
        # Some hosts have parts that an answer does not need. (accelerate's own autocast would stay on the model's forward.)
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        self.accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[unused])
        micros, processes = recipe.batch_size // recipe.micro_batch, self.accelerator.num_processes
        if micros % processes:
            raise ValueError(f"{micros} micro-batches of a step cannot be shared by {processes} processes")
        self.own = range(self.accelerator.process_index, micros, processes)
        self.main = self.accelerator.is_main_process

        self.teacher = deepcopy(twin(model)).requires_grad_(False).to(self.accelerator.device) if recipe.teacher else None
        self.backbone = plan_of(apply(model, method).train()).backbone
        self.classes = _classes(model)
        if recipe.checkpointing:
            names = ("set_grad_checkpointing", "gradient_checkpointing_enable")  # timm, transformers
            known = [getattr(model, name) for name in names if hasattr(model, name)]
            if not known:
                raise ValueError(f"this {type(model).__name__} has no gradient checkpointing")
            known[0]()
        self.mix: Any = None
        if recipe.mixup > 0 or recipe.cutmix > 0:
            self.mix = Mixup(recipe.mixup, recipe.cutmix, label_smoothing=recipe.smoothing, num_classes=self.classes)
        optimizer = create_optimizer_v2(model, "adamw", lr=recipe.lr, weight_decay=recipe.weight_decay)
        self.ema = None if recipe.ema is None else {k: v.clone() for k, v in model.state_dict().items()}
        whose = f"{weights_digest(model)} {asdict(recipe)} {method!r} {images.identity}"
        self.owner = f"steps, version 1, {hashlib.sha256(whose.encode()).hexdigest()}"
        self.done = self._resume(optimizer)
        self.wrapped, self.optimizer = self.accelerator.prepare(model, optimizer)

    def steps(self, workers: int) -> Iterator[dict[str, float]]:
        """Train; what each step gave."""
        recipe = self.recipe
        places = [(step, micro) for step in range(self.done, self.count) for micro in self.own]
        batches = iter(DataLoader(MicroBatches(self.images, recipe, places), batch_size=None, num_workers=workers))
        journal = self._journal()
        for step in range(self.done, self.count):
            rate = recipe.rate(step / self.count)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            losses = [self._backward(step, micro, *next(batches)) for micro in self.own]
            if recipe.clip is not None:
                self.accelerator.clip_grad_norm_(self.wrapped.parameters(), recipe.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._average()
            loss = float(self.accelerator.reduce(torch.stack(losses).mean(), "mean"))
            if not math.isfinite(loss):
                raise ValueError(f"the loss of step {step} is {loss}; a lower learning rate or bf16 may help")
            row = {"step": step, "loss": loss, "lr": rate}
            if self.main:
                journal.add(row)
                if (step + 1) % recipe.save_every == 0 or step + 1 == self.count:
                    self._save(step + 1)
            yield row

    def _backward(self, step: int, micro: int, x: Tensor, labels: Tensor) -> Tensor:
        """Add the gradient of one micro-batch; its loss is returned. Processes exchange gradients with the last one."""
        recipe, device = self.recipe, self.accelerator.device
        x, labels = x.to(device), labels.to(device)
        if len(labels) and int(labels.max()) >= self.classes:
            raise ValueError(f"label {int(labels.max())} does not fit a model with {self.classes} classes")
        seed_all(recipe.seed, 2, step, micro)
        smoothing = recipe.smoothing
        if self.mix is not None:
            if len(x) % 2:  # images are mixed with each other; one of an odd number, with itself
                x, labels = torch.cat((x, x[:1])), torch.cat((labels, labels[:1]))
            (x, labels), smoothing = self.mix(x, labels), 0.0  # which smooths by itself
        last = micro == self.own[-1]
        cast = torch.autocast(device.type, torch.bfloat16, enabled=recipe.bf16)
        with nullcontext() if last else self.accelerator.no_sync(self.wrapped), cast:
            logits = self.backbone.answer(self.wrapped(x)).float()
            loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
            if self.teacher is not None:
                with torch.no_grad():
                    wanted = self.backbone.answer(self.teacher(x)).float().softmax(1)
                loss = loss.lerp(F.cross_entropy(logits, wanted), recipe.teacher)
            self.accelerator.backward(loss / len(self.own))
        return loss.detach()

    def _average(self) -> None:
        if self.ema is not None and self.recipe.ema is not None:
            for key, value in self.model.state_dict().items():
                moving = value.is_floating_point()
                self.ema[key] = self.ema[key].to(value.device).lerp(value, 1 - self.recipe.ema) if moving else value.clone()

    def finish(self) -> None:
        """Write the weights, and leave the model with them."""
        if self.ema is not None:
            self.model.load_state_dict(self.ema)
        if self.main:
            host: Any = self.model
            if hasattr(host, "save_pretrained"):
                host.save_pretrained(self.out)
            else:
                draft = self.out / "model.safetensors.part"
                save_file(_plain(host.state_dict()), draft)
                draft.replace(self.out / "model.safetensors")
        self.accelerator.wait_for_everyone()
        self.model.eval()

    def _resume(self, optimizer: Any) -> int:
        """Load the last whole checkpoint; the number of steps that were done is returned."""
        found = sorted(self.out.glob("checkpoint-[0-9]*[0-9]"))
        if not found:
            return 0
        state = json.loads((found[-1] / "step.json").read_text(encoding="utf-8"))
        if state["owner"] != self.owner:
            raise ValueError(
                f"{self.out}: a run with another model, recipe, method or images; give another folder, or remove it"
            )
        self.model.load_state_dict(load_file(found[-1] / "model.safetensors"))
        optimizer.load_state_dict(torch.load(found[-1] / "optimizer.pt", weights_only=True))
        if self.ema is not None:
            self.ema = load_file(found[-1] / "ema.safetensors")
        return int(state["step"])

    def _save(self, step: int) -> None:
        """A checkpoint has its name when it is whole; those before it are then removed."""
        place = self.out / f"checkpoint-{step:08}"
        draft = place.with_name(place.name + ".part")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file(_plain(self.model.state_dict()), draft / "model.safetensors")
        torch.save(self.optimizer.state_dict(), draft / "optimizer.pt")
        if self.ema is not None:
            save_file(_plain(self.ema), draft / "ema.safetensors")
        write_text(json.dumps({"step": step, "owner": self.owner}), draft / "step.json")
        shutil.rmtree(place, ignore_errors=True)
        draft.rename(place)
        for old in self.out.glob("checkpoint-*"):
            if old != place:
                shutil.rmtree(old)

    def _journal(self) -> Journal:
        """The curve up to the checkpoint: steps behind it are run again."""
        if not self.main:
            return Journal(None, self.owner, "steps")
        path = self.out / "steps.jsonl"
        kept = [row for row in Journal(path, self.owner, "steps").rows if row["step"] < self.done]
        self.out.mkdir(parents=True, exist_ok=True)
        write_text("".join(f"{line}\n" for line in (self.owner, *map(json.dumps, kept))), path)
        return Journal(path, self.owner, "steps")


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.detach().cpu().contiguous() for key, value in state.items()}


def _classes(model: Any) -> int:
    found = getattr(model, "num_classes", None) or getattr(getattr(model, "config", None), "num_labels", None)
    if not found:
        raise ValueError(f"this {type(model).__name__} has no classes to learn; give it a head first")
    return int(found)
