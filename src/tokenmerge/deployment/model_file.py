"""An exported file as something to validate: its predictions, and the config that it was made from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..methods import parse
from ..methods.base import Method
from .targets import TARGETS
from .targets.base import Run, Target


@dataclass(frozen=True, repr=False)
class ModelFile:
    """A file that `export` wrote, with its record next to it. It goes wherever a config goes in `evaluate`, `prove` and
    `certify`: its predictions are those of the file in its runtime; tokens and GMACs are those of its config in eager
    PyTorch."""

    path: Path

    def __repr__(self) -> str:
        return self.path.name

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if self.record["preprocess"]:
            raise ValueError(f"{self.path} takes pixels from 0 to 255; export it without preprocessing to compare it")

    @cached_property
    def record(self) -> dict[str, Any]:
        note = self.path.with_name(self.path.name + ".json")
        if not self.path.is_file():
            raise ValueError(f"{self.path}: no such file; `tokenmerge export` writes one")
        if not note.is_file():
            raise ValueError(f"{self.path}: {note.name} is missing, which `tokenmerge export` writes next to a file")
        try:
            record = json.loads(note.read_text(encoding="utf-8"))
            known = {"target", "method", "preprocess"} <= record.keys() and record["target"] in TARGETS
        except (ValueError, AttributeError):
            known = False
        if not known:
            raise ValueError(f"{note}: not a record of an exported file; export it again")
        found: dict[str, Any] = record
        return found

    @cached_property
    def method(self) -> Method:
        return parse(self.record["method"])

    @property
    def target(self) -> Target:
        return TARGETS[self.record["target"]]

    @property
    def megabytes(self) -> float:
        """With the weights, where they are in a file of their own."""
        return sum(part.stat().st_size for part in self.target.files(self.path) if part.is_file()) / 1e6

    @property
    def identity(self) -> str:
        return f"{self.path.name} {self.path.stat().st_size} {self.record}"

    def to_dict(self) -> dict[str, Any]:
        return {"file": self.path.name, "method": self.method.to_dict(), "int8": self.record.get("int8")}

    def open(self, threads: int | None = None) -> Run:
        """A function of a batch of images, of any size."""
        return self.target.open(self.path, threads or torch.get_num_threads())


Config = Method | ModelFile


def method_of(config: Config) -> Method:
    return config.method if isinstance(config, ModelFile) else config


def as_config(config: Config | str | Path) -> Config:
    """A config, or a file by its path."""
    return ModelFile(Path(config)) if isinstance(config, str | Path) else config
