"""Try every timm architecture that looks like a ViT, ours, and those of Hugging Face and torchvision, on the meta device.
Write what works and what is refused.

make docs         # about 5 minutes; writes docs/support.csv (all) and docs/supported_models.md (grouped)
"""

from __future__ import annotations

import csv
import sys
import warnings
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import open_clip
import timm
import torch
import torchvision
import transformers
from torch import nn

import tokenmerge as tm
import tokenmerge.models
from tokenmerge.backbones import find_backbone, tower_of
from tokenmerge.backbones.hf_containers import TOWERS
from tokenmerge.backbones.hf_families import FAMILIES
from tokenmerge.engine.features import image_function
from tokenmerge.engine.patch import adapter_of

# timm's modules whose models are made of attention over patches.
MODULES = (
    "beit", "cait", "convit", "crossvit", "deit", "efficientvit_mit", "efficientvit_msra", "eva", "fastvit",
    "hiera", "levit", "mobilevit", "mvitv2", "naflexvit", "pit", "swin_transformer", "swin_transformer_v2",
    "tiny_vit", "tnt", "twins", "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos",
    "vision_transformer_sam", "visformer", "vitamin", "volo", "xcit",
)  # fmt: skip
# Classes of transformers that are tried besides those of the families.
REFUSED_HUGGING_FACE = (
    "Data2VecVisionForSemanticSegmentation", "DPTModel", "HieraModel", "MobileViTModel", "PvtModel", "SamModel",
    "SegformerModel", "SwinModel", "Swinv2Model", "ViTForMaskedImageModeling",
)  # fmt: skip
# A small text tower: the image tower of open_clip's architectures is what merges.
TEXT = {"context_length": 8, "vocab_size": 10, "width": 64, "heads": 2, "layers": 1}
DOCS = Path(__file__).parent
NOT_PLAIN = "not a family of plain blocks (attention of all tokens of one sequence to each other, then an MLP)"


@dataclass(frozen=True)
class Row:
    architecture: str
    model_class: str
    prefix_tokens: str
    pooling: str
    result: str  # "works", or "refused: …"


def hugging_face_classes() -> list[str]:
    """Those of every family, of models around a tower, and some that are refused."""
    known = {name for family in FAMILIES.values() for name in (*family.towers, *family.headed)} | set(TOWERS)
    return sorted(known | set(REFUSED_HUGGING_FACE))


def architectures() -> list[str]:
    """timm's and ours by name; `hf:` before a class of transformers, `torchvision:` and `open_clip:` before a name of
    theirs."""
    ours = [name for name in tokenmerge.models.__all__ if name in timm.list_models(name)]
    return [
        *sorted({name for module in MODULES for name in timm.list_models(module=module)} | set(ours)),
        *(f"hf:{name}" for name in hugging_face_classes()),
        *(f"torchvision:{name}" for name in torchvision.models.list_models(include="vit_*")),
        *(f"open_clip:{name}" for name in open_clip.list_models()),
    ]


def create(name: str) -> nn.Module:
    """The model without pretrained weights."""
    library, _, short = name.rpartition(":")
    if library == "hf":
        cls = getattr(transformers, short)
        return cls(cls.config_class()).eval()
    if library == "torchvision":
        return torchvision.models.get_model(short).eval()
    if library == "open_clip":
        config = open_clip.get_model_config(short)
        vision = {**config["vision_cfg"], "timm_model_pretrained": False}
        return open_clip.CLIP(config["embed_dim"], vision, TEXT, quick_gelu=config.get("quick_gelu", False)).eval()
    return timm.create_model(name).eval()


def attempt(name: str) -> Row:
    """Build it without weights, apply ToMe, run one image, and undo: on the meta device, or where a model reads values of
    its input, on the CPU."""
    try:
        with torch.device("meta"):
            return _attempt(name)
    except Exception as error:
        if "meta tensor" not in str(error):
            raise
    return _attempt(name)


