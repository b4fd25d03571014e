"""What the original tokens get where the whole sequence is returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tokenmerge as tm
from tests.contract.table import CONFIGS, batch, build, output
from tests.tiny_models import vit

EACH = CONFIGS["atm-each"]


LAST = tm.ATM(counts=[0, 0, 0, 6])


@pytest.mark.parametrize("method", ["atm-each", "atm-mean", "tome", "evit", "ats", "evovit", "pitome"])
@pytest.mark.parametrize("name", ["mae-avg", "registers", "hf-vit-model", "eva02"])
def test_tokens_that_never_merged_are_restored_as_they_are(name: str, method: str) -> None:
    model, x = build(name), batch(name)

    def sequence(merged: Any) -> torch.Tensor:
        return merged.forward_features(x) if hasattr(merged, "forward_features") else merged(x).last_hidden_state

    with torch.inference_mode():
        with tm.trace(tm.apply(model, CONFIGS[method], restore="group")) as t:
            group = sequence(model)
        residual = sequence(tm.apply(model, CONFIGS[method], restore="residual"))
    for image, owner in enumerate(t.owner):
        size = torch.bincount(owner[owner >= 0], minlength=len(owner))
        alone = (owner >= 0) & (size[owner.clamp(min=0)] == 1)
        torch.testing.assert_close(residual[image][alone], group[image][alone], atol=1e-6, rtol=1e-5)
        shared = (owner >= 0) & (size[owner.clamp(min=0)] > 1)
        if shared.any():
            assert (residual[image][shared] - group[image][shared]).abs().amax(1).min() > 1e-4


def test_a_merge_in_the_last_layer_gives_back_what_entered_it() -> None:
    """After the merge, the MLP of the last block changes the group; every member gets its own vector and this change."""
    torch.manual_seed(0)
    model, x = build("unpooled"), batch("unpooled")
    model.norm = nn.Identity()
    seen: list[torch.Tensor] = []
    model.blocks[-1].norm2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.inference_mode():
        tm.apply(model, tm.NoMerge(last_layer="full"))(x)
        with tm.trace(tm.apply(model, LAST, restore="residual")) as t:
            out = model(x)
        group = tm.apply(model, LAST, restore="group")(x)
    before, merged = seen[0], seen[1]
    change = group - merged.gather(1, t.owner.unsqueeze(-1).expand_as(group))  # of each group, in the MLP
    torch.testing.assert_close(out, before + change, atol=1e-5, rtol=1e-5)


def test_the_mean_over_the_sequence_does_not_change() -> None:
    """What members differ from their group adds up to zero: a mean before the norm is the same."""
    model, x = build("unpooled"), batch("unpooled")
    model.norm = nn.Identity()
    with torch.inference_mode():
        group = tm.apply(model, EACH, restore="group")(x)
        residual = tm.apply(model, EACH, restore="residual")(x)
    assert not torch.allclose(group, residual, atol=1e-3)
    torch.testing.assert_close(group.mean(1), residual.mean(1), atol=1e-5, rtol=1e-5)


def test_by_default_the_sequence_gets_its_own_vectors_and_a_classifier_reads_groups() -> None:
    model, x = build("mae-avg"), batch("mae-avg")
    with torch.inference_mode():
        by_name = {name: tm.apply(model, EACH, restore=name) and (model(x), model.forward_features(x))
                   for name in ("group", "residual")}  # type: ignore[arg-type]  # fmt: skip
        tm.apply(model, EACH)
        assert torch.equal(model(x), by_name["group"][0])
        assert torch.equal(model.forward_features(x), by_name["residual"][1])
        features, x = tm.apply(build("hf-vit-model"), EACH), batch("hf-vit-model")
        found = features(x).last_hidden_state
        assert torch.equal(found, tm.apply(features, EACH, restore="residual")(x).last_hidden_state)


def test_hidden_states_of_every_block_agree_with_the_output() -> None:
    """Where every block returns the whole sequence, merged tokens are read off it again."""
    model, x = build("hf-dinov2"), batch("hf-dinov2")
    with torch.inference_mode():
        tm.apply(model, EACH, restore="residual")
        torch.testing.assert_close(output(model(x, output_hidden_states=True)), output(model(x)), atol=1e-5, rtol=1e-5)


def test_gradients_and_unknown_names() -> None:
    model = tm.apply(vit(num_classes=0, global_pool=""), tm.ToMe(4), restore="residual").train()
    model(torch.randn(2, 3, 40, 40)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.blocks.parameters())
    with pytest.raises(ValueError, match="restore is one of 'group', 'residual', not 'none'"):
        tm.apply(model, tm.ToMe(4), restore="none")  # type: ignore[arg-type]
