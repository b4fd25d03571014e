"""The package as a whole: public names, imports in one direction, a fast start."""

from __future__ import annotations

import ast
import resource
import subprocess
import sys
from pathlib import Path

import tokenmerge as tm

SOURCE = Path(tm.__file__).parent

# Who may import whom: each layer only what stands before it.
LAYERS = [
    {"precision", "schedule", "theory", "presets", "files", "models", "sources", "extras"},
    {"crew", "following"},
    {"slots"},
    {"tokens", "attention"},
    {"matching"},
    {"joining"},
    {"methods", "backbones"},
    {"attending"},
    {"engine"},
    {"surgery"},
    {"cost"},
    {"tracing"},
    {"loading", "embedded", "visualization", "reporting"},
    {"checkpoints", "recipe"},
    {"measuring"},
    {"evaluation", "predicting", "finetuning", "exporting"},
    {"runtimes"},
    {"benchmarking", "proving"},
    {"ways"},
    {"searching"},
    {"calibration"},
    {"comparing"},
    {"optimizing", "analysis", "tuning", "visualizing"},
    {"reproduce"},
    {"printing", "studio"},
    {"web"},
    {"cli"},
    {"__main__"},
]


def test_public_names() -> None:
    assert len(set(tm.__all__)) == len(tm.__all__)
    for name in tm.__all__:
        assert getattr(tm, name) is not None
        assert name in dir(tm)
    modules = {path.stem for path in SOURCE.rglob("*.py")}
    assert not modules & set(tm.__all__), "a module would take the place of a function"


def test_imports_go_one_way() -> None:
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    for path in SOURCE.rglob("*.py"):
        inside = path.relative_to(SOURCE).with_suffix("").parts
        if inside == ("__init__",):
            continue
        me = inside[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                up = node.level - (len(inside) - 1)  # how far above this package the import reaches
                if up < 1:
                    continue
                names = [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
                for name in names:
                    if name in rank and name != me:
                        # imported when asked for, inside of a function
                        same_step = {me, name} == {"loading", "embedded"} or (me, name) == ("tracing", "visualization")
                        assert rank[name] < rank[me] or same_step, f"{path.name} imports {name}"


def test_methods_see_no_model_and_backbones_no_method() -> None:
    for folder, other in (("methods", "backbones"), ("backbones", "methods")):
        for path in (SOURCE / folder).glob("*.py"):
            assert f"..{other}" not in path.read_text(), path


def test_help_answers_at_once_and_loads_no_torch() -> None:
    code = (
        "import sys; from tokenmerge.cli import app; assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "tokenmerge", "--help"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Processor time: the wall clock of a busy machine would say more about its other work.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_the_package_loads_no_optional_library() -> None:
    code = "import sys, tokenmerge; tokenmerge.apply; assert not {'matplotlib', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
