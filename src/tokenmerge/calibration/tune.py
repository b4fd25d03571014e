"""The paper's own sweep: α, β and θ_min on its grid, GMACs against quality, with Optuna.

A study is kept in a database. Every process that opens the same one, on this or another machine, adds to it. What a killed
process had finished stays; what it was working on is given up after two minutes and tried again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from ..core.matching import Batch
from ..core.schedule import default_split_layer
from ..data.load import Source, as_images
from ..evaluation.measurement import Measured, Measurement
from ..evaluation.reference import Reference
from ..methods.atm import ATM
from ..utils.logging import Log, no_log
from ..utils.optional import require_package
from ..utils.progress import Progress, no_progress

Quality = Literal["accuracy", "agreement", "distance"]

# Lowest, highest, step: section "sweep" of the paper.
GRID = {"alpha": (0.945, 1.0, 0.005), "beta": (0.015, 0.05, 0.005), "theta_min": (0.8, 0.945, 0.005)}


@dataclass(frozen=True)
class Tuned(Measured):
    """One finished trial."""

    number: int
    alpha: float
    beta: float
    theta_min: float
    split_layer: int
    measurement: Measurement
    pareto: bool  # no other trial is both cheaper and better

    @property
    def accuracy(self) -> float | None:
        return self.top1

    def row(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "alpha": self.alpha,
            "beta": self.beta,
            "theta_min": self.theta_min,
            "split_layer": self.split_layer,
            "gmacs": self.gmacs,
            "ratio": self.ratio,
            "agreement": self.agreement,
            "distance": self.distance,
            "accuracy": self.accuracy,
            "pareto": self.pareto,
        }


def tune(
    model: nn.Module,
    images: Source,
    *,
    trials: int = 100,
    quality: Quality | None = None,
    split_layer: bool = False,
    batch: Batch = "mean",
    storage: str | None = None,
    study: str = "tokenmerge",
    sample: int | None = None,
    batch_size: int = 32,
    seed: int = 0,
    log: Log = no_log,
    progress: Progress = no_progress,
) -> list[Tuned]:
    """Run trials until the study has this many finished ones; returns all of them, sorted by GMACs.

    `quality`: accuracy (the default where labels are known), agreement with the baseline, or distance. `storage`: any URL
    that Optuna takes, such as sqlite:///study.db; without it nothing is kept, and `seed` makes the search repeatable.
    Images are held in memory: `sample` draws this many of them. `split_layer`: search l_s, too. `log` gets the figures of
    each trial."""
    require_package("optuna", "sweeps")
    import optuna
    from optuna.trial import TrialState

    images = as_images(images, model)
    reference = Reference(model, images if sample is None else images.split(sample, seed)[0], batch_size=batch_size)
    quality = quality or ("agreement" if reference.labels is None else "accuracy")
    if quality not in get_args(Quality):
        raise ValueError(f"unknown quality {quality!r}; known: {', '.join(get_args(Quality))}")
    if quality == "accuracy" and reference.labels is None:
        raise ValueError(f"{images.name}: accuracy needs labels; use agreement or distance")

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        params = {
            name: round(trial.suggest_float(name, low, high, step=step), 3) for name, (low, high, step) in GRID.items()
        }
        depth = reference.depth
        layer = trial.suggest_int("split_layer", 0, depth) if split_layer else default_split_layer(depth)
        measurement = reference.measure(ATM(**params, split_layer=layer, batch=batch))
        trial.set_user_attr("measurement", measurement.to_dict())
        values = {"ratio": measurement.ratio, "gmacs": measurement.gmacs, "distance": measurement.distance}
        values |= {"agreement": measurement.agreement or 0.0}
        if measurement.top1 is not None:
            values["accuracy"] = measurement.top1
        log(trial.number, values)
        progress("trials", 1, trials)
        return values["gmacs"], values[quality]

    identity = {"images": reference.fingerprint(), "quality": quality, "batch": batch, "split_layer": split_layer}
    opened = _open_study(study, storage, "minimize" if quality == "distance" else "maximize", seed, identity)
    done = (TrialState.COMPLETE,)
    if len(opened.get_trials(deepcopy=False, states=done)) < trials:
        opened.optimize(objective, callbacks=[optuna.study.MaxTrialsCallback(trials, states=done)])
    return _rows(opened, done, default_split_layer(reference.depth))


def _open_study(name: str, storage: str | None, direction: str, seed: int, identity: dict[str, Any]) -> Any:
    """Create or load the study; one of another model, images or options is refused."""
    import optuna
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

    database: Any = storage
    if storage is not None and "://" in storage and storage.startswith(("sqlite", "mysql", "postgresql")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            database = RDBStorage(
                storage,
                heartbeat_interval=30,
                grace_period=120,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(),
            )
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=name,
        storage=database,
        directions=["minimize", direction],
        # Processes that share a study must not propose the same trials.
        sampler=optuna.samplers.TPESampler(seed=seed if storage is None else None),
        load_if_exists=True,
    )
    if any(study.user_attrs.get(key, value) != value for key, value in identity.items()):
        raise ValueError(
            f"the study {name!r} is of another model, other images or options, or of another version of tokenmerge; "
            "choose another name or storage"
        )
    for key, value in identity.items():
        study.set_user_attr(key, value)
    return study


def _rows(study: Any, states: Any, split_layer: int) -> list[Tuned]:
    best = {trial.number for trial in study.best_trials}
    rows = [
        Tuned(
            trial.number,
            **{name: round(trial.params[name], 3) for name in GRID},
            split_layer=trial.params.get("split_layer", split_layer),
            measurement=Measurement.from_dict(trial.user_attrs["measurement"]),
            pareto=trial.number in best,
        )
        for trial in study.get_trials(deepcopy=False, states=states)
    ]
    return sorted(rows, key=lambda row: row.gmacs)


def tuning_figure(rows: Sequence[Tuned], quality: Quality) -> Any:
    """All trials, and the Pareto front."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.4))
    axis.plot([row.gmacs for row in rows], [getattr(row, quality) for row in rows], ".", color="grey", label="trials")
    best = [row for row in rows if row.pareto]
    axis.plot([row.gmacs for row in best], [getattr(row, quality) for row in best], "o-", label="Pareto front")
    axis.set(xlabel="GMACs per image", ylabel=quality, yscale="log" if quality == "distance" else "linear")
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure
