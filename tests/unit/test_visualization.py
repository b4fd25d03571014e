"""Merge maps against a drawing by loops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tokenmerge as tm
from tokenmerge.visualization import enlarge, maps_figure, save_figure


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


def test_dropped_patches_are_dark() -> None:
    image = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    shown = tm.merge_map(image, torch.tensor([-1, 0, 1, -1]), (2, 2), border=0.5)
    torch.testing.assert_close(shown[:, 0, :2], 0.25 * image[:, 0, :2])
    torch.testing.assert_close(shown[:, 3, 3], 0.25 * image[:, 3, 3])
    torch.testing.assert_close(shown[:, 1, 3], image[:, :2, 2:].mean((1, 2)))
