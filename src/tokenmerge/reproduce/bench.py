"""One model on the images: configs as the paper gives them, solved for a cost, measured, fine-tuned."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..calibration.cell import solvable_method
from ..calibration.search import solve_for_cost
from ..data.images import Images
from ..engine.cost import Convention
from ..engine.patch import apply, backbone_of, plan_of, shared_weights_copy
from ..evaluation.evaluate import BaselineOutputs, Result, evaluate
from ..evaluation.measurement import without_loss
from ..evaluation.reference import Reference
from ..methods.atm import ATM
from ..methods.base import Method
from ..methods.no_merge import BASELINE, NoMerge
from ..methods.presets import PaperRow, rows_of
from ..methods.serialization import from_dict
from ..training.finetune import finetune, training_seconds
from ..training.recipe import Recipe, find_recipe, training_images
from ..utils.bisect import approach, bisect
from ..utils.files import Journal
from .published import PUBLISHED, Published

if TYPE_CHECKING:
    from .lab import Lab

# Images on which methods are solved for a cost, in the first two attempts and later; each is measured on all, and corrected.
FEW, SOME = 4, 64
CLOSE = 0.005  # how near to the cost is near enough, relative to it
PAPER_EPOCHS = 30  # of ATM's fine-tuning
STRESS_STEPS = 10  # of the bisection over a method's reduction strength


@dataclass
class Bench:
    """One model on the images."""

    lab: Lab
    name: str
    paper: str  # the model of the paper that it is, or that it stands in for
    model: nn.Module
    images: Images
    _known: dict[tuple[str, int], Result] = field(default_factory=dict)
    _baseline: dict[int, BaselineOutputs] = field(default_factory=dict)  # by batch size

    @property
    def _published(self) -> Published:
        return PUBLISHED.get(self.name) or Published(self.name, self.name, "", 0)

    @property
    def label(self) -> str:
        return self._published.label

    @property
    def stands_in(self) -> bool:
        return self.name != self.paper

    @property
    def batch_size(self) -> int:
        return min(self.lab.batch_size or self._published.batch_size, self.images.size)

    @property
    def convention(self) -> Convention:
        return self._published.convention

    @property
    def params(self) -> float:
        """Million parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters()) / 1e6

    @cached_property
    def width(self) -> int:
        backbone = backbone_of(self.model)
        return backbone.cost(backbone.blocks(self.model)[0]).width

    @cached_property
    def reference(self) -> Reference:
        return self._reference(SOME)

    @cached_property
    def _few(self) -> Reference:
        return self._reference(FEW)

    def _reference(self, count: int) -> Reference:
        """On some of the images, to solve methods for a given cost."""
        images, _ = self.images.split(min(count, self.images.size), seed=0)
        return Reference(self.model, images, batch_size=min(self.batch_size, images.size), convention=self.convention)

    def options(self, name: str) -> dict[str, Any]:
        """What the paper gives to a method: to ATM only the CLS token after the last attention, and to every method on MAE
        plain attention. (That the ablations of Fig. 5 and 6 have ATM's last layer is our reading.)"""
        cls = solvable_method(name)
        paper = PUBLISHED[self.paper]
        saved = cls is ATM or cls.ablation or self.lab.fair
        options: dict[str, Any] = {"last_layer": "prefix" if saved and self._cls_head and paper.cls_only else "full"}
        if not (paper.prop_attn and self._published.prop_attn):
            options["prop_attn"] = False
        return options

    @cached_property
    def _cls_head(self) -> bool:
        """Whether the head reads nothing but the CLS token."""
        return plan_of(apply(shared_weights_copy(self.model), NoMerge())).last_layer(self.model) != "full"

    def rows(self, table: str | None = None) -> list[PaperRow]:
        """The paper's, baseline first."""
        return rows_of(self.paper, table)

    def atm(self, row: PaperRow, **options: Any) -> ATM:
        return ATM(row.alpha, row.beta, row.theta_min, **(self.options("ATM") | options))

    def nearest(self, gmacs: float) -> PaperRow:
        return min(self.rows()[1:], key=lambda row: abs(row.gmacs - gmacs))

    def build(self, name: str, strength: float) -> Method:
        """A method at a reduction strength in [0, 1]."""
        method = solvable_method(name).at_strength(strength, self.reference.depth, self.reference.tokens)
        return replace(method, **self.options(name))

    def solve(self, name: str, ratio: float, row: PaperRow | None = None, **options: Any) -> Method:
        """A method at this fraction of the baseline's GMACs, measured on all images. `row`: ATM with the α and β of this
        row, and θ_min solved for. `options`: other fields of the method."""
        what = f"{name} {ratio:.6g} {self.options(name)} {row} {options}"
        journal = self._solved
        known = {key: from_dict(method) for key, method in journal.rows}
        if what not in known:
            self.lab.progress(f"{self.label}: {name} at {ratio:.0%} of the GMACs", 0)

            def build(strength: float) -> Method:
                if row is None:
                    return replace(self.build(name, strength), **options)
                return self.atm(replace(row, theta_min=1 - strength), **options)

            known[what] = self._solve(build, ratio)
            if self.lab.group.is_main:
                journal.add((what, known[what].to_dict()))
            else:
                journal.rows.append((what, known[what].to_dict()))
        return known[what]

    def _solve(self, build: Callable[[float], Method], ratio: float) -> Method:
        def attempt(aim: float, turn: int) -> tuple[tuple[float, Method], float]:
            few = turn < 2
            found = solve_for_cost(build, ratio if turn == 2 else aim, self._few if few else self.reference)
            # Processes must measure the same config: on some devices their sums round differently.
            method = from_dict(self.lab.group.gather([found.to_dict()])[0])
            _, result = self.measure([method])
            miss = result.ratio - ratio
            return (abs(miss), method), 0.0 if abs(miss) < CLOSE * ratio else -miss

        return min(approach(attempt, ratio, turns=5), key=lambda tried: tried[0])[1]

    @cached_property
    def _solved(self) -> Journal:
        run = f"configs, version 1, {self.images.identity} {self.batch_size} {self.lab.head}"
        journal = Journal(self._kept(run) / "solved.jsonl", run, "configs")
        journal.rows = self.lab.group.gather([journal.rows])[0]
        return journal

    def stress(self, name: str) -> Result | None:
        """The cheapest config of a method without loss, by bisection over its reduction strength; None if there is none."""
        best: Result | None = None

        def keeps(strength: float) -> bool:
            nonlocal best
            base, found = self.measure([self.build(name, strength)])
            kept = self.keeps(found, base)
            best = found if kept else best
            return kept

        self.lab.progress(f"{self.label}: {name} without loss", 0)
        bisect(keeps, 0.0, 1.0, STRESS_STEPS)
        return best

    def keeps(self, found: Result, base: Result) -> bool:
        """Whether nothing is lost: without labels, no prediction changes."""
        return without_loss(found, base, self.lab.tolerance, min_agreement=1.0)

    def measure(self, methods: Sequence[Method], batch_size: int | None = None) -> list[Result]:
        """The baseline and each method, on all images."""
        size = batch_size or self.batch_size
        new = [method for method in dict.fromkeys(methods) if (repr(method), size) not in self._known]
        if new or (BASELINE, size) not in self._known:
            self.lab.progress(f"{self.label}: {len(new)} configs on {self.images.size} images, batches of {size}", 0)
            for result in self._evaluate(self.model, {repr(method): method for method in new}, size):
                self._known[result.name, size] = result
        return [self._known[BASELINE, size], *(self._known[repr(method), size] for method in methods)]

    def schedule(self, recipe: str = "atm") -> Recipe:
        """A published recipe; its epochs are scaled as the paper's 30 are."""
        return find_recipe(recipe).scaled(self.lab.epochs / PAPER_EPOCHS)

    def finetuned(self, method: Method, recipe: str = "atm") -> tuple[Result, float] | None:
        """After a recipe on the training set, compared with the original model; and the seconds that training took. None
        if there is no training set."""
        source = self.lab.training()
        if source is None:
            return None
        images = training_images(source, self.model, labels=self.lab.train_labels)
        if self.lab.sample is not None:
            images, _ = images.split(self.lab.sample, seed=0)
        processes = self.lab.group.size
        micro = max(min(64, images.size // processes), 1)
        at_once = micro * processes
        published = self.schedule(recipe)
        batch_size = max(min(published.batch_size, images.size) // at_once, 1) * at_once
        schedule = replace(published, batch_size=batch_size, micro_batch=micro)
        folder = self._kept(f"fine-tuned {method!r} {schedule} {images.identity}")
        key = (f"fine-tuned {method!r}", self.batch_size)
        if key not in self._known:
            self.lab.progress(f"{self.label}: fine-tuning {method!r}, {schedule.epochs} epochs of {images.size} images", 0)
            model = copy.deepcopy(self.model)
            cpu = self.lab.device == "cpu"
            trained = finetune(model, images, method, folder, schedule, workers=self.lab.workers, cpu=cpu)
            tuned = {key[0]: trained}
            _, self._known[key] = self._evaluate(model.to(self.lab.device), tuned, self.batch_size, self.model, folder.name)
        return self._known[key], training_seconds(folder)

    def _evaluate(
        self, model: nn.Module, methods: Mapping[str, Method], size: int, baseline: nn.Module | None = None, run: str = ""
    ) -> list[Result]:
        """`run`: of fine-tuning, where the model is the result of one."""
        resume = self._kept(f"{dict(methods)} {size} {self.lab.head} {self.images.identity}{run}")
        return evaluate(
            model,
            self.images,
            methods,
            batch_size=size,
            convention=self.convention,
            baseline=baseline,
            timed_batches=0,
            resume=resume,
            group=self.lab.group,
            baseline_outputs=self._baseline.setdefault(size, {}),
        )

    def _kept(self, what: str) -> Path:
        return self.lab.out / "kept" / f"{self.name}-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
