"""A canary for a merged model in production: a fraction of the images also runs through the baseline, and a test that may be
looked at after every image watches for more changed predictions than promised."""

from __future__ import annotations

import hashlib
import math
import queue
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.features import cosine_distances, has_classes, run_model
from ..engine.patch import apply, is_applied, plan_of, shared_weights_copy
from ..engine.trace import count_tokens
from ..methods.base import Method
from ..methods.no_merge import NoMerge
from ..utils.optional import require_package
from ..utils.statistics import RateTest

STATE_VERSION = 1
HASHED = 4096  # values of an image


@dataclass(frozen=True)
class Alarm:
    """Why a canary rang."""

    kind: str  # "predictions": more change than promised; "drift": images keep other numbers of tokens than in calibration
    message: str
    metrics: Mapping[str, float]


class DriftTest:
    """Whether numbers come from the same distribution as a first sample, however often one looks (conformal test
    martingale): the rank of a new number among all earlier ones is uniform if nothing has changed, and bets against that
    grow beyond 1/α with probability α at the most."""

    BETS = (-1.6, -0.8, -0.3, 0.3, 0.8, 1.6)

    def __init__(self, first: Sequence[int], alpha: float) -> None:
        self.alpha = alpha
        self.counts: dict[int, int] = {}
        for value in first:
            self.counts[value] = self.counts.get(value, 0) + 1
        self.log_capital = [0.0] * len(self.BETS)
        self.peak = 1.0

    def add(self, value: int, tie: float) -> None:
        """`tie`: uniform in [0, 1), and not chosen by the value."""
        total = sum(self.counts.values()) + 1
        above = sum(count for other, count in self.counts.items() if other > value)
        rank = (above + tie * (self.counts.get(value, 0) + 1)) / total
        self.counts[value] = self.counts.get(value, 0) + 1
        self.log_capital = [
            log + math.log1p(bet * (rank - 0.5)) for log, bet in zip(self.log_capital, self.BETS, strict=True)
        ]
        self.peak = max(self.peak, self.evidence)

    @property
    def evidence(self) -> float:
        return math.fsum(math.exp(min(log, 700.0)) for log in self.log_capital) / len(self.BETS)

    @property
    def alarm(self) -> bool:
        return self.peak >= 1 / self.alpha


