"""What an export target must define: how a graph becomes a file, and how the file runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

from torch import Tensor
from torch.export import ExportedProgram

Run = Callable[[Tensor], Tensor]


class Target(ABC):
    """A file format and the runtime that runs it."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    runtime: ClassVar[str | None] = None  # its name in `bench`; None: not a runtime to compare
    tolerance: ClassVar[float]  # largest difference to the eager model, relative to the largest output, or to 1
    int8: ClassVar[tuple[str, ...]] = ()  # the modes in which files can be quantised

    @abstractmethod
    def write(self, program: ExportedProgram, path: Path, output: str = "output") -> None:
        """Write the graph to `path`; other files that it needs go into the same folder. `output`: its name."""

    def convert(self, onnx: Path, path: Path) -> None:
        """Write an ONNX file in this format, with its quantised products. Override it together with `int8`."""
        raise ValueError(f"{self.name} files are not made from ONNX, and cannot be quantised")

    @abstractmethod
    def open(self, path: Path, threads: int) -> Run:
        """The file as a function of a batch of images, of any size."""

    def files(self, path: Path) -> tuple[Path, ...]:
        """All files that belong to `path`."""
        return (path,)

    def open_fixed(self, path: Path, threads: int) -> Run:
        """The same for timing, as a server with a fixed batch size runs it. Override it where compiling for each shape is
        faster."""
        return self.open(path, threads)


TARGETS: dict[str, Target] = {}

TargetClass = TypeVar("TargetClass", bound="type[Target]")


def register(cls: TargetClass) -> TargetClass:
    """Make a target known to `export`, `bench` and the command line."""
    TARGETS[cls.name] = cls()
    return cls


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise ValueError(f"unknown export target {name!r}; known: {', '.join(TARGETS)}")
    return TARGETS[name]
