"""The charts of the report as plotly figures, from the records of metrics.jsonl.

Colours are names (`meta.colour`) that the page resolves for a light or a dark screen. Long runs are thinned to what a
screen can show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import plotly.graph_objects as go

from shardwise.observe.metrics import Record

MAX_POINTS = 1500
SMOOTH_FROM = 100  # shorter runs are shown as they are
MAX_RANKS = 8
COLOURS = [f"c{number}" for number in range(1, 9)]
Number = float | None


@dataclass(frozen=True)
class Chart:
    """One chart of the report: where it goes, what it says, and its figure."""

    name: str
    title: str
    text: str
    figure: go.Figure
    wide: bool = False


def make_charts(records: Sequence[Record], unigram_entropy: Number, unit: str = "nats per token") -> list[Chart]:
    """The charts that the records have numbers for; `unit` is that of the loss."""
    steps = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "validation_loss" in record]
    charts = [
        loss_chart(steps, evaluations, unigram_entropy, unit),
        rewards_chart(steps),
        accuracy_chart(steps, evaluations),
        throughput_chart(steps),
        memory_chart(steps),
        times_chart(steps),
        gradient_chart(steps),
        rate_chart(steps),
        expert_chart(steps),
    ]
    return [chart for chart in charts if chart is not None]


def loss_chart(
    steps: Sequence[Record], evaluations: Sequence[Record], unigram_entropy: Number, unit: str
) -> Chart | None:
    """Training loss, smoothed where it is long, validation points, and the entropy of single tokens to beat."""
    x, loss = _series(steps, "loss")
    x_validation, validation = _series(evaluations, "validation_loss")
    if not x and not x_validation:
        return None
    figure = _figure(unit)
    if x:
        _add_training(figure, x, loss)
    if x_validation:
        figure.add_scatter(
            x=x_validation, y=validation, name="validation", mode="lines+markers", marker={"size": 7},
            line={"width": 1.2}, meta={"colour": "c2"},
        )  # fmt: skip
    _add_sets(figure, evaluations)
    text = "Mean of the counted labels."
    if unigram_entropy is not None:
        ends = sorted([*x, *x_validation])
        figure.add_scatter(
            x=[ends[0], ends[-1]], y=[unigram_entropy] * 2, name="unigram entropy", mode="lines", meta={"colour": "c8"},
            line={"dash": "dash", "width": 1.2},
        )  # fmt: skip
        text += " The dashed line is what counting single tokens reaches."
    return Chart("loss", "Loss", text, figure, wide=True)


def _add_training(figure: go.Figure, x: list[int], loss: list[Number]) -> None:
    """The training loss; that of a long run pale, under its smoothed line."""
    long = len(x) >= SMOOTH_FROM
    figure.add_scatter(
        x=x, y=loss, name="training", mode="lines", opacity=0.35 if long else 1.0, meta={"colour": "c1"},
        line={"width": 1.2 if long else 1.8}, showlegend=not long, hoverinfo="skip" if long else None,
    )  # fmt: skip
    if long:
        smooth = _smoothed(loss)
        figure.add_scatter(x=x, y=smooth, name="training, smoothed", mode="lines", meta={"colour": "c1"})


def _add_sets(figure: go.Figure, evaluations: Sequence[Record]) -> None:
    """The losses of the sets that are evaluated beside the validation split."""
    keys = dict.fromkeys(key for record in evaluations for key in record if key.startswith("validation_loss/"))
    for number, key in enumerate(keys):
        x, loss = _series(evaluations, key)
        figure.add_scatter(
            x=x, y=loss, name=key.partition("/")[2], mode="lines+markers", marker={"size": 5}, line={"width": 1.2},
            meta={"colour": f"c{3 + number % 5}"},
        )  # fmt: skip


def rewards_chart(steps: Sequence[Record]) -> Chart | None:
    """Mean rewards of chosen and rejected completions, and the margin between them; of preference training alone."""
    if not _series(steps, "rewards_chosen")[0]:
        return None
    figure = _figure("reward")
    for colour, name in zip(("c3", "c2", "c1"), ("chosen", "rejected", "margin")):
        x, y = _series(steps, f"rewards_{name}")
        figure.add_scatter(x=x, y=y, name=name, mode="lines", meta={"colour": colour}, line={"width": 1.5})
    return Chart("rewards", "Rewards", "Beta times the log-ratio to the reference, mean of the step's pairs.", figure)


def accuracy_chart(steps: Sequence[Record], evaluations: Sequence[Record]) -> Chart | None:
    """Share of the pairs whose chosen completion has the higher reward; of preference training alone."""
    x, accuracy = _series(steps, "rewards_accuracy")
    if not x:
        return None
    figure = _figure("share of pairs")
    figure.add_scatter(x=x, y=accuracy, name="training", mode="lines", meta={"colour": "c1"}, line={"width": 1.2})
    x, accuracy = _series(evaluations, "validation_rewards_accuracy")
    figure.add_scatter(x=x, y=accuracy, name="validation", mode="lines+markers", meta={"colour": "c2"})
    figure.update_yaxes(range=[0, 1.05])
    return Chart("accuracy", "Accuracy", "Pairs whose chosen completion has the higher reward.", figure)


def throughput_chart(steps: Sequence[Record]) -> Chart | None:
    """Tokens a second on the left, the same line as TFLOP/s on the right: both scales start at zero."""
    x, rate = _series(steps, "tokens_per_second")
    if not x:
        return None
    figure = _line("tokens a second", "tokens/s", x, rate, "c3")
    figure.update_yaxes(range=_from_zero(rate))
    x_flops, tflops = _series(steps, "tflops_per_rank")
    if x_flops:
        # Drawn by the line above already; this one only gives its scale and its number under the pointer.
        figure.add_scatter(
            x=x_flops, y=tflops, name="TFLOP/s per rank", opacity=0, mode="lines", yaxis="y2", meta={"colour": "c3"}
        )
        _right_axis(figure, "TFLOP/s per rank", _from_zero(tflops))
    return Chart("throughput", "Throughput", "Model FLOPs, 6P + 12Lsh a token; recomputation is not counted.", figure)


def memory_chart(steps: Sequence[Record]) -> Chart | None:
    """Peak memory of each rank, or lowest, median and highest of many."""
    known = [record for record in steps if record.get("peak_memory_bytes")]
    if not known:
        return None
    ranks = max(len(record["peak_memory_bytes"]) for record in known)
    unit, name = (2**30, "GiB") if max(max(r["peak_memory_bytes"]) for r in known) >= 4 * 2**30 else (2**20, "MiB")
    figure = _figure(name)
    for index, (label, pick) in enumerate(_rank_lines(ranks)):
        peaks = [(r["step"], pick(r["peak_memory_bytes"])) for r in known]
        rows = [{"step": step, "memory": None if peak is None else peak / unit} for step, peak in peaks]
        x, y = _series(rows, "memory")
        figure.add_scatter(x=x, y=y, name=label, mode="lines", meta={"colour": COLOURS[index]}, line={"width": 1.6})
    figure.update_yaxes(rangemode="tozero")
    return Chart("memory", "Memory per rank", "Highest use of each rank.", figure)


TIMES = {"compute_seconds": "computation", "communication_seconds": "collectives", "data_seconds": "wait for data"}


def times_chart(steps: Sequence[Record]) -> Chart | None:
    """The parts of a step on the rank that has most of each: what one rank has more of, the others wait for."""
    known = {key: label for key, label in TIMES.items() if any(record.get(key) for record in steps)}
    if not known:
        return None
    figure = _figure("seconds")
    for index, (key, label) in enumerate(known.items()):
        for pick, style in ((max, "solid"), (median, "dot")):
            rows = [{"step": r["step"], "seconds": pick(r[key])} for r in steps if r.get(key)]
            x, y = _series(rows, "seconds")
            line = {"width": 1.5, "dash": style}
            name = f"{label}, {'most' if pick is max else 'median'}"
            figure.add_scatter(x=x, y=y, name=name, mode="lines", meta={"colour": COLOURS[index]}, line=line)
    figure.update_yaxes(rangemode="tozero")
    return Chart("times", "Parts of a step", "The rank with most of each, and the median rank.", figure)


def gradient_chart(steps: Sequence[Record]) -> Chart | None:
    """Global gradient norm before clipping."""
    x, norm = _series(steps, "grad_norm")
    if not x:
        return None
    figure = _line("L2 norm", "gradient norm", x, norm, "c4")
    return Chart("gradient", "Gradient norm", "Over all parameters, before clipping.", figure)


def rate_chart(steps: Sequence[Record]) -> Chart | None:
    """Learning rate."""
    x, rate = _series(steps, "learning_rate")
    if not x:
        return None
    figure = _line("", "learning rate", x, rate, "c6")
    figure.update_yaxes(exponentformat="power")
    return Chart("rate", "Learning rate", "Warm-up and schedule.", figure)


def expert_chart(steps: Sequence[Record]) -> Chart | None:
    """The most used expert's rows over the mean, in the layer where that is highest."""
    x, load = _series(steps, "expert_load")
    if not x:
        return None
    figure = _line("most used over mean", "expert load", x, load, "c5")
    _, idle = _series(steps, "idle_experts")
    unused = f", and {idle[-1]:.0%} of the experts get no row" if idle else ""
    return Chart("experts", "Load of experts", f"1 is even; at the end {load[-1]:.2f}{unused}.", figure)