def _attempt(name: str) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = create(name)
        except Exception as error:  # some architectures cannot be built on the meta device
            return Row(name, "?", "–", "–", f"not tried: cannot be built without weights ({type(error).__name__})")
        kind = type(model).__name__
        prefix = str(getattr(model, "num_prefix_tokens", "–"))
        pooling = "attention" if getattr(model, "attn_pool", None) is not None else getattr(model, "global_pool", "–")
        pooling = pooling if isinstance(pooling, str) else "–"
        tower = tower_of(model)
        try:
            backbone = find_backbone(tower)
        except tm.Unsupported as error:
            return Row(name, kind, prefix, pooling, f"refused: {why(str(error), type(tower).__name__, name)}")
        if ":" in name or name in tokenmerge.models.__all__:
            prefix = str(backbone.prefix(tower))
            pooling = "token" if backbone.head_reads_prefix_only(tower) else ""
        run = image_function(model)
        x = torch.empty(1, *adapter_of(model).input_size(model))
        with torch.no_grad():
            expected = backbone.output(run(x)).shape
            tm.apply(model, tm.ToMe(2))
            merged = backbone.output(image_function(model)(x)).shape
        tm.remove(model)
        if merged != expected:
            raise AssertionError(f"{name}: merged output {merged}, baseline {expected}")
        inside = "" if tower is model else f"; merges in its {type(tower).__name__}"
        return Row(name, kind, prefix, pooling, f"works{inside}" if ":" in name else f"works ({backbone.name})")


def why(error: str, kind: str, name: str) -> str:
    reason = error.split("; supported", maxsplit=1)[0].removeprefix(f"{kind}: ")
    if reason != f"{kind} is not supported":
        return reason
    if "contains one at " in error:
        return f"apply to its `{error.split('contains one at ')[1].split(':', maxsplit=1)[0].removeprefix('.')}`"
    return "not a class that is known" if name.startswith("hf:") else NOT_PLAIN


def page(rows: list[Row]) -> str:
    groups: dict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for row in rows:
        groups[row.model_class, row.prefix_tokens, row.pooling, row.result].append(row.architecture)
    order = sorted(groups.items(), key=lambda item: (not item[0][3].startswith("works"), item[0]))
    works = sum(row.result.startswith("works") for row in rows)
    lines = [
        "# Supported models",
        "",
        "Generated by `make docs`: every timm architecture that looks like a ViT, ours, Hugging Face classes (`hf:`),",
        "torchvision's names, and the image towers of open_clip's, without weights. Those that work have run `ToMe(2)` on",
        "one image. DINOv2 and DINOv3 as torch.hub gives them merge, too: they are tested with modules of the same class",
        "contract (`tests/dino_hub.py`), and their repositories were not run.",
        "",
        f"{works} of {len(rows)} work; each is listed in `support.csv`. timm {timm.__version__}, transformers "
        f"{transformers.__version__}, torchvision {torchvision.__version__.partition('+')[0]}, open_clip "
        f"{open_clip.__version__}.",
        "",
        "| class | prefix tokens | head reads | architectures | result |",
        "|---|---|---|---|---|",
    ]
    for (kind, prefix, pooling, result), names in order:
        shown = ", ".join(f"`{name}`" for name in names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
        reads = {"token": "CLS token", "avg": "mean of patches", "": "all tokens"}.get(pooling, pooling)
        lines.append(f"| {kind} | {prefix} | {reads} | {shown} | {result} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """With --new, only architectures without a row are tried; with --page, none."""
    known = {}
    if {"--new", "--page"} & set(sys.argv[1:]):
        with (DOCS / "support.csv").open(newline="") as file:
            known = {row["architecture"]: Row(**row) for row in csv.DictReader(file)}
    rows = []
    for i, name in enumerate(names := architectures(), 1):
        rows.append(known.get(name) or attempt(name))
        print(f"\r{i}/{len(names)} {name:60s}", end="", file=sys.stderr)
    with (DOCS / "support.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
    (DOCS / "supported_models.md").write_text(page(rows))


if __name__ == "__main__":
    main()
