"""A certificate and a canary on real photographs.

    python experiments/certify_photos.py deit_tiny_patch16_224 WEIGHTS PHOTOS OUT [LEVEL]        # 330 photographs, 15 minutes

Certifies LEVEL (0.98) with 48 photographs to calibrate and 182 to test, and looks at 100 others. Then a canary that checks
every image watches the certified config on these photographs, and on the same photographs blurred, noisy and inverted.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

import tokenmerge as tm
from tokenmerge.engine.patch import shared_weights_copy


def shifts(x: Tensor) -> dict[str, Tensor]:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    return {"as they are": x, "blurred": gaussian_blur(x, [9, 9], [3.0, 3.0]), "noisy": x + 0.8 * noise, "inverted": -x}


@torch.inference_mode()
def main(name: str, weights: str, photos: str, out: str, level: float = 0.98) -> None:
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
    x = torch.cat([batch.images for batch in others.batches(32)])
    merged = tm.apply(shared_weights_copy(model), certificate.certified.method)
    for shift, shifted in shifts(x).items():
        alarms: list[tm.Alarm] = []
        canary = tm.Canary(
            merged, 1.0, level, on_alarm=alarms.append, fallback=True, background=False, expected_tokens=about["tokens_left"]
        )
        when: dict[str, int] = {}
        for number, image in enumerate(shifted.split(1), 1):
            got = canary(image)
            if canary.falling_back and alarms[-1].metrics["images"] < number:
                torch.testing.assert_close(got, model(image), atol=0, rtol=0)
            for alarm in alarms:
                when.setdefault(alarm.kind, number)
        found = canary.metrics()
        print(
            f"{shift}: {found['disagreements']:.0f} of {found['sampled']:.0f} sampled changed, "
            f"{'fell back' if canary.falling_back else 'no alarm'}; alarms {when or 'none'}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:5], *map(float, sys.argv[5:]))
