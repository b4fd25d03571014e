"""A method, a backbone and an export target of a stranger, added by the steps of CONTRIBUTING.md and nothing else.

The steps are carried out in a copy of the checkout: one file each, one row in the contract table, one card. The copy is then
used as a user would, in a process of its own; nothing is patched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

METHOD = '''
"""KeepFirst: keeps the first patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from ..core.tokens import Decision, assign
from .base import Method, register
from ..core.matching import View


@register
@dataclass(frozen=True, repr=False)
class KeepFirst(Method):
    """Keeps the first `keep` patches, whatever they show."""

    summary = "keeps the first patches, drops the others"

    keep: int

    @property
    def drops_tokens(self) -> bool:
        return True

    @classmethod
    def at_strength(cls, strength: float, depth: int, tokens: int) -> Self:
        return cls(round((1 - strength) * tokens))

    def __call__(self, view: View) -> Decision | None:
        if self.keep >= view.num_patches:
            return None
        positions = view.tokens.positions[view.prefix : view.prefix + self.keep].expand(len(view.tokens.size), -1)
        return assign(view.tokens, view.keep(positions))
'''

BACKBONE = '''
"""A library of a stranger: a ViT that keeps its blocks under another name."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.vision_transformer import Block
from torch import nn

from .base import Call, Preprocessing, register
from .helpers import Passthrough, called_alone, check_blocks, timm_preprocessing
from .timm_vit import TimmViT


class StrangeViT(nn.Module):
    def __init__(self, num_classes: int = 7) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, 8)
        self.cls = nn.Parameter(torch.randn(1, 1, 32))
        self.positions = nn.Parameter(torch.randn(1, 26, 32))
        self.layers = nn.ModuleList(Block(32, 2, qkv_bias=True) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, num_classes)
        self.num_classes = num_classes
        self.image_size = 40

    def forward(self, x: torch.Tensor, state: Any = None) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.positions
        for layer in self.layers:
            x = layer(x) if state is None else layer(x, state)
        return self.head(self.norm(x)[:, 0])


class StrangeModel:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, self._tokenmerge.open(self, x))  # type: ignore[misc, attr-defined]


class StrangeBlock:
    _tokenmerge: int

    def forward(self, x: torch.Tensor, state: Any = None) -> torch.Tensor:
        if not isinstance(state, Call):
            raise called_alone(self._tokenmerge)
        return state.step(self, self._tokenmerge, x, None)  # type: ignore[arg-type]


@register
class Strange(TimmViT):
    name = "a stranger's ViT"
    name_prefix = "strange:"
    name_form = "strange:NAME"
    model_mixin = StrangeModel
    block_mixin = StrangeBlock

    def matches(self, model: nn.Module) -> bool:
        return isinstance(model, StrangeViT)

    def check(self, model: nn.Module) -> None:
        from timm.layers import Attention

        check_blocks(self, model, (Block,), (Attention,))

    def blocks(self, model: Any) -> Any:
        return model.layers

    def prefix(self, model: Any) -> int:
        return 1

    def has_cls_token(self, model: Any) -> bool:
        return True

    def head_reads_prefix_only(self, model: Any) -> bool:
        return True

    def classifier(self, model: Any) -> nn.Module:
        return model.head

    def bypass(self, model: Any, exit_tokens: int | None) -> None:
        model.layers = nn.ModuleList([Passthrough(exit_tokens)])

    def create(self, name: str, pretrained: bool, **options: Any) -> nn.Module:
        return StrangeViT(**options)

    def preprocessing(self, model: Any, crop: float | None, size: int | None) -> Preprocessing:
        return timm_preprocessing(model, crop, size or model.image_size)
'''

TARGET = '''
"""A stranger's format: torch.export's, with another suffix."""

from __future__ import annotations

from pathlib import Path

from torch.export import ExportedProgram

from .base import Run, Target, register
from .pt2 import Pt2


@register
class Strange(Target):
    name = "strange"
    suffix = ".pt2"
    runtime = "strange-runtime"
    tolerance = 1e-5

    def write(self, program: ExportedProgram, path: Path, output: str = "output") -> None:
        Pt2().write(program, path)

    def open(self, path: Path, threads: int) -> Run:
        return Pt2().open(path, threads)
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The steps of CONTRIBUTING.md, in a copy of the checkout."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "images", "results"))
    for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    package = root / "src" / "tokenmerge"
    (package / "methods" / "keep_first.py").write_text(METHOD.lstrip())
    (package / "backbones" / "strange.py").write_text(BACKBONE.lstrip())
    (package / "deployment" / "targets" / "strange.py").write_text(TARGET.lstrip())
    (root / "docs" / "methods" / "keep_first.md").write_text("# KeepFirst\n\nKeeps the first patches.\n")
    table = root / "tests" / "contract" / "table.py"
    text = table.read_text()
    text = text.replace(
        '    "random": tm.RandomMerge(4),\n', '    "random": tm.RandomMerge(4),\n    "keep-first": tm.KeepFirst(9),\n'
    )
    row = '    "strange": Model(lambda: tm.load_model("strange:any"), library="strange", checkpointing=False),\n'
    table.write_text(text.replace('    "torchvision": Model(', row + '    "torchvision": Model('))
    return root


def run(checkout: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{checkout}", "COLUMNS": "400", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *args], cwd=checkout, env=env, capture_output=True, text=True, check=False, timeout=600
    )


@pytest.mark.slow
def test_the_contract_suite_passes(checkout: Path) -> None:
    """The new method on every model, every method on the new model."""
    done = run(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", "tests/contract", "-k", "first or strange",
               "--deselect", "tests/contract/test_extension.py")  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count(".") > 150


def test_they_appear_by_themselves(checkout: Path) -> None:
    code = """
