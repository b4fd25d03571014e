"""Methods as JSON and as text. Only registered methods are ever built, and nothing is evaluated."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..utils.files import replacing, write_text
from .base import METHODS, Method, find_method


def from_dict(data: Any) -> Method:
    """The inverse of `Method.to_dict`; unknown types, versions and fields are errors."""
    if (
        not isinstance(data, dict)
        or not {"type", "version", "config"} <= data.keys()
        or not isinstance(data["config"], dict)
    ):
        raise ValueError('not a saved method: expected {"type": …, "version": …, "config": {…}}')
    cls = find_method(data["type"])
    if data["version"] != cls.version:
        raise ValueError(f"{cls.__name__}: saved as version {data['version']!r}; this release reads version {cls.version}")
    return _build(cls, [], data["config"])


def _build(cls: type[Method], args: list[Any], kwargs: dict[str, Any]) -> Method:
    try:
        return cls(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(cls.__dataclass_fields__)
        raise ValueError(f"{cls.__name__}: {error}; its fields are {names}") from None


def save(method: Method, path: str | Path, about: Mapping[str, Any] | None = None) -> None:
    """Write the method as JSON, whole or not at all. The weights of its modules are copied next to it. `about`: where the
    config comes from; see `load_about`."""
    path = Path(path)
    weights: str | None = getattr(method, "weights", None)
    if weights is not None:
        beside = modules_path(path)
        if beside.resolve() != Path(weights).resolve():
            with replacing(beside) as draft:
                shutil.copyfile(weights, draft)
        method = replace(method, weights=beside.name)  # type: ignore[call-arg]
    data = method.to_dict() if about is None else method.to_dict() | {"about": dict(about)}
    write_text(json.dumps(data, indent=2) + "\n", path)


def modules_path(path: Path) -> Path:
    """Where the weights of the modules are, for the JSON of a method."""
    return path.with_suffix(".modules.safetensors")


def load(path: str | Path) -> Method:
    """Read a method that `save` wrote."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    try:
        method = from_dict(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    weights: str | None = getattr(method, "weights", None)
    if weights is None:
        return method
    if Path(weights).name != weights:
        raise ValueError(f"{path}: weights must name a file in the same folder, not {weights!r}")
    return replace(method, weights=str(Path(path).parent / weights))  # type: ignore[call-arg]


def load_about(path: str | Path) -> dict[str, Any]:
    """What `optimize` wrote next to a config: model, goal, version, figures, and the tokens that calibration images kept
    (`tokens_left`). Empty for configs without."""
    load(path)
    found = json.loads(Path(path).read_text(encoding="utf-8")).get("about", {})
    if not isinstance(found, dict):
        raise ValueError(f"{path}: about is an object, not {type(found).__name__}")
    return found


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
    return _build(find_method(name), args, kwargs)


def load_or_parse(text: str) -> Method:
    """A method as users give it on a command line: a file that `save` wrote, or its text."""
    return load(text) if text.endswith(".json") else parse(text)
