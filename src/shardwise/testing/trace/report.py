"""A traced job as tables: memory of each kind of rank with its owners, and the collectives of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.testing.trace.job import JobTrace, where
from shardwise.testing.trace.program import Call
from shardwise.testing.trace.rank import RankTrace, traced_microbatches
from shardwise.testing.trace.step_time import StepTime
from shardwise.testing.trace.storages import OWNERS

MIB = 2**20


def describe(trace: JobTrace, time: StepTime | None = None) -> Group:
    """Return the tables of a traced job, and notes."""
    parts: list[RenderableType] = [_memory(trace), _collectives(trace.fullest)]
    notes = [*_notes(trace)]
    if time is not None:
        parts.append(_time(trace, time))
        notes += _host_notes(trace, time)
    return Group(*parts, *(Text(f"note: {note}", style="yellow") for note in notes))


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold")


def _memory(trace: JobTrace) -> Table:
    count, size = len({rank.rank for rank in trace.ranks if rank.traced_as is None}), trace.plan.world.size
    table = _table(f"{count} of {size} ranks traced: the peak of a step, its owners and the closed form, MiB")
    table.add_column("rank")
    owners = [owner for owner in OWNERS if any(rank.owners[owner] for rank in trace.ranks)]
    for name in ("peak", *owners, "closed form", "differs"):
        table.add_column(name, justify="right")
    for rank in trace.ranks:
        sizes = [rank.peak, *(rank.owners[owner] for owner in owners), rank.closed_form.total]
        table.add_row(_name(rank), *map(_mib, sizes), f"{rank.error:+.1%}")
    return table


def _name(rank: RankTrace) -> str:
    known = "" if rank.traced_as is None else f" (as {rank.traced_as})"
    return f"{rank.rank}: {where(rank.coordinates)}{known}"


def _mib(size: float) -> str:
    return f"{size / MIB:,.1f}"


def _collectives(rank: RankTrace) -> Table:
    table = _table(f"Collectives and messages of rank {rank.rank}, the fullest, in the traced step")
    for name in ("group", "operation"):
        table.add_column(name)
    for name in ("calls", "MiB"):
        table.add_column(name, justify="right")
    table.add_column("most of them in")
    sizes: Counter[tuple[str, str]] = Counter()
    lines: dict[tuple[str, str], Counter[str]] = {}
    for call in (entry for entry in rank.program if isinstance(entry, Call)):
        sizes[call.group, call.operation] += call.bytes
        lines.setdefault((call.group, call.operation), Counter())[call.line] += 1
    for key, size in sizes.items():
        line, _ = lines[key].most_common(1)[0]
        table.add_row(*key, f"{lines[key].total():,}", f"{size / MIB:,.1f}", line)
    return table


def _time(trace: JobTrace, time: StepTime) -> Table:
    known = "" if time.closed_form is None else f", {time.closed_form:.3g} s by the closed form"
    table = _table(f"A step takes {time.seconds:.3g} s{known}; of the traced {time.traced:.3g} s")
    table.add_column("rank")
    for name in ("computing, s", "waiting for collectives, s", "for other stages, s", "host launching, s", "launches"):
        table.add_column(name, justify="right")
    named = {rank.rank: where(rank.coordinates) for rank in trace.ranks}
    for rank, clock in time.clocks.items():
        seconds = (clock.busy, clock.collectives, clock.messages, clock.launching)
        launches = f"{time.hosts[rank].launches:,}"
        table.add_row(f"{rank}: {named[rank]}", *(f"{value:.3g}" for value in seconds), launches)
    return table


def _host_notes(trace: JobTrace, time: StepTime) -> Iterator[str]:
    host = time.hosts[time.slowest]
    reads = ", ".join(f"{line} ({count})" for line, count in host.reads.most_common())
    number = host.reads.total()
    often = {0: "never", 1: "once"}.get(number, f"{number} times")
    where_read = f": {reads}" if reads else ""
    yield f"The host of rank {time.slowest} waits for a value {often} in the traced step{where_read}."
    least, own = host.smallest_microbatch, trace.plan.microbatch
    if least > own:
        yield f"The host is the limit: it launches for {host.share:.1f} times as long as the accelerator works."
    yield f"From training.microbatch_size {least} on the host is not the limit; the job has {own}."


def _notes(trace: JobTrace) -> Iterator[str]:
    plan = trace.plan
    if trace.met is not None:
        yield (
            f"{trace.met:,} calls of all {plan.world.size:,} ranks meet: one order in every group, a counterpart for "
            "every message, no circle."
        )
    for rank in trace.ranks:
        for fault in rank.faults:
            yield f"Rank {rank.rank}, in {fault}."
    others = sum(rank.traced_as is not None for rank in trace.ranks)
    if others:
        yield (
            f"{others} of {len(trace.ranks)} kinds of ranks were traced in the same job of {trace.short_blocks} "
            "blocks alone: call by call and byte by byte, they do there what the first of their stage does."
        )
    count = traced_microbatches(plan)
    if plan.accumulation > count:
        more = "hold more only under `pipeline: simple`" if plan.stages else "hold no more"
        yield f"{count} of {plan.accumulation} microbatches were traced and counted; further ones {more}."
    if plan.collectives != "flat":
        yield "parallel.collective_algorithm: each collective was traced as one call, whatever levels carry it."
    if plan.job.model.cuda_graphs:
        yield "model.cuda_graphs: launches were counted one by one; graphs make most of them at once."
    if plan.job.model.compile:
        yield "model.compile: the blocks were traced uncompiled; compiled ones keep less and launch fewer kernels."