class Canary:
    """Calls a merged model, and watches it.

    model: a merged model (`tokenmerge.apply`). The baseline is a copy that shares its weights.
    fraction: of the images that also run through the baseline, chosen by a hash of the image: the same image is always
        chosen, or never.
    promise: at least this fraction of the predictions stays.
    confidence: a false alarm has probability 1 − confidence at the most, over all time.
    on_alarm: called once per kind of alarm, by the thread that found it; without it, a warning.
    fallback: after an alarm about predictions, requests run through the baseline.
    background: the baseline runs in a thread of its own, off the critical path; a full queue of `waiting` requests drops
        samples, never requests.
    expected_tokens: numbers of tokens left per image, from calibration (`tokens_left`): all requests are compared with
        them, at no cost but counting. Configs that leave the same number in every image have nothing to compare.
    state: of an earlier canary (`state()`), to resume.
    """

    def __init__(
        self,
        model: nn.Module,
        fraction: float = 0.01,
        promise: float = 0.99,
        *,
        confidence: float = 0.95,
        on_alarm: Callable[[Alarm], None] | None = None,
        fallback: bool = False,
        background: bool = True,
        waiting: int = 64,
        expected_tokens: Sequence[int] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        if not is_applied(model):
            raise ValueError("a canary watches a merged model: tokenmerge.apply(model, method) first")
        for name, value in (("fraction", fraction), ("promise", promise), ("confidence", confidence)):
            if not 0 < value <= 1 or (value == 1 and name != "fraction"):
                raise ValueError(f"{name} must be a number between 0 and 1, not {value!r}")
        if not has_classes(model):
            raise ValueError(
                f"a canary compares predicted classes, and this {type(model).__name__} returns features; wrap it in a "
                "ZeroShotClassifier, or apply to the classifier as a whole"
            )
        self.model = model
        self.fraction = fraction
        self.promise = promise
        self.on_alarm = on_alarm
        self.fallback = fallback
        self.method: Method = plan_of(model).method
        self._baseline = apply(shared_weights_copy(model), NoMerge(last_layer="full"))
        self._unpatched = shared_weights_copy(model)
        self._lock = threading.Lock()
        self._rate = RateTest(1 - promise, confidence)
        self._drift = None if expected_tokens is None else DriftTest(list(expected_tokens), 1 - confidence)
        self._distance = 0.0
        self._images = self._dropped = 0
        self._rung: set[str] = set()
        if state is not None:
            self._restore(state)
        self._queue: queue.Queue[tuple[Tensor, Tensor, Tensor] | None] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._work, name="tokenmerge canary", daemon=True)
            self._thread.start()

    def __call__(self, images: Tensor) -> Tensor:
        """Logits [B,K] of a request."""
        chosen, ties = self._choose(images)
        if self.falling_back:
            with torch.inference_mode():
                return run_model(self._unpatched, images).logits
        with torch.inference_mode():
            if self._drift is None and not chosen:
                logits = run_model(self.model, images).logits
                with self._lock:
                    self._images += len(images)
                return logits
            if self._drift is None:
                out = run_model(self.model, images)
            else:
                with count_tokens(self.model) as counter:
                    out = run_model(self.model, images)
                self._watch_tokens(torch.cat(counter.calls).tolist(), ties)
        with self._lock:
            self._images += len(images)
        if chosen:
            sample = (images[chosen], out.logits[chosen], out.features[chosen])
            if self._thread is None:
                self._check(*sample)
            else:
                try:
                    self._queue.put_nowait(tuple(part.clone() for part in sample))  # type: ignore[arg-type]
                except queue.Full:
                    with self._lock:
                        self._dropped += len(chosen)
        return out.logits

    @staticmethod
    def tokens_left(t: Any) -> list[int]:
        """Tokens that enter the last layer, per image of a trace: what a canary compares."""
        found: list[int] = t.tokens_in[-1].tolist()
        return found

    @property
    def falling_back(self) -> bool:
        """Whether requests run through the baseline."""
        return self.fallback and "predictions" in self._rung

    def flush(self) -> None:
        """Wait until every sample in the queue is checked."""
        if self._thread is not None:
            self._queue.join()

    def close(self) -> None:
        """Check what is in the queue, and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def metrics(self) -> dict[str, float]:
        """Counters and bounds, as they are now."""
        with self._lock:
            n = self._rate.trials
            low, high = self._rate.interval()
            return {
                "images": self._images,
                "sampled": n,
                "dropped": self._dropped,
                "disagreements": self._rate.failures,
                "disagreement_low": low,
                "disagreement_high": high,
                "evidence": self._rate.evidence,
                "mean_distance": self._distance / n if n else 0.0,
                "drift_evidence": 1.0 if self._drift is None else self._drift.evidence,
                "alarm": float("predictions" in self._rung),
                "drift_alarm": float("drift" in self._rung),
                "falling_back": float(self.falling_back),
            }

    def prometheus(self) -> bytes:
        """The metrics in Prometheus' text format."""
        require_package("prometheus_client", "metrics for Prometheus")
        from prometheus_client import CollectorRegistry, Gauge, generate_latest

        registry = CollectorRegistry()
        for name, value in self.metrics().items():
            Gauge(f"tokenmerge_canary_{name}", name.replace("_", " "), registry=registry).set(value)
        found: bytes = generate_latest(registry)
        return found

    def state(self) -> dict[str, Any]:
        """Everything that was counted, as JSON keeps it."""
        with self._lock:
            return {
                "version": STATE_VERSION,
                "method": self.method.to_dict(),
                "promise": self.promise,
                "rate": self._rate.state(),
                "distance": self._distance,
                "images": self._images,
                "dropped": self._dropped,
                "rung": sorted(self._rung),
                "drift": None
                if self._drift is None
                else {
                    "counts": sorted(self._drift.counts.items()),
                    "log_capital": self._drift.log_capital,
                    "peak": self._drift.peak,
                },
            }

    def _restore(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != STATE_VERSION:
            raise ValueError(f"state of a canary, version {state.get('version')!r}; this release reads {STATE_VERSION}")
        if state["method"] != self.method.to_dict() or state["promise"] != self.promise:
            raise ValueError("this state is of another config or promise; start a new canary without it")
        self._rate.restore(state["rate"])
        self._distance, self._images, self._dropped = state["distance"], state["images"], state["dropped"]
        self._rung = set(state["rung"])
        if self._drift is not None and state["drift"] is not None:
            self._drift.counts = {int(value): int(count) for value, count in state["drift"]["counts"]}
            self._drift.log_capital = list(state["drift"]["log_capital"])
            self._drift.peak = state["drift"]["peak"]

    def _choose(self, images: Tensor) -> tuple[list[int], list[float]]:
        """The positions of the images that are sampled, and a number in [0, 1) for each image."""
        digests = [hashlib.blake2b(_bytes(image), digest_size=16).digest() for image in images]
        chosen = [i for i, d in enumerate(digests) if int.from_bytes(d[:8], "little") < self.fraction * 2**64]
        return chosen, [int.from_bytes(d[8:], "little") / 2**64 for d in digests]

    def _work(self) -> None:
        while (sample := self._queue.get()) is not None:
            try:
                self._check(*sample)
            except Exception as error:  # a sample must not end the watch
                warnings.warn(f"a canary could not check a sample: {error}", RuntimeWarning, stacklevel=1)
            finally:
                self._queue.task_done()
        self._queue.task_done()

    def _check(self, images: Tensor, logits: Tensor, features: Tensor) -> None:
        """Run samples through the baseline, and count."""
        with torch.inference_mode():
            baseline = run_model(self._baseline, images)
        failed = (baseline.logits.argmax(1) != logits.argmax(1)).tolist()
        distances = cosine_distances(features, baseline.features).tolist()
        with self._lock:
            for one, distance in zip(failed, distances, strict=True):
                self._rate.add(one)
                self._distance += distance
            rings = self._rate.alarm and "predictions" not in self._rung
            if rings:
                self._rung.add("predictions")
        if rings:
            k, n = self._rate.failures, self._rate.trials
            self._ring(
                "predictions", f"{k} of {n} sampled predictions changed; promised were at most {1 - self.promise:.2%}"
            )

    def _watch_tokens(self, tokens: Sequence[int], ties: Sequence[float]) -> None:
        assert self._drift is not None
        with self._lock:
            for value, tie in zip(tokens, ties, strict=True):
                self._drift.add(value, tie)
            rings = self._drift.alarm and "drift" not in self._rung
            if rings:
                self._rung.add("drift")
        if rings:
            self._ring("drift", "images keep other numbers of tokens than in calibration")

    def _ring(self, kind: str, message: str) -> None:
        alarm = Alarm(kind, message, self.metrics())
        if self.on_alarm is not None:
            self.on_alarm(alarm)
        else:
            warnings.warn(f"canary: {message}", RuntimeWarning, stacklevel=3)


def _bytes(image: Tensor) -> Any:
    """A few thousand values of an image, for its hash: all of them would take a twentieth of a small model's time."""
    flat = image.detach().flatten()
    return flat[:: max(1, flat.numel() // HASHED)].cpu().contiguous().view(torch.uint8).numpy().data
