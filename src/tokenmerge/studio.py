"""What the page of web.py shows of a model, an image and the knobs; nothing of a visitor is kept."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from threading import Lock

import torch
from PIL import Image
from torch import Tensor, nn

from . import embedded
from .calibration import calibrate
from .loading import Images
from .measuring import Reference, Seen, distances, has_classes, observe
from .methods import ATM, METHODS, Method, NoMerge, from_dict
from .searching import at_cost
from .sources import reading_for
from .surgery import twin
from .visualization import draw_maps, enlarge, to_pil

MAX_BYTES = 8 * 2**20
MAX_PIXELS = 50_000_000
FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
NEIGHBOURS = 7  # images that share the batch where one number of merges is taken for all
CALIBRATED, UNMERGED = "ATM, calibrated", "none"
RIVALS = ("ToMe", "EViT", "MCTF", "ZeroTPrune", "PiToMe", "DiffRate", "RandomMerge")
UNTOUCHED = NoMerge(last_layer="full")
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5)


@dataclass(frozen=True)
class Setting:
    """What the knobs say."""

    method: str
    by_budget: bool = True
    budget: float = 0.6
    alpha: float = 0.98
    beta: float = 0.04
    theta_min: float = 0.84
    split_layer: int = 9
    each: bool = True


@dataclass(frozen=True)
class View:
    """One method on one image."""

    method: Method
    picture: Image.Image  # the merge map after the layer that was asked for
    tokens: list[int]  # after every layer
    top: list[tuple[str, float]]  # the five likeliest answers
    distance: float
    ratio: float  # of the unmerged GMACs
    gmacs: float
    milliseconds: float  # of an image


class BadUpload(ValueError):
    """Said on the page."""


@dataclass
class Studio:
    """A model and some images. Nothing of a visitor is in here: every call gets all that it needs."""

    model: nn.Module
    images: Images
    name: str
    curve: Sequence[tuple[float, Method]] = ()  # calibrated settings by their fraction of the GMACs
    _solved: dict[tuple[str, float], Method] = field(default_factory=dict)
    _solving: Lock = field(default_factory=Lock)  # visitors come in threads, and `reference` has one model

    def __post_init__(self) -> None:
        few = self.images.split(min(8, self.images.size), seed=0)[0]
        self.reference = Reference(self.model, few, batch_size=8)
        self.transform = reading_for(self.model, None, None).transform
        self.samples = next(self.images.take(range(min(24, self.images.size))).batches(24))

    @property
    def names(self) -> list[str]:
        """Of the methods to choose from."""
        return [*([CALIBRATED] if self.curve else []), "ATM", *RIVALS, UNMERGED]

    def picture(self, x: Tensor) -> Image.Image:
        """A normalised image [3,H,W] as people see it."""
        return to_pil(enlarge(self.images.picture(x)))

    def read(self, path: str | Path) -> Tensor:
        """An uploaded file as the model wants it, [3,H,W]. The file is removed, whatever it was."""
        path = Path(path)
        try:
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise BadUpload(f"the file has {size / 2**20:.1f} MiB; at most {MAX_BYTES // 2**20} are taken")
            try:
                with warnings.catch_warnings(), Image.open(path, formats=FORMATS) as opened:
                    warnings.simplefilter("ignore")
                    if opened.width * opened.height > MAX_PIXELS:
                        pixels = f"{opened.width} × {opened.height} pixels"
                        raise BadUpload(f"the image has {pixels}; at most {MAX_PIXELS // 10**6} million are taken")
                    opened.draft("RGB", (512, 512))
                    return self.transform(opened.convert("L" if len(self.images.mean) == 1 else "RGB"))
            except BadUpload:
                raise
            except Exception as error:  # decoders raise all sorts of things on broken files
                raise BadUpload(f"this is no image that can be read ({', '.join(FORMATS)})") from error
        finally:
            path.unlink(missing_ok=True)

    def method(self, setting: Setting) -> Method:
        if setting.method == UNMERGED:
            return UNTOUCHED
        if setting.method == CALIBRATED:
            return min(self.curve, key=lambda point: abs(point[0] - setting.budget))[1]
        if setting.method == "ATM" and not setting.by_budget:
            found: Method = ATM(
                setting.alpha, setting.beta, setting.theta_min, min(setting.split_layer, self.reference.depth)
            )
        else:
            found = self._at(setting.method, round(setting.budget, 2))
        return replace(found, batch="each" if setting.each else "mean") if isinstance(found, ATM) else found

    def _at(self, name: str, budget: float) -> Method:
        """A method at this fraction of the GMACs, on the few images."""
        with self._solving:
            if (name, budget) not in self._solved:
                depth, tokens = self.reference.depth, self.reference.tokens
                self._solved[name, budget] = at_cost(
                    lambda strength: METHODS[name].at_strength(strength, depth, tokens), budget, self.reference, steps=9
                )
            return self._solved[name, budget]

    @torch.inference_mode()
    def look(self, x: Tensor, settings: Sequence[Setting], layer: int) -> list[View]:
        """The unmerged model on one image [3,H,W], then a method a setting. Where one number of merges is taken for a whole
        batch, some of the samples share it."""
        model, picture = twin(self.model), enlarge(self.images.picture(x))
        observe(model, UNTOUCHED, x[None])  # what a first call prepares is nobody's time

        def run(method: Method, batch: Tensor) -> tuple[Seen, float]:
            start = time.perf_counter()
            seen = observe(model, method, batch)
            return seen, 1e3 * (time.perf_counter() - start) / len(batch)

        base, milliseconds = run(UNTOUCHED, x[None])
        whole = float(base.trace.cost("paper").per_image[0])

        def view(method: Method, seen: Seen, milliseconds: float, shown: Tensor) -> View:
            gmacs = float(seen.trace.cost("paper").per_image[0])
            distance = float(distances(seen.features[:1], base.features)[0])
            tokens = [int(after[0]) for after in seen.trace.tokens]
            top = self.answers(seen.logits[0])
            return View(method, to_pil(shown), tokens, top, distance, gmacs / whole, gmacs, milliseconds)

        views = [view(UNTOUCHED, base, milliseconds, picture)]
        for setting in settings:
            method = self.method(setting)
            shared = setting.method == "ATM" and not setting.each
            batch = torch.cat((x[None], self.samples.images[:NEIGHBOURS])) if shared else x[None]
            maps = draw_maps(self.model, batch, [picture], replace(method, last_layer="full"), range(1, layer + 1))[0]
            views.append(view(method, *run(method, batch), maps.pictures[-1]))
        return views

    def answers(self, logits: Tensor) -> list[tuple[str, float]]:
        if not has_classes(self.model):
            return []
        top = logits.float().softmax(0).topk(min(5, len(logits)))
        return [(self._class(int(i)), float(p)) for p, i in zip(*top, strict=True)]

    def _class(self, index: int) -> str:
        if self.name == embedded.NAME:
            return embedded.CLASSES[index]
        outputs = getattr(self.model, "num_classes", None)
        if outputs == 1000:
            from timm.data import ImageNetInfo

            return ImageNetInfo().index_to_description(index)
        return f"class {index}"


def embedded_curve() -> list[tuple[float, Method]]:
    """Settings calibrated for the embedded model (experiments/calibrate_curve.py)."""
    rows = json.loads(files(embedded.__name__).joinpath("curve.json").read_text(encoding="utf-8"))
    return [(row["ratio"], from_dict(row["method"])) for row in rows]


def open_studio(model: nn.Module, images: Images, name: str, *, fit: bool, say: Callable[[str], object]) -> Studio:
    """`fit`: calibrate settings for the budget knob; the embedded model has its own."""
    if name == embedded.NAME:
        return Studio(model, images, name, embedded_curve())
    curve: list[tuple[float, Method]] = []
    for budget in BUDGETS if fit else ():
        say(f"calibrating for {budget:.0%} of the GMACs")
        found = calibrate(model, images, gmacs=budget, sample=16, rounds=1)
        curve.append((found.ratio, found.method))
    return Studio(model, images, name, curve)
