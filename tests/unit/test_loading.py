"""What users have in their hands: a tensor, a loader, a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tokenmerge as tm
from tokenmerge import embedded
from tokenmerge.loading import as_images


def test_a_tensor_and_loaders_are_the_same_images() -> None:
    images = embedded.load_images("test", 12)
    batch = next(images.batches(12))
    assert batch.labels is not None
    model, methods = embedded.load_model(), [tm.ToMe(8)]
    expected = tm.evaluate(model, images, methods, batch_size=5)[1]
    loader = DataLoader(TensorDataset(batch.images, batch.labels), batch_size=7)
    unlabelled = DataLoader(batch.images, batch_size=4)
    for source, labelled in ((batch.images, False), (unlabelled, False), (loader, True), (images, True)):
        found = tm.evaluate(model, source, methods, batch_size=5)[1]
        assert (found.images, found.gmacs, found.agreement) == (12, expected.gmacs, expected.agreement)
        assert found.distance == pytest.approx(expected.distance, rel=1e-6)
        assert found.top1 == (expected.top1 if labelled else None)
    setting = tm.calibrate(model, loader, gmacs=0.7, sample=6, rounds=0, batch_size=6)
    assert setting.images == 6


def test_bad_sources(tmp_path: Path) -> None:
    model = embedded.load_model()
    with pytest.raises(ValueError, match="a loader must give batches"):
        as_images([], model)
    with pytest.raises(ValueError, match="a loader must give batches"):
        as_images([torch.zeros(3, 4)], model)
    with pytest.raises(ValueError, match="no images below it"):
        as_images(tmp_path, model)
