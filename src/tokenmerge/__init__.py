"""tokenmerge: cheaper Vision Transformers at inference, without retraining.

    tokenmerge.apply(model, tokenmerge.ATM(alpha=0.98, beta=0.035, theta_min=0.84))

Names are loaded on first use, so that `tokenmerge --help` need not import torch. The stub `__init__.pyi` is the one table
of public names: type checkers read it, and so does this module.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_MODULE_OF = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    elif name[:1].isupper() and name in (methods := import_module(".methods", __name__)).METHODS:
        value = methods.METHODS[name]  # a registered method needs no entry in the stub
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
