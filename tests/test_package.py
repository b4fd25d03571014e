"""The package as a whole: its layout, public names, imports in one direction, a fast start."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import tokenmerge as tm
from tokenmerge.cli import app

SOURCE = Path(tm.__file__).parent

# A package imports only from lines above its own; neighbours on a line do not see each other.
LAYERS = """
utils
core
methods | backbones | models
data
engine
visualization | deployment | training
evaluation
calibration
web | reproduce
cli
"""
# The one exception, inside a function: a trace draws itself in a notebook.
EXCEPTION = ("engine/trace.py", "visualization")


def layers() -> list[set[str]]:
    return [set(line.split(" | ")) for line in LAYERS.strip().splitlines()]


def imported_packages(path: Path) -> set[str]:
    """Packages of ours that a module imports, at the top or inside a function."""
    inside = path.relative_to(SOURCE).parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == len(inside):  # from the top of the package
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found - {"__version__", inside[0]}


def test_the_top_level_has_packages_only() -> None:
    files = {path.name for path in SOURCE.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__init__.pyi", "__main__.py", "py.typed"}
    packages = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages == set.union(*layers())


def test_imports_go_one_way() -> None:
    rank = {name: i for i, layer in enumerate(layers()) for name in layer}
    assert len(layers()) <= 12
    exceptions = []
    for path in sorted(SOURCE.glob("*/**/*.py")):
        package = path.relative_to(SOURCE).parts[0]
        for other in imported_packages(path):
            if (path.relative_to(SOURCE).as_posix(), other) == EXCEPTION:
                exceptions.append(other)
                continue
            assert rank[other] < rank[package], f"{path.relative_to(SOURCE)} imports {other}"
    assert exceptions == [EXCEPTION[1]]


def test_public_names() -> None:
    assert tm.__all__ == sorted(set(tm.__all__))
    for name in tm.__all__:
        assert getattr(tm, name) is not None
        assert name in dir(tm)
    # Importing a package puts its name into the namespace of tokenmerge, in the place of a function of the same name.
    assert not {path.stem for path in SOURCE.iterdir()} & set(tm.__all__)


def test_every_command_is_a_public_function() -> None:
    """Same verbs in Python and on the command line."""
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    assert commands == {path.stem for path in (SOURCE / "cli").glob("*.py")} - {"__init__", "options", "output"}
    # demo is optimize on the embedded model; presets prints paper_rows; web and reproduce are programs, not functions.
    assert commands - {"demo", "presets", "web", "reproduce"} <= set(tm.__all__)


def test_methods_see_no_model_and_backbones_no_method() -> None:
    for folder, other in (("methods", "backbones"), ("backbones", "methods")):
        for path in (SOURCE / folder).glob("*.py"):
            assert other not in imported_packages(path), path


def test_help_loads_no_torch() -> None:
    code = (
        "import sys; from tokenmerge.cli import app; assert not {'torch', 'timm', 'matplotlib', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_package_loads_no_optional_library() -> None:
    code = "import sys, tokenmerge; tokenmerge.apply; assert not {'matplotlib', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
