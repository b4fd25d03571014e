"""Methods: one file each, one line here, one card in docs/methods, one row in the contract table of the tests."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from ..files import write_text
from .atm import ATM
from .ats import ATS
from .base import Method, View
from .constant_threshold import ConstantThreshold
from .diffrate import DiffRate
from .evit import EViT
from .mctf import MCTF
from .no_merge import NoMerge
from .pitome import PiToMe
from .ppt import PPT
from .random_merge import RandomMerge
from .tofu import ToFu
from .tome import ToMe, TopR
from .zero_tprune import ZeroTPrune

# The allow-list: only these are ever built from a file or a command line.
METHODS: dict[str, type[Method]] = {
    cls.__name__: cls
    for cls in (
        *(ATM, ToMe, TopR, ConstantThreshold, NoMerge),
        *(EViT, MCTF, ZeroTPrune, ATS, ToFu, PPT, DiffRate, PiToMe, RandomMerge),
    )
}

__all__ = [
    "ATM",
    "ATS",
    "MCTF",
    "METHODS",
    "PPT",
    "ConstantThreshold",
    "DiffRate",
    "EViT",
    "Method",
    "NoMerge",
    "PiToMe",
    "RandomMerge",
    "ToFu",
    "ToMe",
    "TopR",
    "View",
    "ZeroTPrune",
    "load",
    "parse",
    "save",
]


def _lookup(name: object) -> type[Method]:
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    return METHODS[name]


def from_dict(data: Any) -> Method:
    """The inverse of `Method.to_dict`; unknown types, versions and fields are errors."""
    if (
        not isinstance(data, dict)
        or not {"type", "version", "config"} <= data.keys()
        or not isinstance(data["config"], dict)
    ):
        raise ValueError('not a saved method: expected {"type": …, "version": …, "config": {…}}')
    cls = _lookup(data["type"])
    if data["version"] != cls.version:
        raise ValueError(f"{cls.__name__}: saved as version {data['version']!r}; this release reads version {cls.version}")
    return _build(cls, [], data["config"])


def _build(cls: type[Method], args: list[Any], kwargs: dict[str, Any]) -> Method:
    try:
        return cls(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(cls.__dataclass_fields__)
        raise ValueError(f"{cls.__name__}: {error}; its fields are {names}") from None


def save(method: Method, path: str | Path) -> None:
    """Write the method as JSON, whole or not at all."""
    write_text(method.to_json() + "\n", Path(path))


def load(path: str | Path) -> Method:
    """Read a method that `save` wrote."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    try:
        return from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(text: str) -> Method:
    """The inverse of `repr`, for command lines: a call of a known method with literal arguments; nothing is evaluated."""
    advice = f"write it as in Python, for example ToMe(r=8); known: {', '.join(METHODS)}"
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            call = ast.Call(call, [], [])
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        name = call.func.id
        args = [ast.literal_eval(a) for a in call.args]
        kwargs = {k.arg or "**": ast.literal_eval(k.value) for k in call.keywords}
        if "**" in kwargs:
            raise ValueError
    except (ValueError, SyntaxError, TypeError):
        raise ValueError(f"cannot read the method {text!r}; {advice}") from None
    return _build(_lookup(name), args, kwargs)
