"""The page of `shardwise plan --html`: one file without a network, in the frame of a run's report (report.html).

Memory and time of the best layouts as stacked bars, the schedule of the one that is explained, and what other numbers
of nodes would give.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from shardwise import __version__
from shardwise.job.axes import Axis
from shardwise.observe.charts import Chart, figure_json
from shardwise.observe.report import Figure, Row, chart_article, data_table, figure_list, scaled, script_json
from shardwise.planner.formulas.timeline import timeline
from shardwise.planner.search.explain import (
    BYTES_SAID,
    GIB,
    SAID,
    TRAFFIC,
    Budget,
    layout_of,
    memory_policy,
    times_of,
    why_not_fit,
    why_slower,
)
from shardwise.planner.search.search import Candidate, SearchResult, distinct, on_nodes
from shardwise.planner.search.search_report import search_remarks

SHOWN = 8  # layouts in the bars
SCALES = (0.25, 0.5, 1, 2, 4)  # of the cluster's nodes
DRAWN = 4  # microbatches a pipeline rank in the timeline, of which a real step may have more
SCHEDULE = (
    ("forward", "forward", "c1"), ("backward", "backward", "c2"), ("weights", "gradients of weights", "c3"),
    ("whole backward", "backward with gradients of weights", "c6"),
)  # fmt: skip
# Causes by colour of the page; traffic of the axes shares one, ever paler.
TIME_COLOURS = {
    "matmul": "c1", "attention": "c6", "memory_bound": "c3", "recomputation": "c4", "bubble": "c5", "launch": "c7",
    "optimizer": "c8", **dict.fromkeys(TRAFFIC, "c2"),
}  # fmt: skip
PALER = {axis: round(0.77**number, 2) for number, axis in enumerate(TRAFFIC)}
MEMORY_COLOURS = ("c1", "c6", "c3", "c2", "c5", "c7", "c4", "c8", "c1", "c8")


def write_page(path: Path, result: SearchResult, asked: Candidate, budget: Budget) -> None:
    """Write the page of a search; `asked` is the layout that is explained."""
    charts = list(_charts(result, asked))
    template = Template(files("shardwise.observe").joinpath("report.html").read_text(encoding="utf-8"))
    question = result.question
    cluster = question.cluster
    page = template.substitute(
        title=escape(f"{question.facts.family}, {question.facts.parameters / 1e9:.3g}B parameters"),
        subtitle=escape(
            f"planned on {cluster.nodes} × {cluster.per_node} {cluster.accelerator.name} · sequences of "
            f"{question.job.data.sequence_length:,} tokens · {question.job.training.sequences_per_step:,} a step"
        ),
        figures=figure_list(list(_figures(asked, budget))),
        charts="\n".join(map(chart_article, charts)),
        sections="\n".join(_sections(result)),
        footer=escape(f"Written by shardwise {__version__}. Nothing on this page is loaded from a network."),
        plotly=get_plotlyjs(),
        specs=script_json({f"plot-{chart.name}": figure_json(chart.figure) for chart in charts}),
    )
    path.write_text(page, encoding="utf-8")


def _figures(asked: Candidate, budget: Budget) -> Iterator[Figure]:
    prediction = asked.prediction
    low, high = prediction.interval
    yield Figure("Step", f"{prediction.step_seconds:.3g} s", f"80 % between {low:.3g} and {high:.3g}")
    yield Figure("Tokens a second", f"{asked.tokens_per_second:,.0f}", f"{prediction.tokens_per_second:,.0f} of each")
    rates = ", ".join(f"{name} {value:.0f}" for name, value in prediction.tflops.items() if name != "palm")
    yield Figure("TFLOP/s of each", f"{prediction.tflops['palm']:.3g}", f"palm; {rates}")
    yield Figure("MFU", f"{prediction.mfu:.1%}", f"of {prediction.peak_tflops:g} TFLOP/s")
    room = asked.configuration.cluster.accelerator.memory_bytes / GIB
    low, high = (size / GIB for size in asked.memory_interval)
    said = f"of {room:.1f}, fullest rank; 80 % between {low:.1f} and {high:.1f}"
    yield Figure("Peak memory", f"{asked.memory_bytes / GIB:.1f} GiB", said)
    days, cost = budget.days(asked), budget.cost(asked)
    if days is not None:
        yield Figure(
            "Days", f"{days:,.1f}", f"{scaled(budget.tokens or 0)} tokens" + (f", ${cost:,.0f}" if cost else "")
        )


# ------------------------------------------------------------------------------------------------------------- charts


def _charts(result: SearchResult, asked: Candidate) -> Iterator[Chart]:
    shown = distinct(result.ranked, SHOWN)
    names = [f"{number}" for number in range(1, len(shown) + 1)]
    if all(asked is not charted for charted in shown):
        shown, names = [*shown, asked], [*names, "asked"]
    yield _bars("time", "Where the time goes", "Seconds of a step, by cause.", "s", names, _times(shown))
    room = result.question.cluster.accelerator.memory_bytes / GIB
    memory = _bars("memory", "Where the bytes go", "GiB of the fullest rank at its peak.", "GiB", names, _bytes(shown))
    memory.figure.add_vline(x=room, line={"width": 1.5, "dash": "dash", "color": "#888"})
    yield memory
    if asked.plan.stages:
        yield _schedule(asked)
    yield from _scaling(result)


Bars = list[tuple[str, str, float, list[float]]]  # name, colour, opacity, value of each layout


def _times(shown: Sequence[Candidate]) -> Bars:
    times_of_shown = [times_of(candidate) for candidate in shown]
    largest = max(candidate.prediction.step_seconds for candidate in shown)
    causes = dict.fromkeys(cause for times in times_of_shown for cause in times)
    shown_causes = [cause for cause in causes if max(times.get(cause, 0.0) for times in times_of_shown) > largest / 500]
    return [
        (
            SAID.get(cause, cause),
            TIME_COLOURS.get(cause, "c8"),
            PALER.get(cause, 1.0),
            [t.get(cause, 0.0) for t in times_of_shown],
        )
        for cause in shown_causes
    ]


def _bytes(shown: Sequence[Candidate]) -> Bars:
    causes = dict.fromkeys(cause for candidate in shown for cause in candidate.memory)
    return [
        (
            BYTES_SAID.get(cause, cause),
            MEMORY_COLOURS[number % len(MEMORY_COLOURS)],
            1.0 if number < 8 else 0.5,
            [candidate.memory.get(cause, 0.0) / GIB for candidate in shown],
        )
        for number, cause in enumerate(causes)
    ]


def _bars(name: str, title: str, text: str, unit: str, names: list[str], bars: Bars) -> Chart:
    """Horizontal stacked bars, the first layout on top."""
    figure = _figure(unit)
    for label, colour, opacity, values in bars:
        figure.add_bar(
            x=values, y=names, name=label, orientation="h", opacity=opacity, meta={"colour": colour},
            hovertemplate="%{x:.3g} " + unit,
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_yaxes(autorange="reversed", type="category", title={"text": "layout"})
    return Chart(name, title, text, figure, wide=True)


def _schedule(asked: Candidate) -> Chart:
    plan, prediction = asked.plan, asked.prediction
    ranks = plan.degrees[Axis.PIPELINE]
    virtual = len(plan.stages) // ranks
    count = min(plan.accumulation, DRAWN * ranks, max(48, len(plan.stages)))
    busy = (prediction.step_seconds - prediction.seconds.get("bubble", 0.0)) / plan.accumulation / virtual
    again = prediction.seconds.get("recomputation", 0.0) / plan.accumulation / virtual
    forward = (busy - again) / 3  # backward is twice a forward, and computes again what was not kept
    blocks = timeline(ranks, virtual, count, forward, busy - forward, plan.job.parallel.pipeline)
    figure = _figure("s")
    for kind, label, colour in SCHEDULE:
        of = [block for block in blocks if block.kind == kind]
        if not of:
            continue
        figure.add_bar(
            base=[block.start for block in of], x=[block.seconds for block in of], y=[block.rank for block in of],
            name=label, orientation="h", meta={"colour": colour},
            customdata=[(block.stage, block.microbatch) for block in of],
            hovertemplate="stage %{customdata[0]}, microbatch %{customdata[1]}",
        )  # fmt: skip
    figure.update_layout(barmode="overlay", bargap=0.15, hovermode="closest")
    figure.update_yaxes(autorange="reversed", title={"text": "pipeline rank"}, dtick=max(1, ranks // 8))
    text = f"{count} of {plan.accumulation} microbatches" if count < plan.accumulation else f"{count} microbatches"
    return Chart("schedule", "Schedule", f"{text}; white is bubble.", figure, wide=True)


def _scaling(result: SearchResult) -> Iterator[Chart]:
    """Tokens a second over numbers of nodes, the same sequences a step, beside what the planned nodes would give."""
    nodes = sorted({max(1, round(result.question.cluster.nodes * scale)) for scale in SCALES})
    best = {count: on_nodes(result, count) for count in nodes}
    reached = {count: candidate.tokens_per_second for count, candidate in best.items() if candidate is not None}
    if len(reached) < 2:
        return
    figure = _figure("nodes")
    own_nodes = result.question.cluster.nodes
    assert result.best is not None
    ideal = [result.best.tokens_per_second * count / own_nodes for count in reached]
    figure.add_scatter(
        x=list(reached), y=ideal, name="in proportion", mode="lines", meta={"colour": "c8"}, line={"dash": "dash"}
    )
    figure.add_scatter(
        x=list(reached), y=list(reached.values()), name="predicted", mode="lines+markers", meta={"colour": "c1"},
        text=[layout_of(candidate) for candidate in best.values() if candidate is not None],
        hovertemplate="%{y:,.0f}<br>%{text}",
    )  # fmt: skip
    figure.update_yaxes(rangemode="tozero", title={"text": "tokens a second"})
    text = "The best of the layouts found, with the data axis and sharding to fit; the same sequences a step."
    yield Chart("scaling", "Other numbers of nodes", text, figure, wide=True)


def _figure(unit: str) -> go.Figure:
    return go.Figure(
        layout={
            "template": "none",
            "margin": {"l": 56, "r": 16, "t": 12, "b": 44},
            "showlegend": True,
            "legend": {
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 1.0,
                "yanchor": "bottom",
                "traceorder": "normal",
            },
            "xaxis": {"title": {"text": unit}, "showgrid": True, "zeroline": False},
            "yaxis": {"zeroline": False, "automargin": True, "title": {"text": ""}},
        }
    )


# ------------------------------------------------------------------------------------------------------------- tables


def _sections(result: SearchResult) -> Iterator[str]:
    assert result.best is not None
    head = ("#", "Layout", "Against the first")
    rows: list[Row] = []
    for number, candidate in enumerate(distinct(result.ranked, SHOWN), 1):
        batches = f"{candidate.plan.microbatch} × {candidate.plan.accumulation}"
        said = f"{layout_of(candidate)}; {batches}; checkpointing {memory_policy(candidate)}"
        why = "" if number == 1 else why_slower(candidate, result.best)
        rows.append((str(number), said, why))
    yield f"<section><h2>Layouts</h2>{data_table(head, rows)}</section>"
    fastest = sorted(result.unfit, key=lambda misfit: -misfit.tokens_per_second)
    misfits: list[Row] = [
        (layout_of(misfit), memory_policy(misfit), why_not_fit(misfit)) for misfit in distinct(fastest, SHOWN)
    ]
    if misfits:
        yield (
            "<details><summary>Fastest that do not fit</summary>"
            f"{data_table(('Layout', 'Checkpointing', 'Why'), misfits)}</details>"
        )
    notes = "".join(f"<li>{escape(note)}</li>" for note in search_remarks(result, 0))
    yield f'<ul class="notes">{notes}</ul>'
