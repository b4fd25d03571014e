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

import timm
import torch
import torchvision
import transformers
from torch import nn

import tokenmerge as tm
import tokenmerge.models
from tokenmerge.backbones import find_backbone

# timm's modules whose models are made of attention over patches.
MODULES = (
    "beit", "cait", "convit", "crossvit", "deit", "efficientvit_mit", "efficientvit_msra", "eva", "fastvit",
    "hiera", "levit", "mobilevit", "mvitv2", "naflexvit", "pit", "swin_transformer", "swin_transformer_v2",
    "tiny_vit", "tnt", "twins", "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos",
    "vision_transformer_sam", "visformer", "vitamin", "volo", "xcit",
)  # fmt: skip
# Classes of transformers that have ViTs inside.
HUGGING_FACE = (
    "BeitModel", "CLIPForImageClassification", "CLIPModel", "CLIPVisionModel", "CLIPVisionModelWithProjection",
    "DINOv3ViTModel", "DeiTForImageClassification", "DeiTForImageClassificationWithTeacher", "DeiTModel", "Dinov2Backbone",
    "Dinov2ForImageClassification", "Dinov2Model", "Dinov2WithRegistersBackbone",
    "Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersModel", "IJepaModel", "SiglipForImageClassification",
    "SiglipModel", "SiglipVisionModel", "SwinModel", "ViTForImageClassification", "ViTForMaskedImageModeling", "ViTMAEModel",
    "ViTMSNModel", "ViTModel",
)  # fmt: skip
DOCS = Path(__file__).parent
NOT_PLAIN = "not a family of plain blocks (attention of all tokens of one sequence to each other, then an MLP)"


@dataclass(frozen=True)
class Row:
    architecture: str
    model_class: str
    prefix_tokens: str
    pooling: str
    result: str  # "works", or "refused: …"


def architectures() -> list[str]:
    """timm's and ours by name; `hf:` before a class of transformers, `torchvision:` before a name of torchvision's."""
    ours = [name for name in tokenmerge.models.__all__ if name in timm.list_models(name)]
    return [
        *sorted({name for module in MODULES for name in timm.list_models(module=module)} | set(ours)),
        *(f"hf:{name}" for name in HUGGING_FACE),
        *(f"torchvision:{name}" for name in torchvision.models.list_models(include="vit_*")),
    ]


def create(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The model without pretrained weights, and the shape of an image."""
    library, _, short = name.rpartition(":")
    if library == "hf":
        cls = getattr(transformers, short)
        config = cls.config_class()
        size = getattr(config, "image_size", None) or config.vision_config.image_size
        return cls(config).eval(), (3, size, size)
    if library == "torchvision":
        model = torchvision.models.get_model(short)
        return model.eval(), (3, model.image_size, model.image_size)
    model = timm.create_model(name)
    return model.eval(), model.default_cfg["input_size"]


def attempt(name: str) -> Row:
    """Build it without weights, apply ToMe, run one image on the meta device, and undo."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            model, image = create(name)
        except Exception as error:  # some architectures cannot be built on the meta device
            return Row(name, "?", "–", "–", f"not tried: cannot be built without weights ({type(error).__name__})")
        kind = type(model).__name__
        prefix = str(getattr(model, "num_prefix_tokens", "–"))
        pooling = "attention" if getattr(model, "attn_pool", None) is not None else getattr(model, "global_pool", "–")
        pooling = pooling if isinstance(pooling, str) else "–"
        try:
            backbone = find_backbone(model)
        except tm.Unsupported as error:
            return Row(name, kind, prefix, pooling, f"refused: {why(str(error), kind, name)}")
        if ":" in name or name in tokenmerge.models.__all__:
            prefix = str(backbone.prefix(model))
            pooling = "token" if backbone.head_reads_prefix_only(model) else ""
        x = torch.empty(1, *image)
        with torch.no_grad():
            expected = backbone.output(model(x)).shape
            merged = backbone.output(tm.apply(model, tm.ToMe(2))(x)).shape
        tm.remove(model)
        if merged != expected:
            raise AssertionError(f"{name}: merged output {merged}, baseline {expected}")
        return Row(name, kind, prefix, pooling, "works" if ":" in name else f"works ({backbone.name})")


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
        "Generated by `make docs`: every timm architecture that looks like a ViT, ours, Hugging Face classes (`hf:`)",
        "and torchvision names, on the meta device. The ones that work have run `ToMe(2)` on one image.",
        f"{works} of {len(rows)} work; each is listed in `support.csv`. timm {timm.__version__}, transformers "
        f"{transformers.__version__}, torchvision {torchvision.__version__.partition('+')[0]}.",
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
