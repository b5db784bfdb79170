"""`shardwise inspect RUN`: where each rank of a live run is, as its launcher says of one that hangs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from shardwise.errors import OutputError
from shardwise.words import nearest_file, output_console


def inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the output directory of the run")
    parser.add_argument("--stacks", action="store_true", help="print every rank's Python stack too")


def run_inspect(options: argparse.Namespace, keys: dict[str, Any]) -> int:
    from shardwise.collectives.topology import host_name
    from shardwise.launch.watch.live import live_ranks
    from shardwise.launch.watch.position import gather_positions
    from shardwise.launch.watch.sentence import describe_positions
    from shardwise.launch.watch.watcher import stacks_text

    output = Path(options.run).expanduser()
    if not output.is_dir():
        raise OutputError(f"{options.run!r} is no directory; give the output directory of a run.{nearest_file(output)}")
    ranks = live_ranks(output, host_name())
    if not ranks:
        print("the ranks are starting")
        return 0
    positions = gather_positions(ranks, "")
    console = output_console()
    console.print(position_table(positions))
    print(describe_positions(positions))
    if options.stacks:
        print(f"\n{stacks_text(positions)}", end="")
    return 0


def position_table(positions: Sequence[Any]) -> Table:
    """Return a row for each rank."""
    table = Table("rank", "step", "phase", "waits in", "at", "for", box=None, pad_edge=False)
    for position in positions:
        phase = " ".join(filter(None, (position.phase, position.state)))
        call = f" (call {position.sequence})" if position.sequence else ""
        waits, at = f"{position.collective or '–'}{call}", position.frame or "–"
        row = (position.rank, position.step + 1, phase, waits, at, f"{position.seconds:.1f} s")
        table.add_row(*(Text(str(cell)) for cell in row))
    return table
