"""Every table and figure of the paper, each in a small file whose docstring holds the command, the expected time and the
paper's numbers.

By default, times are for DeiT-T and 70 images on two CPU cores (docs/results/reproduced/seconds.json). On ImageNet's 50,000
images a config takes about 700 times as long there."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..utils.files import write_text
from .lab import Lab

__all__ = ["EXPERIMENTS", "Lab", "find", "reproduce", "title"]

# As the paper is printed → the file here.
EXPERIMENTS = {
    "table1": "table1",
    "table2": "table2",
    "table3": "table3",
    "table4": "table4",
    "tableA1": "table_a1",
    "tableA2": "table_a2",
    "tableA3": "table_a3",
    "tableA4": "table_a4",
    "tableA5": "table_a5",
    "fig1": "fig1",
    "fig2": "fig2",
    "fig4": "fig4",
    "fig5": "fig5",
    "fig6": "fig6",
    "fig7": "fig7",
    "figA1": "fig_a1",
}


def find(name: str) -> ModuleType:
    if name not in EXPERIMENTS:
        raise ValueError(f"unknown experiment {name!r}; the paper has {', '.join(EXPERIMENTS)}; 'all' runs them all")
    return import_module(f"{__name__}.{EXPERIMENTS[name]}")


def reproduce(names: Sequence[str], lab: Lab) -> list[Path]:
    """Run experiments, and write NAME.csv, NAME.png and NAME.html of each, an index of links, and the seconds that each
    took (`seconds.json`; less, where a run resumed); returns the HTML files."""
    pages = []
    times = lab.out / "seconds.json"
    seconds = json.loads(times.read_text(encoding="utf-8")) if times.exists() else {}
    for name in names:
        module = find(name)
        before = lab.missing
        lab.missing = {}
        lab.progress(name, 0)
        began = time.perf_counter()
        sheet = module.run(lab)
        seconds[name] = round(time.perf_counter() - began, 1)
        if lab.group.is_main:
            sheet.write(name, title(module), lab.out, list(lab.missing.values()))
            write_text(json.dumps(seconds, indent=2), times)
        lab.missing = before | lab.missing
        pages.append(lab.out / f"{name}.html")
    if not lab.group.is_main:
        return []
    links = "".join(
        f'<li><a href="{name}.html">{html.escape(title(find(name)))}</a></li>'
        for name in EXPERIMENTS
        if (lab.out / f"{name}.html").exists()
    )
    write_text(f'<!doctype html><meta charset="utf-8"><title>Reproduced</title><ul>{links}</ul>\n', lab.out / "index.html")
    return pages


def title(module: ModuleType) -> str:
    """The first line of the module's docstring."""
    return str(module.__doc__).partition("\n")[0].rstrip(".")
