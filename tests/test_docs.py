"""Docs that run: code blocks of the README and the guides, links, cards, generated tables, and the words that they use."""

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
from tests.helpers import cli
from tokenmerge.cli import app
from tokenmerge.methods import METHODS

sys.path.insert(0, str(ROOT / "docs"))
import make_support_table as support
import make_tables as tables

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


def test_paths_of_the_repository_exist() -> None:
    """Scripts, tests and sources that the docs name."""
    for page in PAGES:
        for path in re.findall(r"\b((?:tests|experiments|benchmarks|examples|src)/[\w/.-]*\w)", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_method_has_a_card_and_generated_tables_are_fresh() -> None:
    assert len({tables.card(name) for name in METHODS}) == len(METHODS)
    for path, text in tables.generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is not up to date: run `make docs`"


# The left-hand column of the glossary: words that only this project used, and what to write instead.
PRIVATE = {
    r"unmerged": "baseline",
    r"alike": "similar",
    r"rivals?": "other methods",
    r"knobs?": "hyper-parameter, control",
    r"free last layer": "CLS-only last layer",
    r"class[- ]token distance|what the head reads": "CLS or pre-logits cosine distance",
    r"answers?": "prediction",
    r"settings?": "config",
    r"hosts?(?!–device)": "model",
    r"go(es)? on (from|where)": "resume",
    r"crew": "process group",
    r"at hand": "available",
    r"so many|one a (layer|image|method)|a (row|line) a (method|layer|image)": "N, one per …",
    r"weigh(ed|s)?": "weighted",
    r"beside": "next to, compared with",
    r"turn(ed)? by (place|position)|rotate by place": "RoPE",
}
ALLOWED = ("--host", "paper calls it merging size")


def private_words(text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        if not any(phrase in line for phrase in ALLOWED):
            found += [f"{word!r} ({advice}): {line.strip()}" for word, advice in PRIVATE.items()
                      if re.search(rf"\b({word})\b", line, re.IGNORECASE)]  # fmt: skip
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_docs_use_the_words_of_the_field(page: Path) -> None:
    text = page.read_text()
    if page.name == "CHANGELOG.md":
        text = text.replace("instead of setting", "").replace("`unmerged_gmacs`", "").replace("`setting`", "")
    assert not private_words(text)


def test_help_uses_the_words_of_the_field() -> None:
    names = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]
    for args in ([], *([name] for name in names)):
        done = cli(*args, "--help")
        assert done.returncode == 0
        assert not private_words(done.stdout), args


def test_old_pages_lead_to_the_new_ones() -> None:
    moved = {"seeing": "visualization", "serving": "deployment", "running": "evaluation", "counting": "macs",
             "comparing": "comparison", "other_hosts": "other_libraries", "hosts": "supported_models",
             "reproduced": "reproduction"}  # fmt: skip
    for old, new in moved.items():
        assert f"({new}.md)" in (ROOT / "docs" / f"{old}.md").read_text()
        assert (ROOT / "docs" / f"{new}.md").stat().st_size > 500
    linked = {target for page in PAGES for target in re.findall(r"\]\(([^)#]+)", page.read_text())}
    assert not {Path(target).stem for target in linked} & set(moved), "links should go to the new pages"


def test_security_page_says_how_pickles_are_read() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "weights_only" in text
    assert "Nothing is\n  unpickled" not in text


def test_figures_of_the_demo_stand_in_one_place() -> None:
    """The README once had other figures for the same command than docs/results.md."""
    readme = (ROOT / "README.md").read_text()
    assert "docs/results.md#the-embedded-model" in readme
    rows = [line for line in (ROOT / "docs" / "results.md").read_text().splitlines() if line.startswith("| ATM, calibrated")]
    assert len(rows) == 1
    assert not [cell for cell in re.findall(r"\d\.\d{4}", rows[0]) if cell in readme]


def test_support_table_is_complete_and_true() -> None:
    rows = {row["architecture"]: row for row in csv.DictReader((ROOT / "docs" / "support.csv").read_text().splitlines())}
    assert list(rows) == support.architectures(), "timm has other architectures now: run `make docs`"
    assert (ROOT / "docs" / "supported_models.md").read_text() == support.page([support.Row(**row) for row in rows.values()])
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
