"""Tile grids: InternVL's rule, compared with a second statement of it over all small ratios."""

from __future__ import annotations

import random

import pytest

from internvl_pack.encode.tiles import (
    TileGrid,
    candidate_grids,
    max_tiles_per_image,
    plan_grid,
    tokens_per_tile,
)
from internvl_pack.errors import UserError


def published_rule(width: int, height: int, min_num: int, max_num: int, image_size: int = 448) -> tuple[int, int]:
    """InternVL's rule in other words, (columns, rows): of the grids nearest in ratio, the last that the image fills
    by more than half, else the first."""
    grids = set((i, j) for n in range(min_num, max_num + 1) for i in range(1, n + 1) for j in range(1, n + 1)
                if min_num <= i * j <= max_num)  # fmt: skip
    grids = sorted(grids, key=lambda grid: grid[0] * grid[1])
    if not grids:
        return 1, 1
    distances = [abs(width / height - columns / rows) for columns, rows in grids]
    nearest = [grid for grid, distance in zip(grids, distances, strict=True) if distance == min(distances)]
    filled = [grid for grid in nearest[1:] if width * height > 0.5 * image_size * image_size * grid[0] * grid[1]]
    return (nearest[:1] + filled)[-1]


def planned(width: int, height: int, min_tiles: int = 1, max_tiles: int = 12) -> tuple[int, int]:
    grid = plan_grid(width, height, min_tiles=min_tiles, max_tiles=max_tiles)
    return grid.columns, grid.rows


@pytest.mark.parametrize(
    "size, max_tiles, tiles",
    [
        ((448, 448), 12, 1),
        ((448, 448), 6, 1),
        ((633, 633), 12, 1),  # just below half the area of 2x2
        ((634, 634), 12, 5),  # just above: 2x2 and the thumbnail
        ((900, 300), 12, 4),
        ((1280, 960), 12, 13),
        ((2000, 1), 12, 13),
        ((2000, 1), 6, 7),
        ((1, 2000), 12, 13),
        ((1, 1), 12, 1),
        ((3, 1), 12, 4),
        ((5000, 5000), 1, 1),
    ],
)
def test_known_sizes(size, max_tiles, tiles):
    assert plan_grid(*size, max_tiles=max_tiles).num_tiles == tiles


@pytest.mark.slow
@pytest.mark.parametrize(
    "min_tiles, max_tiles", [(1, 12), (1, 6), (1, 4), (1, 2), (2, 2), (4, 6), (6, 12), (12, 12), (1, 24)]
)
def test_every_small_ratio_agrees_with_the_published_rule(min_tiles, max_tiles):
    """All ratios of numbers up to 40: every tie between two grids is among them."""
    for width in range(1, 41):
        for height in range(1, 41):
            assert planned(width, height, min_tiles, max_tiles) == published_rule(width, height, min_tiles, max_tiles)


@pytest.mark.slow
def test_sizes_around_the_area_tie_break_agree_with_the_published_rule():
    for columns, rows in [(1, 1), (2, 2), (3, 3), (1, 2), (2, 4), (3, 1), (3, 2), (4, 3), (5, 2)]:
        for scale in range(1, 400, 3):
            for offset in (-1, 0, 1):
                width, height = columns * 5 * scale, max(1, rows * 5 * scale + offset)
                assert planned(width, height) == published_rule(width, height, 1, 12)


@pytest.mark.slow
def test_random_sizes_agree_with_the_published_rule():
    draw = random.Random(0)
    for _ in range(4000):
        width, height = draw.randint(1, 6000), draw.randint(1, 6000)
        max_tiles = draw.randint(1, 16)
        min_tiles = draw.randint(1, max_tiles)
        assert planned(width, height, min_tiles, max_tiles) == published_rule(width, height, min_tiles, max_tiles)


def test_a_tie_between_grids_of_one_size_goes_by_the_published_order():
    """A 5:4 image lies exactly between 1x2 and 2x1; large ones take the later grid, small ones the earlier."""
    order = candidate_grids(2, 2)
    assert set(order) == {(1, 2), (2, 1)}
    assert planned(50, 40, 2, 2) == order[0] == published_rule(50, 40, 2, 2)
    assert planned(1000, 800, 2, 2) == order[1] == published_rule(1000, 800, 2, 2)


def test_a_minimum_above_the_maximum_gives_one_tile():
    assert plan_grid(900, 300, min_tiles=4, max_tiles=2) == TileGrid(1, 1) and published_rule(900, 300, 4, 2) == (1, 1)


def test_the_thumbnail_comes_with_more_than_one_tile_only():
    assert plan_grid(448, 448) == TileGrid(1, 1, thumbnail=False)
    assert plan_grid(900, 300) == TileGrid(3, 1, thumbnail=True)
    assert plan_grid(900, 300, use_thumbnail=False) == TileGrid(3, 1, thumbnail=False)


@pytest.mark.parametrize(
    "total, images, each", [(12, 1, 12), (12, 2, 6), (12, 5, 2), (12, 13, 1), (12, 49, 1), (12, 0, 12)]
)
def test_images_share_the_maximum(total, images, each):
    assert max_tiles_per_image(total, images) == each


@pytest.mark.parametrize(
    "edge, patch, ratio, tokens", [(448, 14, 0.5, 256), (224, 14, 0.5, 64), (56, 14, 0.5, 4), (448, 14, 1.0, 1024)]
)
def test_tokens_of_a_tile(edge, patch, ratio, tokens):
    assert tokens_per_tile(edge, patch, ratio) == tokens


@pytest.mark.parametrize("edge, patch, ratio", [(450, 14, 0.5), (14, 14, 0.5), (42, 14, 0.5)])
def test_a_tile_that_is_no_whole_number_of_tokens_is_a_users_mistake(edge, patch, ratio):
    with pytest.raises(UserError, match="force_image_size"):
        tokens_per_tile(edge, patch, ratio)
