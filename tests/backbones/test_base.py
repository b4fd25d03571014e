"""What all backbones share: versions of libraries, and facts about models."""

from __future__ import annotations

import pytest

import tokenmerge as tm
from tests.contract.table import MODELS, build
from tests.tiny_models import CLASSES
from tokenmerge.backbones import find_backbone, helpers


@pytest.mark.parametrize(
    ("found", "supported"), [("5.9rc1", False), ("5.19rc1", False), ("5.19", True), ("5.100.dev0", True)]
)
def test_versions_are_compared_as_versions(found: str, supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits glued together would make 5.9rc1 newer than 5.19."""
    monkeypatch.setattr(helpers, "version", lambda package: found)
    if supported:
        helpers.require_version("transformers", "5.19")
    else:
        with pytest.raises(tm.Unsupported, match=f"transformers {found} is installed; supported is transformers ≥ 5.19"):
            helpers.require_version("transformers", "5.19")


@pytest.mark.parametrize("name", MODELS)
def test_every_backbone_knows_its_models(name: str) -> None:
    """Facts that other packages ask for, so that none of them has to know a library."""
    model = build(name)
    backbone = find_backbone(model)
    assert len(backbone.blocks(model)) == 4
    assert backbone.prefix(model) == MODELS[name].prefix
    assert backbone.head_reads_prefix_only(model) == MODELS[name].prefix_head
    assert backbone.num_classes(model) == MODELS[name].classes
    if MODELS[name].library != "timm":  # timm's data config is that of the architecture, not of this instance
        assert backbone.input_size(model) == MODELS[name].image
    if MODELS[name].checkpointing:
        backbone.enable_checkpointing(model)
    else:
        with pytest.raises(ValueError, match="no gradient checkpointing"):
            backbone.enable_checkpointing(model)


def test_class_names_come_from_the_model() -> None:
    embedded = tm.load_model("embedded")
    names = find_backbone(embedded).class_names(embedded)
    assert names is not None
    assert names[8] == "bag"
    assert find_backbone(build("cls")).class_names(build("cls")) is None
    hugging_face = build("hf-vit")
    assert list(find_backbone(hugging_face).class_names(hugging_face) or ()) == [f"LABEL_{i}" for i in range(CLASSES)]
