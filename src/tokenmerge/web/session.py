"""What the web demo shows of a model, an image and the controls; nothing of a visitor is kept."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from threading import Lock

import torch
from PIL import Image
from torch import Tensor, nn

from ..calibration.calibrate import calibrate
from ..calibration.search import solve_for_cost
from ..data import embedded
from ..data.images import Images
from ..data.preprocessing import preprocessing_for
from ..engine.features import Outputs, cosine_distances, has_classes
from ..engine.patch import adapter_of, apply, shared_weights_copy
from ..engine.trace import Trace
from ..evaluation.reference import FULL, Reference, observe
from ..methods.atm import ATM
from ..methods.base import Method, compared_methods, find_method
from ..methods.no_merge import BASELINE
from ..methods.serialization import from_dict
from ..utils.progress import Progress, no_progress
from ..visualization.merge_maps import draw_maps, enlarge, to_pil

MAX_BYTES = 8 * 2**20
MAX_PIXELS = 50_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
NEIGHBOURS = 7  # images that share the batch where one r is computed for all
CALIBRATED = "ATM, calibrated"
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5)


@dataclass(frozen=True)
class Controls:
    """The values of the controls, for one of the two methods."""

    method: str
    by_budget: bool = True
    budget: float = 0.6
    alpha: float = 0.98
    beta: float = 0.04
    theta_min: float = 0.84
    split_layer: int = 9
    per_image: bool = True


@dataclass(frozen=True)
class MethodView:
    """One method on one image."""

    method: Method
    picture: Image.Image  # the merge map after the layer that was asked for
    tokens: list[int]  # after every layer
    top: list[tuple[str, float]]  # the five most likely classes
    distance: float
    ratio: float  # of the baseline's GMACs
    gmacs: float
    milliseconds: float  # per image


class BadUpload(ValueError):
    """Shown in the demo."""


@dataclass
class DemoSession:
    """A model and some images. Nothing of a visitor is in here: every call gets everything that it needs."""

    model: nn.Module
    images: Images
    name: str
    curve: Sequence[tuple[float, Method]] = ()  # calibrated configs by their fraction of the GMACs
    _solved: dict[tuple[str, float], Method] = field(default_factory=dict)
    _solving: Lock = field(default_factory=Lock)  # visitors come in threads, and `reference` has one model

    def __post_init__(self) -> None:
        few = self.images.split(min(8, self.images.size), seed=0)[0]
        self.reference = Reference(self.model, few, batch_size=8)
        self.transform = preprocessing_for(self.model).transform
        self.samples = next(self.images.take(range(min(24, self.images.size))).batches(24))
        self.class_names = adapter_of(self.model).class_names(self.model)

    @property
    def names(self) -> list[str]:
        """The methods to choose from."""
        return [*([CALIBRATED] if self.curve else []), *compared_methods(), BASELINE]

    def picture(self, x: Tensor) -> Image.Image:
        """A normalised image [3,H,W] as people see it."""
        return to_pil(enlarge(self.images.denormalise(x)))

    def read(self, path: str | Path) -> Tensor:
        """An uploaded file as the model takes it, [3,H,W]. The file is removed in any case."""
        path = Path(path)
        try:
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise BadUpload(f"the file has {size / 2**20:.1f} MiB; at most {MAX_BYTES // 2**20} are accepted")
            try:
                with warnings.catch_warnings(), Image.open(path, formats=FORMATS) as opened:
                    warnings.simplefilter("ignore")
                    if opened.width * opened.height > MAX_PIXELS:
                        pixels = f"{opened.width} × {opened.height} pixels"
                        raise BadUpload(f"the image has {pixels}; at most {MAX_PIXELS // 10**6} million are accepted")
                    opened.draft("RGB", (512, 512))
                    return self.transform(opened.convert("L" if len(self.images.mean) == 1 else "RGB"))
            except BadUpload:
                raise
            except Exception as error:  # decoders raise all sorts of errors on broken files
                raise BadUpload(f"this is not a readable image ({', '.join(FORMATS)})") from error
        finally:
            path.unlink(missing_ok=True)

    def method(self, controls: Controls) -> Method:
        if controls.method == BASELINE:
            return FULL
        if controls.method == CALIBRATED:
            return min(self.curve, key=lambda point: abs(point[0] - controls.budget))[1]
        if controls.method == ATM.__name__ and not controls.by_budget:
            split_layer = min(controls.split_layer, self.reference.depth)
            method: Method = ATM(controls.alpha, controls.beta, controls.theta_min, split_layer)
        else:
            method = self._solve(controls.method, round(controls.budget, 2))
        return method.with_batch("each" if controls.per_image else "mean")

    def _solve(self, name: str, budget: float) -> Method:
        """A method at this fraction of the GMACs, on a few images."""
        with self._solving:
            if (name, budget) not in self._solved:
                cls = find_method(name)
                depth = self.reference.depth
                tokens = self.reference.tokens
                self._solved[name, budget] = solve_for_cost(
                    lambda strength: cls.at_strength(strength, depth, tokens), budget, self.reference, steps=9
                )
            return self._solved[name, budget]

    @torch.inference_mode()
    def look(self, x: Tensor, controls: Sequence[Controls], layer: int) -> list[MethodView]:
        """The baseline on one image [3,H,W], then one view per method. Where one r is computed for a whole batch, some of
        the samples share the batch."""
        model = shared_weights_copy(self.model)
        picture = enlarge(self.images.denormalise(x))
        observe(apply(model, FULL), x[None])  # warm up

        def run(method: Method, batch: Tensor) -> tuple[Outputs, Trace, float]:
            apply(model, method)
            start = time.perf_counter()
            out, t = observe(model, batch)
            return out, t, 1e3 * (time.perf_counter() - start) / len(batch)

        base, base_trace, milliseconds = run(FULL, x[None])
        baseline_gmacs = float(base_trace.cost("paper").per_image[0])

        def view(method: Method, out: Outputs, t: Trace, milliseconds: float, shown: Tensor) -> MethodView:
            gmacs = float(t.cost("paper").per_image[0])
            return MethodView(
                method,
                to_pil(shown),
                [int(after[0]) for after in t.tokens],
                self.top_classes(out.logits[0]),
                float(cosine_distances(out.features[:1], base.features)[0]),
                gmacs / baseline_gmacs,
                gmacs,
                milliseconds,
            )

        views = [view(FULL, base, base_trace, milliseconds, picture)]
        for one in controls:
            method = self.method(one)
            shared = not method.batch_invariant and method.with_batch("each").batch_invariant  # r is the mean over a batch
            batch = torch.cat((x[None], self.samples.images[:NEIGHBOURS])) if shared else x[None]
            maps = draw_maps(self.model, batch, [picture], replace(method, last_layer="full"), range(1, layer + 1))[0]
            views.append(view(method, *run(method, batch), maps.pictures[-1]))
        return views

    def top_classes(self, logits: Tensor) -> list[tuple[str, float]]:
        if not has_classes(self.model):
            return []
        top = logits.float().softmax(0).topk(min(5, len(logits)))
        return [(self._class_name(int(i)), float(p)) for p, i in zip(*top, strict=True)]

    def _class_name(self, index: int) -> str:
        return f"class {index}" if self.class_names is None else self.class_names[index]


def embedded_curve() -> list[tuple[float, Method]]:
    """Configs calibrated for the embedded model (experiments/calibrate_curve.py)."""
    rows = json.loads(files(embedded.__name__).joinpath("curve.json").read_text(encoding="utf-8"))
    return [(row["ratio"], from_dict(row["method"])) for row in rows]


def open_session(model: nn.Module, images: Images, name: str, *, fit: bool, progress: Progress = no_progress) -> DemoSession:
    """`fit`: calibrate configs for the budget control; the embedded model has its own."""
    if name == embedded.NAME:
        return DemoSession(model, images, name, embedded_curve())
    curve: list[tuple[float, Method]] = []
    for budget in BUDGETS if fit else ():
        progress(f"calibrating for {budget:.0%} of the GMACs", 0)
        found = calibrate(model, images, gmacs=budget, sample=16, rounds=1)
        curve.append((found.ratio, found.method))
    return DemoSession(model, images, name, curve)