import tokenmerge as tm
from pathlib import Path
from tests.helpers import cli

assert Path(tm.__file__).is_relative_to(Path.cwd())
assert tm.parse("KeepFirst(keep=9)") == tm.KeepFirst(9)

# compare, and its default set
from tokenmerge.calibration.cell import default_requests
assert "KeepFirst" in default_requests()
model, images = tm.load_model("embedded"), tm.load_images("embedded", limit=12)
cells = tm.compare(model, images, ["KeepFirst"], [0.6], sample=2, batch_size=10)
assert abs(cells[-1].ratio - 0.6) < 0.006

# the menu of the web demo
from tokenmerge.web.session import DemoSession
assert "KeepFirst" in DemoSession(model, images, "embedded").names

# help texts and errors
assert "KeepFirst" in cli("compare", "--help").stdout
assert "KeepFirst" in cli("evaluate", "--help").stdout
assert "strange:NAME" in cli("evaluate", "--help").stdout
assert "strange (.pt2)" in cli("export", "--help").stdout
assert "strange-runtime" in cli("bench", "--help").stdout
assert "KeepFirst" in cli("evaluate", "--method", "Nothing()").stderr
assert "strange:NAME" in cli("evaluate", "no_such_model").stderr

# the new model and the new target at work
strange = tm.load_model("strange:any")
x = next(tm.load_images("embedded").batches(4)).images
out = cli("export", "embedded", "--method", "ToMe(4)", "--to", "strange", "--out", "m.pt2")
assert out.returncode == 0, out.stderr
timings = tm.bench(model, images, [tm.ToMe(4)], batch_sizes=[2], rounds=1, runtimes=["strange-runtime"])
assert [t.runtime for t in timings] == ["strange-runtime"] * 2
import torch
with torch.inference_mode(), tm.trace(tm.apply(strange, tm.KeepFirst(9))) as t:
    strange(torch.randn(2, 3, 40, 40))
assert t.tokens_in[-1].tolist() == [10, 10]
"""
    done = run(checkout, "-c", code)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_docs_table_is_generated(checkout: Path) -> None:
    done = run(checkout, "docs/make_tables.py")
    assert done.returncode == 0, done.stderr
    row = "| [`KeepFirst`](docs/methods/keep_first.md) | keeps the first patches, drops the others |"
    assert row in (checkout / "README.md").read_text()
    assert "from .methods.keep_first import KeepFirst as KeepFirst" in (checkout / "src/tokenmerge/__init__.pyi").read_text()
    done = run(checkout, "-c", "import tokenmerge; assert 'KeepFirst' in tokenmerge.__all__")
    assert done.returncode == 0, done.stderr
