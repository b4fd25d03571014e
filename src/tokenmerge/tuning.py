"""The paper's own search: α, β and θ_min on its grid, GMACs against quality, with Optuna.

A study lives in a database. Whoever opens the same one, on this or another machine, adds to it; what a killed process
had finished stays, and what it was at is given up after two minutes and tried again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from .extras import need
from .loading import Source, as_images
from .measuring import Reference
from .methods import ATM
from .methods.base import Batch
from .schedule import default_split_layer

Quality = Literal["accuracy", "agreement", "distance"]

# Lowest, highest, step: section "sweep" of the paper.
ALPHA, BETA, THETA_MIN = (0.945, 1.0, 0.005), (0.015, 0.05, 0.005), (0.8, 0.945, 0.005)


@dataclass(frozen=True)
class Tuned:
    """One finished trial."""

    number: int
    alpha: float
    beta: float
    theta_min: float
    split_layer: int
    gmacs: float
    ratio: float  # of the unmerged model's GMACs
    agreement: float
    distance: float
    accuracy: float | None
    pareto: bool  # no other trial is both cheaper and better


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
    progress: Callable[[int], object] = lambda done: None,
    log: Callable[[dict[str, float], int], object] = lambda values, number: None,
) -> list[Tuned]:
    """Go on until the study has so many finished trials; all of them, by GMACs.

    `quality`: accuracy (the default where labels are known), agreement with the unmerged model, or distance. `storage`: any
    URL that Optuna takes, such as sqlite:///study.db; without it nothing is kept, and `seed` makes the search repeatable.
    Images are held in memory: `sample` draws so many of them. `split_layer`: search l_s, too. `log` is told the figures of
    each trial."""
    need("optuna", "sweeps")
    import optuna
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
    from optuna.trial import TrialState

    images = as_images(images, model)
    reference = Reference(model, images if sample is None else images.split(sample, seed)[0], batch_size=batch_size)
    labels = reference.labels if reference.classes else None
    quality = quality or ("agreement" if labels is None else "accuracy")
    if quality not in get_args(Quality):
        raise ValueError(f"unknown quality {quality!r}; known: {', '.join(get_args(Quality))}")
    if quality == "accuracy" and labels is None:
        raise ValueError(f"{images.name}: accuracy needs labels; take agreement or distance")
    depth = reference.depth

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        alpha, beta, theta_min = (
            round(trial.suggest_float(name, low, high, step=step), 3)
            for name, (low, high, step) in (("alpha", ALPHA), ("beta", BETA), ("theta_min", THETA_MIN))
        )
        where = trial.suggest_int("split_layer", 0, depth) if split_layer else default_split_layer(depth)
        seen = reference.measure(ATM(alpha, beta, theta_min, split_layer=where, batch=batch))
        values = {
            "ratio": float(seen.ratio.mean()),
            "gmacs": float(seen.ratio.mean()) * reference.gmacs,
            "agreement": float(seen.same.double().mean()),
            "distance": float(seen.distance.mean()),
        }
        if labels is not None:
            values["accuracy"] = float((seen.answers == labels).double().mean())
        for name, value in values.items():
            trial.set_user_attr(name, value)
        log(values, trial.number)
        progress(1)
        return values["gmacs"], values[quality]

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
    better = "minimize" if quality == "distance" else "maximize"
    found = optuna.create_study(
        study_name=study,
        storage=database,
        directions=["minimize", better],
        # Who shares a study must not propose what the others do.
        sampler=optuna.samplers.TPESampler(seed=seed if storage is None else None),
        load_if_exists=True,
    )
    own = {"images": reference.fingerprint(), "quality": quality, "batch": batch, "split_layer": split_layer}
    kept = found.user_attrs
    if any(kept.get(key, value) != value for key, value in own.items()):
        raise ValueError(f"the study {study!r} is of another model, other images or options; give another name or storage")
    for key, value in own.items():
        found.set_user_attr(key, value)
    done = (TrialState.COMPLETE,)
    if len(found.get_trials(deepcopy=False, states=done)) < trials:
        found.optimize(objective, callbacks=[optuna.study.MaxTrialsCallback(trials, states=done)])
    best = {trial.number for trial in found.best_trials}
    rows = [
        Tuned(
            number=trial.number,
            alpha=round(trial.params["alpha"], 3),
            beta=round(trial.params["beta"], 3),
            theta_min=round(trial.params["theta_min"], 3),
            split_layer=trial.params.get("split_layer", default_split_layer(depth)),
            gmacs=trial.user_attrs["gmacs"],
            ratio=trial.user_attrs["ratio"],
            agreement=trial.user_attrs["agreement"],
            distance=trial.user_attrs["distance"],
            accuracy=trial.user_attrs.get("accuracy"),
            pareto=trial.number in best,
        )
        for trial in found.get_trials(deepcopy=False, states=done)
    ]
    return sorted(rows, key=lambda row: row.gmacs)


def tuning_figure(rows: Sequence[Tuned], quality: Quality) -> Any:
    """All trials, and those that no other beats."""
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(5, 3.4))
    axis.plot([row.gmacs for row in rows], [getattr(row, quality) for row in rows], ".", color="grey", label="trials")
    best = [row for row in rows if row.pareto]
    axis.plot([row.gmacs for row in best], [getattr(row, quality) for row in best], "o-", label="not beaten")
    axis.set(xlabel="GMACs per image", ylabel=quality, yscale="log" if quality == "distance" else "linear")
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure
