"""A certificate and a canary on real photographs.

    python experiments/certify_photos.py deit_tiny_patch16_224 WEIGHTS PHOTOS OUT [LEVEL]        # 20 minutes

Certifies LEVEL (0.95) with 48 photographs to calibrate and 182 to test, and looks at 100 others. Then canaries that check
every image watch the certified config and ToMe on the 100 others, and on the same photographs after a shift: blurred,
noisy, inverted, and as mosaics of 16 photographs each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.functional import gaussian_blur

import tokenmerge as tm
from tokenmerge.engine.patch import shared_weights_copy

TOME_PROMISE = 0.8  # ToMe(r=8) changes about one of ten of these photographs


def mosaics(x: Tensor, generator: torch.Generator) -> Tensor:
    """As many images as given, each of 16 random ones."""
    small = F.avg_pool2d(x, 4)
    drawn = torch.stack([torch.randperm(len(x), generator=generator)[:16] for _ in range(len(x))])
    rows, columns = small.shape[-2:]
    grid = small[drawn].view(len(x), 4, 4, x.shape[1], rows, columns)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(len(x), x.shape[1], 4 * rows, 4 * columns)


def shifts(x: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator)
    return {
        "as they are": x,
        "blurred": gaussian_blur(x, [9, 9], [3.0, 3.0]),
        "noisy": x + 0.8 * noise,
        "inverted": -x,
        "mosaics": mosaics(x, generator),
    }


def watch(model: Any, method: tm.Method, promise: float, x: Tensor, expected_tokens: list[int] | None) -> str:
    """What a canary says of a stream of single images; after it fell back, predictions are the baseline's."""
    merged = tm.apply(shared_weights_copy(model), method)
    alarms: list[tm.Alarm] = []
    canary = tm.Canary(
        merged,
        1.0,
        promise,
        on_alarm=alarms.append,
        fallback=True,
        background=False,
        expected_tokens=expected_tokens,
    )
    when: dict[str, int] = {}
    for number, image in enumerate(x.split(1), 1):
        before = canary.falling_back
        got = canary(image)
        if before:
            torch.testing.assert_close(got, model(image), atol=0, rtol=0)
        for alarm in alarms:
            when.setdefault(alarm.kind, number)
    found = canary.metrics()
    rung = ", ".join(f"{kind} at image {number}" for kind, number in when.items()) or "none"
    end = f"; the other {len(x) - when['predictions']} predictions are the baseline's" if canary.falling_back else ""
    return f"{found['disagreements']:.0f} of {found['sampled']:.0f} sampled changed; alarms: {rung}{end}"


@torch.inference_mode()
def main(name: str, weights: str, photos: str, out: str, level: float = 0.95) -> None:
    model = tm.load_model(name, weights)
    images, others = tm.load_images(photos, model).split(230, 1)
    outcome = tm.optimize(model, images, Path(out), name=name, certify=level, sample=48)
    certificate = outcome.certificate
    assert certificate is not None
    assert certificate.certified is not None
    for one in certificate.tested:
        print(f"{one.ratio:.1%} of the GMACs: {one.changed} of {one.images} changed, p = {one.p_value:.3g}", flush=True)
    print(certificate.sentence)
    print(certificate.power)
    _, fresh = tm.evaluate(model, others, [certificate.certified.method])
    assert fresh.agreement is not None
    changed = round(fresh.images * (1 - fresh.agreement))
    print(f"on {fresh.images} other photographs: {changed} changed; {certificate.certified.method!r}", flush=True)
    about = tm.load_about(Path(out) / "reduction.json")
    order = torch.randperm(others.size, generator=torch.Generator().manual_seed(0))
    x = torch.cat([batch.images for batch in others.batches(32)])[order]
    for shift, shifted in shifts(x).items():
        print(f"certified, {shift}: {watch(model, certificate.certified.method, level, shifted, about['tokens_left'])}")
        print(f"ToMe(r=8), {shift}: {watch(model, tm.ToMe(8), TOME_PROMISE, shifted, None)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(float, sys.argv[5:]))
