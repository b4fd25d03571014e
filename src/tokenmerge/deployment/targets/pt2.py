"""torch.export's own format."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.export import ExportedProgram

from .base import Run, Target, register


@register
class Pt2(Target):
    name = "pt2"
    suffix = ".pt2"
    tolerance = 1e-5

    def write(self, program: ExportedProgram, path: Path, output: str = "output") -> None:
        torch.export.save(program, path)

    def open(self, path: Path, threads: int) -> Run:
        return torch.export.load(path).module()
