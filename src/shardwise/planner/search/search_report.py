"""The report of `shardwise plan`: the ranking, one layout explained, and what did not make it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.planner.search.expert_remarks import expert_remarks
from shardwise.planner.search.explain import (
    BYTES_SAID,
    GIB,
    SAID,
    TRAFFIC,
    Budget,
    layout_of,
    may_not_fit,
    memory_policy,
    refusals,
    times_of,
    why_not_fit,
    why_slower,
)
from shardwise.planner.search.probe_remarks import probe_remark
from shardwise.planner.search.search import Candidate, SearchResult, distinct

BAR = 24  # characters of the longest bar


def ranking_table(result: SearchResult, most: int, budget: Budget) -> Table:
    """Return the best layouts, and why each loses to the first."""
    facts = result.question.facts
    title = f"{facts.family}, {facts.parameters / 1e9:.3g}B parameters, on {_cluster(result)}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("#", justify="right")
    table.add_column("layout, microbatches, checkpointing", min_width=24)
    columns = ["step", "MFU", "tokens/s", "GiB", *(["days"] if budget.tokens else [])]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for number, candidate in enumerate(distinct(result.ranked, most), 1):
        against = "" if number == 1 else f"\n{why_slower(candidate, result.ranked[0])}"
        table.add_row(str(number), _layout_cell(candidate, against), *_numbers(candidate, budget))
    return table


def _cluster(result: SearchResult) -> str:
    cluster = result.question.cluster
    return f"{cluster.nodes} × {cluster.per_node} {cluster.accelerator.name} ({cluster.name})"


def _layout_cell(candidate: Candidate, against: str) -> Text:
    plan = candidate.plan
    batches = f"\n{plan.microbatch} × {plan.accumulation}, {memory_policy(candidate)}"
    return Text.assemble((layout_of(candidate), "bold"), batches, (against, "dim"))


def _numbers(candidate: Candidate, budget: Budget) -> list[str | Text]:
    prediction, days = candidate.prediction, budget.days(candidate)
    low, high = prediction.interval
    least, most = (size / GIB for size in candidate.memory_interval)
    unsure = "" if candidate.fits_surely else "yellow"
    numbers: list[str | Text] = [
        f"{prediction.step_seconds:.3g} s\n{low:.3g}–{high:.3g}",
        f"{prediction.mfu:.1%}",
        f"{candidate.tokens_per_second:,.0f}",
        Text.assemble(f"{candidate.memory_bytes / GIB:.1f}\n", (f"{least:.1f}–{most:.1f}", unsure)),
    ]
    return numbers if days is None else [*numbers, f"{days:,.1f}"]


def layout_explanation(candidate: Candidate, result: SearchResult, budget: Budget) -> Group:
    """Return where a layout's time and bytes go, its rates in each convention, days and cost; and why it loses."""
    title = Text(f"{layout_of(candidate)}, {memory_policy(candidate)}", style="bold")
    parts: list[RenderableType] = [title, _times(candidate), _bytes(candidate)]
    if unsure := may_not_fit(candidate, result):
        parts.append(Text(unsure, style="yellow"))
    if not candidate.fits:
        parts.append(Text(f"does not fit: {why_not_fit(candidate)}", style="red"))
    if result.best is not None and candidate is not result.best:
        parts.append(Text(f"against the best: {why_slower(candidate, result.best)}"))
    return Group(*parts, *(Text(line) for line in _rates(candidate, budget)))


def _times(candidate: Candidate) -> Table:
    times, step = times_of(candidate), candidate.prediction.step_seconds
    low, high = candidate.prediction.interval
    table = Table(box=None, title=f"time of a step: {step:.4g} s, 80 % between {low:.4g} and {high:.4g}")
    table.title_justify = "left"
    for cause, seconds in times.items():
        if seconds < step / 2000:
            continue
        table.add_row(SAID.get(cause, cause), f"{seconds:.4g} s", f"{seconds / step:6.1%}", _bar(seconds, step))
    exposed = sum(times.get(axis, 0.0) for axis in TRAFFIC)
    if exposed:
        table.caption, table.caption_justify = f"exposed traffic together {exposed / step:.1%}", "left"
    return table


def _bytes(candidate: Candidate) -> Table:
    total, room = candidate.memory_bytes, candidate.configuration.cluster.accelerator.memory_bytes
    low, high = candidate.memory_interval
    table = Table(box=None, title_justify="left", caption_justify="left")
    table.title = (
        f"memory of the fullest rank: {total / GIB:.2f} of {room / GIB:.1f} GiB, "
        f"80 % between {low / GIB:.2f} and {high / GIB:.2f}"
    )
    for cause, size in candidate.memory.items():
        if size >= total / 1000:
            name = BYTES_SAID.get(cause, cause)
            table.add_row(name, f"{size / GIB:.2f} GiB", f"{size / total:6.1%}", _bar(size, total))
    stages, host = candidate.stage_memory, candidate.prediction.host_bytes
    captions = [f"of the host's memory: {host / GIB:.2f} GiB a rank"] if host else []
    if len(stages) > 1:
        shown = [f"{size / GIB:.1f}" for size in (stages if len(stages) <= 16 else (*stages[:8], *stages[-4:]))]
        captions.append(f"by pipeline rank: {', '.join(shown)} GiB")
    table.caption = "\n".join(captions) or None
    return table


def _rates(candidate: Candidate, budget: Budget) -> Iterator[str]:
    prediction = candidate.prediction
    tflops = ", ".join(f"{name} {value:.1f}" for name, value in prediction.tflops.items())
    yield f"TFLOP/s of one accelerator by convention: {tflops}"
    yield f"MFU {prediction.mfu:.1%} of {prediction.peak_tflops:g} TFLOP/s (palm)"
    yield f"tokens a second: {candidate.tokens_per_second:,.0f}; of one accelerator {prediction.tokens_per_second:,.1f}"
    days, cost = budget.days(candidate), budget.cost(candidate)
    if days is not None:
        hours = days * 24 * prediction.ranks
        low, high = (days * bound / prediction.step_seconds for bound in prediction.interval)
        dollars = "" if cost is None else f", ${cost:,.0f}"
        yield (
            f"{budget.tokens:,.0f} tokens: {days:,.1f} days (80 % between {low:,.1f} and {high:,.1f}), "
            f"{hours:,.0f} accelerator hours{dollars}"
        )


def _bar(value: float, of: float) -> str:
    return "█" * round(BAR * value / of)


def search_remarks(result: SearchResult, most: int = 4) -> Iterator[str]:
    """Yield how many combinations were looked at, what the legality table refused, and what did not fit."""
    legal = len(result.ranked) + len(result.misfits)
    refused = sum(result.illegal.values())
    yield (
        f"{result.looked_at:,} combinations in {result.seconds:.1f} s: {refused:,} are not legal, "
        f"{len(result.misfits):,} of {legal:,} legal ones do not fit"
    )
    if result.left_out:
        yield f"{result.left_out:,} further combinations were not looked at; set some keys of the job, or raise --limit"
    for count, rule, sentence in refusals(result, most):
        yield f"not legal, {count:,} × {rule}: {sentence}"
    fastest = (
        sorted(result.unfit, key=lambda candidate: -candidate.tokens_per_second) if result.ranked else result.unfit
    )
    for candidate in distinct(fastest, most):
        yield f"does not fit: {layout_of(candidate)}, {memory_policy(candidate)}: {why_not_fit(candidate)}"
    yield from expert_remarks(result)
    yield from probe_remark(result)
    yield from result.notes