def _line(y_title: str, name: str, x: list[int], y: list[Number], colour: str) -> go.Figure:
    figure = _figure(y_title)
    figure.add_scatter(x=x, y=y, name=name, mode="lines", meta={"colour": colour}, line={"width": 1.5})
    figure.update_layout(showlegend=False)
    figure.update_yaxes(rangemode="tozero")
    return figure


def _from_zero(values: Sequence[Number]) -> list[float]:
    return [0.0, 1.08 * max(value for value in values if value is not None)]


def _figure(y_title: str) -> go.Figure:
    return go.Figure(
        layout={
            "template": "none",
            "margin": {"l": 56, "r": 16, "t": 12, "b": 40},
            "hovermode": "x unified",
            "showlegend": True,
            "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.0, "yanchor": "bottom"},
            "xaxis": {"title": {"text": "step"}, "showgrid": False, "showline": True, "ticks": "outside", "ticklen": 4},
            "yaxis": {"title": {"text": y_title}, "zeroline": False, "automargin": True},
        }
    )


def _right_axis(figure: go.Figure, title: str, scale: list[float]) -> None:
    axis = {"title": {"text": title}, "overlaying": "y", "side": "right", "tickmode": "auto", "nticks": 5}
    figure.update_layout(yaxis2={**axis, "range": scale, "showgrid": False, "zeroline": False, "automargin": True})


