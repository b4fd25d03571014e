"""Merge maps against a drawing by loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

import tokenmerge as tm
from tests.contract.table import batch, build
from tokenmerge.engine.reduce import grid_of
from tokenmerge.visualization.merge_maps import enlarge, maps_figure, save_figure


@pytest.mark.parametrize("grid", [(2, 3), (4, 4), (1, 5)])
def test_equals_a_drawing_by_loops(grid: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    patch = 3
    image = torch.rand(3, grid[0] * patch, grid[1] * patch, generator=generator)
    owner = torch.randint(0, 4, (grid[0] * grid[1],), generator=generator) + 5
    drawn = tm.merge_map(image, owner, grid, border=0.25)
    label = [[int(owner[(y // patch) * grid[1] + x // patch]) for x in range(image.shape[2])] for y in range(image.shape[1])]
    for y in range(image.shape[1]):
        for x in range(image.shape[2]):
            edge = (x > 0 and label[y][x] != label[y][x - 1]) or (y > 0 and label[y][x] != label[y - 1][x])
            members = [image[:, v, u] for v, row in enumerate(label) for u, group in enumerate(row) if group == label[y][x]]
            expected = torch.full((3,), 0.25) if edge else torch.stack(members).mean(0)
            torch.testing.assert_close(drawn[:, y, x], expected)


def test_enlarge_keeps_pixels_square() -> None:
    assert enlarge(torch.zeros(1, 28, 28)).shape == (1, 224, 224)
    assert enlarge(torch.zeros(3, 224, 300)).shape == (3, 224, 300)


def test_figures_are_written(tmp_path: Path) -> None:
    save_figure(maps_figure([("a", [torch.rand(1, 8, 8)] * 2, ["x", "y"])]), tmp_path / "maps.png")
    assert [path.name for path in tmp_path.iterdir()] == ["maps.png"]
    assert (tmp_path / "maps.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_shows_itself() -> None:
    model = tm.apply(tm.load_model("embedded"), tm.ToMe(r=8))
    x = next(tm.load_images("embedded").batches(5)).images
    with torch.inference_mode(), tm.trace(model) as t:
        model(x)
    shown = t._repr_html_()
    assert shown.count("<tr>") == 4
    assert shown.count("<img") == 4 * 12  # the image and eleven layers: the last one merges nothing
    assert "11: 109" in shown


@pytest.mark.parametrize(
    ("size", "patch", "grid"), [((28, 56), 7, (4, 8)), ((384, 384), 16, (24, 24)), ((98, 42), 14, (7, 3))]
)
def test_grids(size: tuple[int, int], patch: int, grid: tuple[int, int]) -> None:
    assert grid_of(size[0] * size[1] // patch**2, *size) == grid
    model = VisionTransformer(img_size=size, patch_size=patch, embed_dim=16, depth=2, num_heads=2, reg_tokens=4).eval()
    x = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    maps = tm.draw_maps(model, x, list(x), tm.ToMe(r=5, last_layer="full"))
    for image, one in zip(x, maps, strict=True):
        assert one.tokens == [grid[0] * grid[1], grid[0] * grid[1] - 5]  # with five prefix tokens
        assert one.pictures[-1].shape == image.shape
        assert not torch.equal(one.pictures[0], one.pictures[1])


def test_dropped_patches_are_dark() -> None:
    image = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    shown = tm.merge_map(image, torch.tensor([-1, 0, 1, -1]), (2, 2), border=0.5)
    torch.testing.assert_close(shown[:, 0, :2], 0.25 * image[:, 0, :2])
    torch.testing.assert_close(shown[:, 3, 3], 0.25 * image[:, 3, 3])
    torch.testing.assert_close(shown[:, 1, 3], image[:, :2, 2:].mean((1, 2)))


def test_groups_of_a_video_span_frames() -> None:
    """Frames are side by side; a step of the grid covers several frames, and a group has one colour in all of them."""
    generator = torch.Generator().manual_seed(0)
    frames, steps, patch = 4, 2, 3
    video = torch.rand(frames, 3, 2 * patch, 2 * patch, generator=generator)
    owner = torch.randint(0, 3, (steps * 2 * 2,), generator=generator)
    drawn = tm.merge_map(video, owner, (steps, 2, 2), border=0.25)
    assert drawn.shape == (3, 2 * patch, frames * 2 * patch)
    width = 2 * patch

    def group(y: int, x: int) -> int:
        step = (x // width) * steps // frames
        return int(owner[step * 4 + (y // patch) * 2 + (x % width) // patch])

    for y in range(2 * patch):
        for x in range(frames * width):
            mine = group(y, x)
            edge = (x > 0 and mine != group(y, x - 1)) or (y > 0 and mine != group(y - 1, x))
            members = [
                video[u // width, :, v, u % width]
                for v in range(2 * patch)
                for u in range(frames * width)
                if group(v, u) == mine
            ]
            expected = torch.full((3,), 0.25) if edge else torch.stack(members).mean(0)
            torch.testing.assert_close(drawn[:, y, x], expected)


def test_maps_of_a_video_model() -> None:
    model, clips = build("hf-videomae"), batch("hf-videomae", 2)
    pictures = [clip.sigmoid() for clip in clips]
    maps = tm.draw_maps(model, clips, pictures, tm.ToMe(r=5))
    assert [one.tokens for one in maps] == [[20, 15, 10, 5]] * 2
    assert maps[0].pictures[0].shape == (3, 40, 80)
    with torch.inference_mode(), tm.trace(tm.apply(model, tm.ToMe(r=5))) as t:
        model(clips)
    assert t._repr_html_().count("<img") == 2 * 5
