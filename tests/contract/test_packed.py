"""Images of different lengths: what is packed, what is padded, and what is multiplied."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tokenmerge as tm
from tests.contract.table import BATCH_INVARIANT_PAIRS, CONFIGS, batch, build, output

per_image = pytest.mark.parametrize(("name", "method"), BATCH_INVARIANT_PAIRS)


@per_image
def test_no_multiplication_is_spent_on_padding(name: str, method: str) -> None:
    """Counted by torch while it runs: a batch costs what its images cost alone, and what `cost` says."""
    model, x = tm.apply(build(name).requires_grad_(False), CONFIGS[method]), batch(name, 5)

    def macs(images: torch.Tensor) -> float:
        with (
            torch.no_grad(),
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            model(images)
        return counter.get_total_flops() / 2

    with torch.no_grad(), tm.trace(model, detail=False) as t:
        model(x)
    assert len({tuple(n) for n in torch.stack(t.tokens).T.tolist()}) > 1
    alone = sum(macs(x[i : i + 1]) for i in range(5))
    assert macs(x) <= 1.02 * alone + _matching_in_a_padded_grid(t)
    assert float(t.cost().per_image.sum()) * 1e9 == pytest.approx(alone, rel=0.005)


def _matching_in_a_padded_grid(t: tm.Trace) -> float:
    """Tokens are compared in a grid as wide as the longest image; here, with 25 patches, that is more than 2 %."""
    extra = 0.0
    for call in t.calls:
        for record in call.layers.values():
            longest = int(record.matching.max()) if len(record.matching) else 0
            extra += float((longest - record.matching).sum())
    return extra


@per_image
def test_padded_in_training_equals_packed_in_inference(name: str, method: str) -> None:
    model, x = tm.apply(build(name), CONFIGS[method]), batch(name, 4)
    with torch.no_grad():
        packed = output(model.eval()(x))
        model.train()
        for module in model.modules():  # LV-ViT's batch norms compute something else in training, merged or not
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
        padded = output(model(x))
    torch.testing.assert_close(padded, packed, atol=1e-5, rtol=1e-5)
