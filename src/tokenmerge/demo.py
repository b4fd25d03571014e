"""The main job on the embedded model: unmerged, ToMe and ATM side by side at equal cost, with plots and merge maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from .evaluation import Result, evaluate
from .files import write_csv
from .loading import Images, load_images, load_model
from .methods import ATM, Method, NoMerge, TopR
from .surgery import apply, remove
from .tracing import trace
from .visualization import enlarge, merge_map, plot_tradeoff, require_matplotlib, save_maps

# Found by hand on the embedded training images, from mild to strong.
SETTINGS = (
    ATM(alpha=1.0, beta=0.02, theta_min=0.945),
    ATM(alpha=0.99, beta=0.03, theta_min=0.88),
    ATM(alpha=0.98, beta=0.05, theta_min=0.8),
)


def demo(
    out: Path,
    *,
    images: int = 1000,
    batch_size: int = 50,
    progress: Callable[[int], object] = lambda images: None,
) -> list[Result]:
    """Measure, and write `results.csv`, `tradeoff.png` and `merge_maps.png` into `out`."""
    require_matplotlib()
    out.mkdir(parents=True, exist_ok=True)
    model, data = load_model("embedded"), load_images("embedded", limit=images)
    probe = next(iter(data.batches(batch_size))).images
    rivals = [top_r_at(model, probe, mean_gmacs(model, probe, method)) for method in SETTINGS]
    methods: dict[str, Method] = {"free last layer": NoMerge()}
    for ours, theirs in zip(SETTINGS, rivals, strict=True):
        mean_r = sum(theirs.ramp) / len(theirs.ramp)  # type: ignore[arg-type]
        methods |= {f"ToMe r≈{mean_r:.1f}": theirs, f"ATM({ours.alpha}, {ours.beta}, {ours.theta_min})": ours}
    results = evaluate(model, data, methods, batch_size=batch_size, progress=progress)
    write_csv([result.row() for result in results], out / "results.csv")
    points = {name: [(r.gmacs, r.distance) for r in results if r.name.startswith(name)] for name in ("ToMe", "ATM")}
    plot_tradeoff(points, "GMACs per image", "class-token cosine distance", out / "tradeoff.png")
    draw_maps(model, data, rivals[1], replace(SETTINGS[1], batch="each"), out / "merge_maps.png")
    return results


@torch.inference_mode()
def mean_gmacs(model: nn.Module, x: Tensor, method: Method) -> float:
    apply(model, method)
    with trace(model, detail=False) as t:
        model(x)
    remove(model)
    return t.cost("paper").gmacs


def top_r_at(model: nn.Module, x: Tensor, gmacs: float) -> TopR:
    """ToMe at a given cost: the same r in every layer, and one more in the first few, to come as near as possible."""
    depth = len(model.blocks)  # type: ignore[arg-type]
    low, high = 0, depth * (x.shape[-1] ** 2 // 4)  # merges in all layers together

    def spread(total: int) -> TopR:
        return TopR(ramp=tuple(total // depth + (i < total % depth) for i in range(depth)))

    while high - low > 1:
        middle = (low + high) // 2
        if mean_gmacs(model, x[:1], spread(middle)) > gmacs:
            low = middle
        else:
            high = middle
    return min(spread(low), spread(high), key=lambda m: abs(mean_gmacs(model, x[:1], m) - gmacs))


@torch.inference_mode()
def draw_maps(model: nn.Module, data: Images, theirs: Method, ours: Method, path: Path, count: int = 8) -> None:
    """Original, ToMe and ATM per image, from the one with the fewest tokens left under ATM to the one with the most."""
    x = next(iter(data.batches(64))).images
    owners, left = {}, {}
    for name, method in (("ToMe", theirs), ("ATM", ours)):
        apply(model, method)
        with trace(model) as t:
            model(x)
        owners[name], left[name] = t.owner, t.tokens[-2]  # the last layer keeps the class token only
    remove(model)
    chosen = left["ATM"].argsort()[torch.linspace(0, len(x) - 1, count).long()].tolist()
    grid = model.patch_embed.grid_size  # type: ignore[union-attr]
    pictures = {i: enlarge(data.picture(x[i])) for i in chosen}
    rows = [("image", [pictures[i] for i in chosen], [""] * count)]
    for name, owner in owners.items():
        maps = [merge_map(pictures[i], owner[i, 1:], grid) for i in chosen]  # type: ignore[arg-type]
        rows.append((name, maps, [f"{int(left[name][i])} tokens" for i in chosen]))
    save_maps(rows, path)
