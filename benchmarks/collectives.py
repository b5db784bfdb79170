"""The native engine beside Gloo on one host, over sizes: table, JSON and a plot of bandwidth.

    python -m benchmarks.collectives --json result.json --plot docs/benchmarks/collectives.svg

The same measurement as `shardwise bench collectives` (`src/shardwise/commands/bench.py`), with date, commit and machine
beside it and a ladder of sizes for the plot. Bandwidth is the bytes that the operation has to move over its time, so
that the rate of plain copies on all cores is the limit of every operation.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a file: make the package importable, here and in the workers
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from benchmarks.record import header, write_json
from shardwise.collectives import engine
from shardwise.commands import bench

LADDER_RANKS = 4
SIZES = tuple(4 << power for power in range(10, 25, 2))  # 4 KiB to 64 MiB
WIDTH, HEIGHT, MARGIN, GAP = 300, 240, 46, 24
COLOURS = {"shardwise": "#0b7285", "gloo": "#c2255c", "limit": "#868e96"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = _parse(arguments)
    engine.build()
    ladder = [bench.Case(op, LADDER_RANKS, size) for op in bench.OPERATIONS for size in SIZES if options.plot]
    rows = bench.measure_collectives([*bench.STANDARD, *ladder])
    Console().print(bench.render(rows))
    if options.json:
        write_json(options.json, header(("torch", "shardwise")) | {"rows": rows})
    if options.plot:
        options.plot.write_text(plot(rows[len(bench.STANDARD) :]))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the rows")
    parser.add_argument("--plot", type=Path, help="measure a ladder of sizes too and draw it as SVG")
    return parser.parse_args(arguments)


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Bandwidth in GB/s against size, one panel an operation, both axes logarithmic."""
    curves = {op: _curves([row for row in rows if row["operation"] == op]) for op in bench.OPERATIONS}
    rates = [rate for each in curves.values() for curve in each.values() for _, rate in curve]
    low, high = math.floor(math.log10(min(rates))), math.ceil(math.log10(max(rates)))
    panels = [_panel(op, curves[op], index, low, high) for index, op in enumerate(curves)]
    width, height = len(panels) * (WIDTH + GAP), HEIGHT + 2 * MARGIN
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    parts = [f'{svg} font-size="11">', f'<rect width="{width}" height="{height}" fill="white"/>', *panels, "</svg>"]
    return "\n".join(parts) + "\n"


def _curves(rows: Sequence[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """(bytes, GB/s) of each contender and of the limit."""
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in COLOURS}
    for row in rows:
        moved = bench.Case(row["operation"], row["ranks"], row["bytes"]).moved / 1e9
        ours = moved / row["seconds"]["shardwise"]
        curves["shardwise"].append((row["bytes"], ours))
        curves["gloo"].append((row["bytes"], moved / row["seconds"]["gloo"]))
        curves["limit"].append((row["bytes"], ours / row["share_of_copy_limit"]))
    return curves


def _panel(title: str, curves: dict[str, list[tuple[int, float]]], index: int, low: int, high: int) -> str:
    left, bottom = index * (WIDTH + GAP) + MARGIN, HEIGHT + MARGIN
    across, span = WIDTH - MARGIN, math.log(SIZES[-1] / SIZES[0])

    def x(size: int) -> float:
        return left + across * math.log(size / SIZES[0]) / span

    def y(rate: float) -> float:
        return bottom - HEIGHT * (math.log10(rate) - low) / (high - low)

    def text(at: float, height: float, words: str, look: str = "") -> str:
        return f'<text x="{at:.1f}" y="{height:.1f}" {look}>{words}</text>'

    parts = [text(left, MARGIN - 14, f"{title}, {LADDER_RANKS} ranks, GB/s", 'font-weight="bold"')]
    for power in range(low, high + 1):
        level = y(10**power)
        parts.append(f'<line x1="{left}" x2="{left + across}" y1="{level:.1f}" y2="{level:.1f}" stroke="#dee2e6"/>')
        parts.append(text(left - 6, level + 4, f"{10**power:g}", 'text-anchor="end"'))
    for size in SIZES[::2]:
        label = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
        parts.append(text(x(size), bottom + 16, label, 'text-anchor="middle"'))
    for line, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(size):.1f},{y(rate):.1f}" for size, rate in curve)
        colour = COLOURS[name]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(left + 8, MARGIN + 12 + 14 * line, name, f'fill="{colour}"'))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
