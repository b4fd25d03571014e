"""Docs that run: code blocks of the README and the guides, links, cards, and the support table."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest
import timm
from torch import nn

import tokenmerge as tm
from tests.conftest import ROOT
from tokenmerge.methods import METHODS

sys.path.insert(0, str(ROOT / "docs"))
import make_support_table as support

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [(page, block) for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=lambda v: v.name if isinstance(v, Path) else "")
def test_python_blocks_run(page: Path, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> None:
    """`pretrained=True` needs a hub; here the same architecture gets the real weights, or random ones where absent."""
    create = timm.create_model

    def local(name: str, pretrained: bool = False, **options: object) -> nn.Module:
        model = create(name, **options)
        if pretrained and name == "deit_tiny_patch16_224":
            model.load_state_dict(request.getfixturevalue("deit_tiny_weights"))
        return model

    monkeypatch.setattr(timm, "create_model", local)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(page), "exec"), {})


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_method_has_a_card() -> None:
    cards = {page.stem.replace("_", "") for page in (ROOT / "docs" / "methods").glob("*.md")}
    assert {name.lower() for name in METHODS} <= cards


def test_support_table_is_complete_and_true() -> None:
    rows = {row["architecture"]: row for row in csv.DictReader((ROOT / "docs" / "support.csv").read_text().splitlines())}
    assert list(rows) == support.architectures(), "timm has other architectures now: run `make docs`"
    assert (ROOT / "docs" / "hosts.md").read_text() == support.page([support.Row(**row) for row in rows.values()])
    for name in (
        "deit3_small_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_clip_224", "eva02_tiny_patch14_224",
        "vit_small_patch16_dinov3", "swin_tiny_patch4_window7_224", "beit_base_patch16_224", "vit_base_patch16_siglip_224",
    ):  # fmt: skip
        assert support.attempt(name).result == rows[name]["result"], name


@pytest.mark.slow
def test_support_table_is_true_throughout() -> None:
    rows = {
        row["architecture"]: row["result"]
        for row in csv.DictReader((ROOT / "docs" / "support.csv").read_text().splitlines())
    }
    assert {name: support.attempt(name).result for name in support.architectures()} == rows


def test_unsupported_says_why() -> None:
    with pytest.raises(tm.Unsupported, match="Merging needs plain blocks"):
        tm.apply(timm.create_model("test_resnet"), tm.ToMe(1))
