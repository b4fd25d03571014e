"""Times configs of one model in one runtime at one batch size, and keeps what it measured, so that a run can resume."""

from __future__ import annotations

import copy
import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.fused import available as kernels_available
from ..data.checkpoint import weights_digest
from ..data.images import Images
from ..deployment.runtimes import EAGER, check_runtime, prepare
from ..engine.patch import adapter_of, apply, shared_weights_copy
from ..evaluation.bench import Variant, time_variants
from ..evaluation.reference import FULL, Reference
from ..methods.base import Method
from ..methods.no_merge import BASELINE
from ..utils.environment import cpu_features, describe_hardware
from ..utils.files import Journal
from ..utils.progress import Progress, no_progress
from .candidates import Candidate
from .latency import LatencyModel, measure_latency, price_configs

TIMINGS = "timings.jsonl"
ROUNDS = 11
STEPS = 7  # at most, to find a method's reduction strength for a time
CLOSE = 0.01  # of the baseline's time: near enough to end it
LEAST = 0.2  # of the baseline's time at full strength: a first guess


class Clock:
    """`images` are cut into batches; up to eight of them, with up to 16 images, or a single one are timed. `folder`: where
    timings are kept. `rounds`: of the timing of a config."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        *,
        runtime: str = EAGER,
        batch: int = 32,
        threads: int | None = None,
        rounds: int = ROUNDS,
        folder: str | Path | None = None,
        progress: Progress = no_progress,
    ) -> None:
        check_runtime(runtime)
        if batch < 1:
            raise ValueError(f"batch must be 1 or more, not {batch}")
        self.model = model
        self.images = images
        self.runtime = runtime
        self.batch = batch
        self.threads = threads or torch.get_num_threads()
        self.rounds = rounds
        self.progress = progress
        whole = torch.cat([images] * -(-batch // len(images)))
        self.chunks = tuple(chunk for chunk in torch.split(whole, batch)[: max(1, 16 // batch)][:8] if len(chunk) == batch)
        hardware = f"{describe_hardware()} {cpu_features()} fused kernels: {kernels_available()}"
        what = f"{weights_digest(model)} {hardware} {runtime} {batch} {self.threads}"
        digest = hashlib.sha256(what.encode())
        digest.update(images.cpu().float().numpy().tobytes())
        path = None if folder is None else Path(folder) / TIMINGS
        self.journal = Journal(path, f"timings, version 3, {digest.hexdigest()}", "timings")
        self._runs: dict[str, Callable[[Tensor], Any]] = {}  # what is prepared in the runtime, by config
        self._files: Path | None = None

    @classmethod
    def on(cls, model: nn.Module, images: Images, batch_size: int, **options: Any) -> Clock:
        """A clock on images that are read in batches of `batch_size`. `options`: those of `Clock`."""
        like = next(model.parameters())
        read = torch.cat([batch.images for batch in images.batches(batch_size)])
        return cls(model, read.to(like.device, like.dtype), **options)

    def at_batch(self, batch: int) -> Clock:
        """The same models at another batch size; timings are not kept."""
        clock = Clock(
            self.model, self.images, runtime=self.runtime, batch=batch, threads=self.threads, progress=self.progress
        )
        clock._runs, clock._files = self._runs, self._folder()
        return clock

    def at_scale(self, scale: int) -> Clock | None:
        """The same with images that are this many times as wide and high; None where the model's input size is fixed."""
        model = copy.deepcopy(self.model)
        try:
            adapter_of(model).resize(model, scale * self.images.shape[-1])
        except ValueError:
            return None
        images = F.interpolate(self.images, scale_factor=scale, mode="bilinear")
        return Clock(model, images, runtime=self.runtime, batch=self.batch, threads=self.threads, progress=self.progress)

    def _known(self, what: str) -> Any:
        return next((row["value"] for row in self.journal.rows if row["what"] == what), None)

    def latency(self, reference: Reference, candidates: Sequence[Candidate]) -> LatencyModel:
        """The latency model for these candidates."""
        what = f"latency {[repr(candidate) for candidate in candidates]}"
        known = self._known(what)
        if known is None:
            configs = price_configs(reference, candidates, single=self.runtime == EAGER)
            x = self.chunks[0]
            found = measure_latency(
                self.model, x, configs, runtime=self.runtime, threads=self.threads, progress=self.progress
            )
            known = found.to_dict()
            self.journal.add({"what": what, "value": known})
        return LatencyModel.from_dict(known)

    def time_ratio(self, method: Method) -> float:
        """The measured time as a fraction of the baseline's: interleaved, the median over rounds."""
        what = f"time {method!r}, {self.rounds} rounds"
        known: float | None = self._known(what)
        if known is None:
            variants = [
                Variant(BASELINE, FULL, self.prepared(None), self.runtime),
                Variant("merged", method, self.prepared(method), self.runtime),
            ]
            times = time_variants(variants, self.chunks, self.threads, self.rounds)
            known = median(own / base for base, own in zip(times[BASELINE], times["merged"], strict=True))
            self.journal.add({"what": what, "value": known})
        return known

    def solve(self, cls: type[Method], time: float, depth: int, tokens: int) -> Method:
        """A method at the reduction strength at which its measured time is nearest to this fraction of the baseline's."""
        tried: list[tuple[float, Method]] = []
        low, high = (0.0, 1.0), (1.0, LEAST)  # strength and time
        while len(tried) < STEPS and (not tried or tried[-1][0] > CLOSE):
            part = (low[1] - time) / (low[1] - high[1]) if low[1] > high[1] else 0.5  # time falls about linearly
            strength = low[0] + min(max(part, 0.1), 0.9) * (high[0] - low[0])
            method = cls.at_strength(strength, depth, tokens)
            ratio = self.time_ratio(method)
            tried.append((abs(ratio - time), method))
            low, high = ((strength, ratio), high) if ratio > time else (low, (strength, ratio))
        return min(tried, key=lambda entry: entry[0])[1]

    def prepared(self, method: Method | None) -> Callable[[Tensor], Any]:
        """The model with this method, or the baseline, in the runtime."""
        if (run := self._runs.get(repr(method))) is None:
            model = shared_weights_copy(self.model)
            folder = Path(tempfile.mkdtemp(dir=self._folder()))
            made = model if method is None else apply(model, method)
            run = self._runs[repr(method)] = prepare(made, self.runtime, self.chunks[0], folder, self.threads)
        return run

    def _folder(self) -> Path:
        """Where runtimes write their files, as long as this clock lives."""
        if self._files is None:
            self._files = Path(tempfile.mkdtemp())
            weakref.finalize(self, shutil.rmtree, self._files, ignore_errors=True)
        return self._files
