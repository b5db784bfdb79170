"""Scaling of Llama 2 as SMP 2 was announced with, by the planner's closed form and by a simulation of events.

    python -m benchmarks.scaling docs/explanations/planner.md                      # writes the page's table
    python -m benchmarks.scaling --seed 2                                          # prints it, other hosts drawn
    python -m benchmarks.scaling --rows tests/data/perf-tables/fms_fsdp.csv ...    # both against measured steps

The announcement ("Distributed training and efficient scaling with the Amazon SageMaker Model Parallel and Data Parallel
Libraries", AWS, 2024) says near-linear scaling on p4d up to 128 nodes, in bf16, with FSDP, hybrid sharding and SMDDP's
all-gather. Sequences of 4096, checkpointed blocks, 4 of them a rank for 7B and 2 for 70B, and 70B's 256 sharding ranks
on p4d are SageMaker's reference configurations ("SMP v2 best practices"). The other degrees are the fewest that leave
room. The batch of a rank stays (weak scaling). SMP 2 runs torch's FSDP, so that the constants are those of an FSDP
that was measured with Llama 2 on both accelerators. Its own kernels are not among the tables.

Efficiency is the speed of an accelerator over that on the fewest nodes. The 80 % interval is that of the step, with the
step on the fewest nodes taken as measured.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.scaling_events import Machines, StepWork, simulated_seconds
from shardwise.planner.constants.inventory import cluster, presets, shipped, stack_of
from shardwise.planner.formulas.axis_traffic import elements_of_rank
from shardwise.planner.formulas.communication import DIRECT
from shardwise.planner.formulas.compute import BYTES, head_work, optimizer_seconds
from shardwise.planner.formulas.layer import block_time
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.published.accuracy import part
from shardwise.planner.published.mapping import configuration
from shardwise.planner.published.measurement import measured, predicted
from shardwise.planner.published.row import Row, Unmapped
from shardwise.planner.published.tables import read_table

STACK = "fms-fsdp FSDP1"
SEQUENCE = 4096
SEED = 1
NODES = (16, 32, 64, 128)
HOP = 4e-5  # seconds from rank to rank on EFA that leave the simulation's rings nearest to p5's measured all-gathers


P4D, P5 = "p4d.24xlarge", "p5.48xlarge"
REFERENCE = {("llama2-70b", P4D): 256}  # ranks over which its state fits


class Series(NamedTuple):
    """A model on nodes of one kind; `shard` ranks share its state (0: all of them)."""

    model: str
    instance: str
    shard: int
    collectives: str
    batch: int

    def configuration(self, nodes: int) -> TrainingConfiguration:
        """Return what runs on so many nodes."""
        machines = cluster(f"{self.instance}:{nodes}")
        shard = self.shard or machines.size
        return TrainingConfiguration(
            model=presets()[self.model],
            cluster=machines,
            stack=stack_of(STACK),
            sequence=SEQUENCE,
            microbatch=self.batch,
            shard=shard,
            replica=machines.size // shard,
            reduction="bf16",
            checkpointing="full",
            collectives=self.collectives,
        )

    def nodes(self) -> list[int]:
        """Return the numbers of nodes on which whole groups share the state."""
        least = (self.shard or REFERENCE.get((self.model, self.instance), 8)) // 8
        return [nodes for nodes in NODES if nodes >= least]


SERIES = (
    Series("llama2-7b", P4D, 8, "nccl", 4),
    Series("llama2-13b", P4D, 32, "smddp", 4),
    Series("llama2-70b", P4D, 0, "nccl", 2),
    Series("llama2-70b", P4D, 0, "smddp", 2),
    Series("llama2-70b", P4D, 256, "nccl", 2),
    Series("llama2-70b", P4D, 256, "smddp", 2),
    Series("llama2-7b", P5, 8, "nccl", 4),
    Series("llama2-70b", P5, 0, "nccl", 2),
    Series("llama2-70b", P5, 64, "nccl", 2),
)


class Point(NamedTuple):
    """One number of nodes: seconds of a step by the closed form, with their interval, and by the simulation."""

    nodes: int
    closed: float
    interval: tuple[float, float]
    simulated: float

    @property
    def departure(self) -> float:
        """How much longer the simulated step is."""
        return self.simulated / self.closed - 1


def point(given: TrainingConfiguration, seed: int = SEED, simulate: bool = True) -> Point:
    """Return both steps of a configuration."""
    prediction = predict(given)
    simulated = simulated_seconds(*as_events(given), seed) if simulate else math.nan
    return Point(given.cluster.nodes, prediction.step_seconds, prediction.interval, simulated)


def as_events(given: TrainingConfiguration) -> tuple[StepWork, Machines]:
    """Return what the simulation knows of a configuration: seconds of kernels alone, bytes, and rates of links."""
    block, ends, model = block_time(given), [work.device for work in head_work(given)], given.model
    parameter, reduced = BYTES[given.precision], BYTES[given.reduction]
    both = model.embedding_parameters * (1 if model.tied else 2)
    work = StepWork(
        blocks=model.layers,
        forward=block.forward.device,
        backward=block.backward.device + block.again.device,
        head=sum(ends),
        optimizer=optimizer_seconds(elements_of_rank(given, model.layers).sharded(given), given),
        block_gathered=model.layer_parameters * parameter,
        block_reduced=model.layer_parameters * reduced,
        ends_gathered=both * parameter,
        ends_reduced=both * reduced,
    )
    return work, _machines(given)


def _machines(given: TrainingConfiguration) -> Machines:
    nodes, measured_rate = given.cluster, given.cluster.fabric.bandwidth * given.stack.network
    out = nodes.inter * 1e9
    apart = nodes.per_node if given.collectives == "flat" else 1  # each rank gathers for itself
    return Machines(
        hosts=nodes.nodes,
        per_host=nodes.per_node,
        units=nodes.accelerator.units,
        out=out * measured_rate / apart,
        direct_out=out * DIRECT,
        link=nodes.intra * 1e9 * nodes.link.bandwidth,
        hop=HOP if nodes.fabric.name == "efa" else nodes.fabric.hop_seconds,
        link_hop=nodes.link.hop_seconds,
        channels=max(nodes.efa, nodes.per_node),
        shard=given.shard,
        direct=given.collectives == "smddp",
    )


HEAD = ("model", "nodes", "over", "by", *map(str, NODES), "80 %", "events", "departure")


def scaling(seed: int = SEED, simulate: bool = True) -> list[list[str]]:
    """Return the cells of the table by series: efficiencies in per cent, by the closed form for each number of nodes,
    and on the most nodes its interval and the simulation's; the largest departure of a step."""
    rows = []
    for series in SERIES:
        points = [point(series.configuration(nodes), seed, simulate) for nodes in series.nodes()]
        rows.append([*_named(series), *_closed(points), *_simulated(points)])
        print(*rows[-1], file=sys.stderr, flush=True)
    return rows