def _rank_lines(ranks: int) -> list[tuple[str, Callable[[list[int]], float | None]]]:
    if ranks > MAX_RANKS:
        return [("highest", max), ("median", median), ("lowest", min)]
    return [(f"rank {rank}", partial(_of_rank, rank)) for rank in range(ranks)]


def _of_rank(rank: int, peaks: list[int]) -> int | None:
    """A run that was resumed on fewer ranks has fewer peaks from there on."""
    return peaks[rank] if rank < len(peaks) else None


def _series(records: Sequence[Record], key: str) -> tuple[list[int], list[Number]]:
    """Steps and values of a key, thinned to MAX_POINTS; the last stays. Empty when no record has a number."""
    rows = [(record["step"], record.get(key)) for record in records if "step" in record]
    if not any(value is not None for _, value in rows):
        return [], []
    stride = math.ceil(len(rows) / MAX_POINTS)
    kept = rows[::stride] if not rows or (len(rows) - 1) % stride == 0 else [*rows[::stride], rows[-1]]
    return [step for step, _ in kept], [value for _, value in kept]


def _smoothed(values: Sequence[Number]) -> list[Number]:
    """Mean over a window of about 3 % of the run centred on each step, so that it does not lag; gaps stay gaps."""
    half = max(3, len(values) // 60)
    out: list[Number] = []
    for index, value in enumerate(values):
        reach = min(half, index, len(values) - 1 - index)
        near = [v for v in values[index - reach : index + reach + 1] if v is not None]
        out.append(sum(near) / len(near) if value is not None else None)
    return out


def figure_json(figure: go.Figure) -> dict[str, Any]:
    """Data and layout as plain JSON values."""
    return figure.to_plotly_json() | {"layout": figure.layout.to_plotly_json()}
