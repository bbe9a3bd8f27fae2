"""Draws the pictures of docs/gemm.md and docs/attention.md, from the library's own functions.

    draw_figures.py [FOLDER]        FOLDER is docs/figures where it is not given

The order and the widths of tiles are those of `thunderkittens._C`, which computes them by the code
that the kernels run. So a picture cannot show what a kernel does not do. The causal schedule is
computed here from what `choose()` says, by the rule of
csrc/attention/forward/forward_scheduler.cuh."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot as plt

from thunderkittens import _C
from thunderkittens.info import EXAMPLE_GPU

GPU = _C.DeviceProperties(**EXAMPLE_GPU)
SMS = EXAMPLE_GPU["sm_count"]
UNIT = 16  # columns: tile widths are multiples of it
ROWS = 128  # of a tile in these pictures

# The text stays text, and two runs write the same bytes.
plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "thunderkittens", "font.size": 9})


def product(m: int, n: int, k: int, **more: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """The tiles of a product in the order of the work, and what is chosen for it."""
    problem = {"m": m, "n": n, "k": k, **more}
    return _C.gemm_tile_order(problem, GPU).astype(int), _C.choose("gemm", problem, GPU)


def painted(tiles: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A picture of the output, a row of tiles high and UNIT columns wide per point."""
    end = int((tiles[:, 3] + tiles[:, 4]).max())
    picture = np.full((int(tiles[:, 1].max()) + 1, -(-end // UNIT)), np.nan)
    for (_, row, _, first, width), value in zip(tiles, values, strict=True):
        picture[row, first // UNIT : -(-(first + width) // UNIT)] = value
    return picture


def show(axes: Any, picture: np.ndarray, title: str, colours: str) -> Any:
    height, width = picture.shape
    extent = (0, width * UNIT, height * ROWS, 0)
    image = axes.imshow(
        picture, cmap=colours, extent=extent, aspect="auto", interpolation="nearest"
    )
    axes.set(title=title, xlabel="columns of the output (n)")
    return image


def raster() -> Any:
    """Which wave of the SMs computes which tile: raster groups, and row after row."""
    size = 4096
    tiles, choice = product(size, size, size)
    blocks = choice["blocks"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 4), sharey=True)
    image = show(
        left,
        painted(tiles, np.arange(len(tiles)) // blocks),
        "tk.gemm: raster groups",
        "viridis",
    )
    first = tiles[:blocks]
    left.plot(
        first[:, 3] + first[:, 4] / 2,
        (first[:, 1] + 0.5) * ROWS,
        color="white",
        linewidth=0.7,
    )
    left.set_ylabel("rows of the output (m)")
    rows, width = int(tiles[:, 1].max()) + 1, choice["block_n"]
    plain = _C.tile_schedule(rows, size // width, 1, "row_major").astype(int)
    plain = np.column_stack([plain, plain[:, 2] * width, np.full(len(plain), width)])
    show(right, painted(plain, np.arange(len(plain)) // blocks), "row after row", "viridis")
    figure.colorbar(image, ax=[left, right], label=f"wave of {blocks} blocks", ticks=range(5))
    return figure


def balanced_tiles() -> Any:
    """The widths of tiles, where they are chosen so that the last wave is full."""
    cases = ((4096, 8192, 8192), (4096, 4096, 4096), (2048, 7168, 4096))
    figure, panels = plt.subplots(1, len(cases), figsize=(11, 3.6))
    for axes, (m, n, k) in zip(panels, cases, strict=True):
        tiles, _ = product(m, n, k, b_n_major=False)
        waves = len(tiles) / SMS
        widths = sorted(set(tiles[:, 4]), reverse=True)
        image = show(
            axes,
            # Neighbours in two shades.
            painted(tiles, np.array([2 * widths.index(w) for w in tiles[:, 4]]) + tiles[:, 2] % 2),
            f"{m} x {n} x {k}: {len(tiles)} tiles,\n{waves:.2f} waves of {SMS} SMs",
            "Paired",
        )
        image.set_clim(0, 11)
        handles = [
            plt.Rectangle((0, 0), 1, 1, color=image.to_rgba(2 * i)) for i in range(len(widths))
        ]
        labels = [f"{w} columns" for w in widths]
        axes.legend(handles, labels, loc="lower right", fontsize=7)
    panels[0].set_ylabel("rows of the output (m)")
    figure.tight_layout()
    return figure


def swizzle() -> Any:
    """In which of the eight groups of four banks each 16 bytes of a tile's rows lie."""
    figure, panels = plt.subplots(1, 2, figsize=(7, 3.6))
    for axes, bytes_, title in zip(panels, (0, 128), ("as it is", "swizzled"), strict=True):
        offsets = _C.shared_tile_offsets(8, 64, 2, bytes_)[:, ::8].astype(int)
        groups = offsets // 16 % 8
        axes.imshow(groups, cmap="tab10", vmin=0, vmax=9, interpolation="nearest")
        for (row, column), group in np.ndenumerate(groups):
            axes.text(column, row, str(group), ha="center", va="center")
        axes.set(title=title, xlabel="16 bytes of a row", ylabel="row of the tile")
    figure.tight_layout()
    return figure


def causal_items(choice: dict[str, Any], heads: int, length: int) -> list[int]:
    """The cost of each item of causal attention in key blocks, in the order of the work."""
    rows, keys = 64 * choice["warpgroups"], choice["block_n"]
    blocks, section = -(-length // rows), choice["section_heads"]
    items = []
    for first in range(0, heads, section):
        for level in range(blocks):  # of queries, the longest first
            last_row = min((blocks - level) * rows, length)
            items += [-(-last_row // keys)] * min(section, heads - first)
    return items


def causal_schedule() -> Any:
    """What each SM gets of causal attention, dealt round after round and back and forth."""
    batch, heads, length, dim = 1, 16, 4096, 128
    problem = {
        **{"batch": batch, "q_heads": heads, "kv_heads": heads, "causal": 1},
        **{"q_length": length, "k_length": length, "head_dim": dim, "value_dim": dim},
    }
    choice = _C.choose("attention", problem, GPU)
    items = causal_items(choice, batch * heads, length)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, turns in zip(panels, (False, True), strict=True):
        ends = np.zeros(SMS)
        for start in range(0, len(items), SMS):
            level = np.zeros(SMS)
            level[: len(items) - start] = items[start : start + SMS]
            if turns and start // SMS % 2:
                level = level[::-1]
            axes.stairs(ends + level, baseline=ends, fill=True)
            ends += level
        axes.axhline(ends.mean(), color="black", linewidth=0.8)
        title = "back and forth" if turns else "each round in the same order"
        axes.set(title=f"{title}: last {ends.max():.0f}, mean {ends.mean():.0f}", xlabel="SM")
    panels[0].set_ylabel("key blocks")
    figure.tight_layout()
    return figure


FIGURES: tuple[Callable[[], Any], ...] = (raster, balanced_tiles, swizzle, causal_schedule)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for draw in FIGURES:
        figure = draw()
        figure.savefig(folder / f"{draw.__name__}.svg", metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1]
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else here / "docs" / "figures")
