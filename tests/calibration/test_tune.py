"""The paper's sweep and its Fig. 2, on the embedded model."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tokenmerge as tm
from tests.helpers import cli
from tokenmerge.data import embedded
from tokenmerge.utils.logging import make_logger


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return embedded.load_model()


@pytest.mark.slow
def test_tuning_resumes_after_a_kill_and_is_shared_by_processes(tmp_path: Path) -> None:
    common = [
        "tune",
        "embedded",
        "embedded",
        "--limit",
        "8",
        "--quality",
        "distance",
        "--storage",
        f"sqlite:///{tmp_path / 's.db'}",
    ]

    def start(out: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tokenmerge", *common, "--trials", "14", "--out", str(tmp_path / out)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = start("a")
    begun = time.monotonic()
    while time.monotonic() - begun < 120:
        time.sleep(0.3)
        if (tmp_path / "s.db").exists():
            try:
                study = optuna.load_study(study_name="tokenmerge", storage=f"sqlite:///{tmp_path / 's.db'}")
            except (KeyError, RuntimeError):
                continue
            if len(study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))) >= 3:
                break
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    kept = {t.number for t in study.get_trials(states=(optuna.trial.TrialState.COMPLETE,))}
    assert kept
    both = [start("b"), start("c")]
    for process in both:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    rows = list(csv.DictReader((tmp_path / "b" / "tuned.csv").read_text().splitlines()))
    assert len(rows) >= 14
    assert kept <= {int(row["number"]) for row in rows}
    assert {row["pareto"] for row in rows} == {"True", "False"}
    assert (tmp_path / "b" / "tuned.png").stat().st_size > 1000


def test_studies_are_repeatable_and_belong_to_one_model(model: torch.nn.Module, tmp_path: Path) -> None:
    images = embedded.load_images("test", 8)
    runs = [tm.tune(model, images, trials=4, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]
    assert all(row.accuracy is not None for row in runs[0])
    features = embedded.build_model(num_classes=0).eval()
    assert tm.tune(features, images, trials=1)[0].accuracy is None
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    tm.tune(model, images, trials=1, storage=storage)
    with pytest.raises(ValueError, match="another model, other images or options"):
        tm.tune(model, images.take(range(4)), trials=1, storage=storage)
    with pytest.raises(ValueError, match="needs labels"):
        tm.tune(model, tm.Images.of(torch.rand(2, 1, 28, 28)), trials=1, quality="accuracy")


def test_analyze_writes_a_row_per_layer_and_threshold(tmp_path: Path) -> None:
    args = [
        "analyze",
        "embedded",
        "embedded",
        "--sample",
        "16",
        "--theta",
        "0.9",
        "--theta",
        "0.95",
        "--out",
        tmp_path,
        "--json",
    ]
    done = cli(*args)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["layer"], row["theta"]) for row in rows] == [(layer, t) for layer in range(1, 12) for t in (0.9, 0.95)]
    distance = {(row["layer"], row["theta"]): row["distance"] for row in rows}
    assert all(distance[layer, 0.9] > distance[layer, 0.95] for layer in range(1, 12)), "a lower threshold merges more"
    assert distance[1, 0.95] > 3 * distance[11, 0.95], "early layers cost most (Fig. 2)"
    assert all(0 < row["merged"] < 98 for row in rows)
    assert {path.name for path in tmp_path.iterdir()} == {"impact.csv", "impact.png"}


def test_trials_are_logged_for_tensorboard(model: torch.nn.Module, tmp_path: Path) -> None:
    log = make_logger(f"tensorboard:{tmp_path}")
    rows = tm.tune(model, embedded.load_images("test", 12), trials=3, batch_size=12, log=log)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    logged = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert sorted(logged["distance"]) == pytest.approx(sorted(row.distance for row in rows), rel=1e-5)
    assert sorted(logged["gmacs"]) == pytest.approx(sorted(row.gmacs for row in rows), rel=1e-5)
    for bad in ("tensorboard:", "mlflow:x", "wandb"):
        with pytest.raises(ValueError, match="cannot log to"):
            make_logger(bad)
