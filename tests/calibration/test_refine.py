"""When fewer merging layers are as good."""

from __future__ import annotations

import torch

from tokenmerge.calibration.refine import same_loss


def test_losses_are_the_same_where_the_images_cannot_tell() -> None:
    least = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert same_loss(least, least)
    assert same_loss(least - 0.1, least)
    assert not same_loss(least + 0.1, least)  # little, but on every image
    assert same_loss(least + torch.tensor([2.0, -1.9, 2.0, -1.9]), least)  # on average more, but not reliably
    assert not same_loss(least + torch.tensor([2.0, 2.1, 2.0, -0.1]), least)
