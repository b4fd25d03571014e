"""Packages whose modules register themselves: a new method, backbone or export target is one new file."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def import_submodules(package: ModuleType) -> None:
    """Import every module of a package, so that each can register what it defines."""
    for module in sorted(iter_modules(package.__path__), key=lambda module: module.name):
        import_module(f"{package.__name__}.{module.name}")