def _named(series: Series) -> list[str]:
    ranks = str(series.shard or "all")
    kind = series.instance.split(".")[0]
    return [series.model.replace("llama2-", "").upper(), kind, ranks, series.collectives.upper()]


def _closed(points: Sequence[Point]) -> list[str]:
    first, last = points[0], points[-1]
    by_nodes = {each.nodes: f"{100 * first.closed / each.closed:.1f}" for each in points}
    most, least = (100 * first.closed / seconds for seconds in last.interval)
    return [*(by_nodes.get(n, "") for n in NODES), f"{least:.0f}–{most:.0f}"]


def _simulated(points: Sequence[Point]) -> list[str]:
    most = max((each.departure for each in points), key=abs)
    return [f"{100 * points[0].simulated / points[-1].simulated:.1f}", f"{100 * most:+.1f}"]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a table with HEAD above it."""
    rule = [*["---"] * 4, *["---:"] * (len(HEAD) - 4)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (HEAD, rule, *rows))


def against_row(row: Row, seed: int = SEED) -> tuple[float, float] | None:
    """Return how much longer than measured the closed form's and the simulation's step of a row are; None where the
    row is none that the simulation can run: sharded parameters on several nodes, one microbatch."""
    try:
        given = shipped().applied(configuration(row))
    except Unmapped:
        return None
    seen = measured(row)
    alone = given.tensor * given.context * given.pipeline * given.expert == 1 and given.accumulation == 1
    if seen is None or given.zero != 3 or given.cluster.nodes == 1 or not alone:
        return None
    prediction = predict(given)
    ratio = predicted(row, prediction) / seen.value
    closed = (ratio if seen.unit == "step_s" else 1 / ratio) - 1
    simulated = simulated_seconds(*as_events(given), seed)
    return closed, (1 + closed) * simulated / prediction.step_seconds - 1


def print_rows(tables: Sequence[Path], seed: int) -> None:
    """Print how far both are from the rows of tables, in per cent, and their root mean squares."""
    print("table, row: closed form, events")
    both = []
    for table in tables:
        for row in read_table(table):
            found = against_row(row, seed)
            if found:
                both.append(found)
                closed, simulated = (f"{100 * each:+.1f}" for each in found)
                print(f"{table.stem}, {row.text['row']}: {closed}, {simulated}", flush=True)
    squares = [sum(error**2 for error in errors) / len(both) for errors in zip(*both, strict=True)]
    print(f"root mean square of {len(both)}: {', '.join(f'{100 * math.sqrt(mean):.2f}' for mean in squares)}")


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="?", type=Path, help="the page whose table is written anew")
    parser.add_argument("--rows", nargs="+", type=Path, default=[], metavar="TABLE", help="measured rows to compare")
    parser.add_argument("--seed", type=int, default=SEED, help="of the hosts' slowness")
    asked = parser.parse_args(words)
    print(f"seed {asked.seed}")
    if asked.rows:
        print_rows(asked.rows, asked.seed)
        return 0
    table = markdown(scaling(asked.seed))
    print(table)
    if asked.page:
        text = asked.page.read_text()
        asked.page.write_text(text.replace(part(text, "scaling"), table))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
