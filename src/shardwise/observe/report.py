"""report.html: one file that shows a whole run, without a network.

Read from what the run wrote: metrics.jsonl, run.json (job, plan, facts, versions, result) and sample.txt. Anything
missing is left out, so a report can be written for a run that is still going or that failed. The page is
`report.html` beside this file, its charts are in `shardwise.observe.charts`; plotly's script is inlined once and the
page's content policy forbids every request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from string import Template
from typing import Any, NamedTuple

from plotly.offline import get_plotlyjs
from plotly.utils import PlotlyJSONEncoder

from shardwise.job.tasks import TASKS
from shardwise.observe.charts import Chart, figure_json, make_charts
from shardwise.observe.display import duration, evaluation_metrics
from shardwise.observe.metrics import Record, read_metrics


class Figure(NamedTuple):
    """One number of the header."""

    name: str
    value: str
    detail: str = ""


def write_report(output: Path) -> Path:
    """Write OUTPUT/report.html from the files of the run in OUTPUT and return its path."""
    run = _read_run(output / "run.json")
    records = read_metrics(output / "metrics.jsonl")
    is_cross_entropy = not _part(run, "job", "model").get("factory") and _part(run, "plan").get("objective") != "dpo"
    task = TASKS.get(str(_part(run, "job", "model").get("task")))
    unit = f"nats per {task.counted if task else 'token'}" if is_cross_entropy else "loss"
    charts = make_charts(records, _number(_part(run, "result").get("unigram_entropy")), unit)
    template = Template(files("shardwise.observe").joinpath("report.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=escape(_title(run)),
        subtitle=escape(_subtitle(run)),
        figures=figure_list(list(_figures(run, records))),
        charts="\n".join(map(chart_article, charts)) or '<p class="empty">No steps were recorded.</p>',
        sections="\n".join([*_prompts(records), *_sections(run, output / "sample.txt")]),
        footer=escape(_footer(run)),
        plotly=get_plotlyjs(),
        specs=script_json({f"plot-{chart.name}": figure_json(chart.figure) for chart in charts}),
    )
    path = output / "report.html"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def _read_run(path: Path) -> dict[str, Any]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return run if isinstance(run, dict) else {}


def _part(run: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """The dict at a path of keys; empty when any of it is missing or no dict."""
    value: Any = run
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _title(run: Mapping[str, Any]) -> str:
    facts = _part(run, "facts")
    size = _number(facts.get("parameters"))
    family = str(facts.get("family") or "Training run")
    return f"{family}, {scaled(size)} parameters" if size else family


def _subtitle(run: Mapping[str, Any]) -> str:
    world, degrees = _part(run, "plan", "world"), _part(run, "plan", "degrees")
    split = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree != 1)
    device = world.get("accelerator") or world.get("device_type", "")
    ranks = f"{world['size']} {device} rank{'s' * (world['size'] != 1)}" if "size" in world else ""
    compute = str(_part(run, "plan", "dtypes").get("compute", ""))
    started = str(run.get("started") or "").replace("T", " ")[:16]
    return " · ".join(part for part in (ranks, split, compute, started and f"started {started}") if part)


def _figures(run: Mapping[str, Any], records: Sequence[Record]) -> Iterator[Figure]:
    """The main numbers, each only where it is known."""
    result = _part(run, "result")
    steps = [record for record in records if "loss" in record]
    yield from _loss_figures(result, records, steps)
    tokens, seconds = _number(result.get("tokens")), sum(_number(record.get("seconds")) or 0.0 for record in steps)
    if tokens:  # of all processes that have trained the run, as the steps are
        yield Figure("Tokens", scaled(tokens), f"in {duration(seconds)} of steps" if seconds else "")
    rates = [record["tokens_per_second"] for record in steps[1:] if record.get("tokens_per_second")]
    if rates:
        yield Figure("Tokens a second", f"{median(rates):,.0f}", "median step, the first left out")
    flops = [record["tflops_per_rank"] for record in steps[1:] if record.get("tflops_per_rank")]
    if flops:
        used = [record["mfu"] for record in steps[1:] if record.get("mfu")]
        yield Figure("TFLOP/s per rank", f"{median(flops):.3g}", f"{median(used):.1%} MFU" if used else "")
    yield from _prediction_figures(records, steps)
    if skipped := sum(bool(record.get("skipped")) for record in steps):
        yield Figure("Skipped steps", str(skipped), "not finite, or without a label")


def _prediction_figures(records: Sequence[Record], steps: Sequence[Record]) -> Iterator[Figure]:
    """Peak memory and the time of a step, each with what the planner had predicted of it."""
    compared = next((record for record in records if "measured_step_seconds" in record), {})
    if peaks := [max(record["peak_memory_bytes"]) for record in steps if record.get("peak_memory_bytes")]:
        predicted = _number(compared.get("predicted_peak_memory_bytes"))
        detail = f"; predicted {_bytes(predicted)}, off by {predicted / max(peaks) - 1:+.1%}" if predicted else ""
        yield Figure("Peak memory", _bytes(max(peaks)), f"of the fullest rank{detail}")
    predicted, measured = (
        _number(compared.get("predicted_step_seconds")),
        _number(compared.get("measured_step_seconds")),
    )
    if predicted and measured:
        detail = f"measured {measured:.3g} s, off by {predicted / measured - 1:+.1%}"
        yield Figure("Predicted step", f"{predicted:.3g} s", detail)


def _loss_figures(result: Mapping[str, Any], records: Sequence[Record], steps: Sequence[Record]) -> Iterator[Figure]:
    losses = [record["loss"] for record in steps if record.get("loss") is not None]
    evaluated = [r["validation_loss"] for r in records if r.get("validation_loss") is not None]
    validation = _number(result.get("validation_loss")) or (evaluated[-1] if evaluated else None)
    entropy = _number(result.get("unigram_entropy"))
    if validation is not None:
        detail = ""
        if entropy is not None:
            side = "below" if validation < entropy else "above"
            detail = f"{abs(entropy - validation):.2f} nats {side} unigram entropy {entropy:.3f}"
        yield Figure("Validation loss", f"{validation:.3f}", detail)
    evaluation = next((record for record in reversed(records) if "validation_loss" in record), {})
    for name, value in evaluation_metrics(evaluation).items():
        yield Figure(name, f"{value:.3f}", "of the last evaluation")
    if losses:
        yield _training_figure(result, losses, int(steps[-1].get("step", len(losses))))


def _training_figure(result: Mapping[str, Any], losses: Sequence[float], step: int) -> Figure:
    """The training loss that can be compared with the validation loss, or the last one of a run without a result."""
    mean, averaged = _number(result.get("training_loss")), result.get("averaged_steps")
    value, words = (losses[-1], "") if mean is None or not averaged else (mean, f"mean of the last {averaged} steps, ")
    return Figure("Training loss", f"{value:.3f}", f"{words}from {losses[0]:.3f} in {step} steps")


def figure_list(figures: Sequence[Figure]) -> str:
    """The numbers of a page's header."""
    items = [
        f"<div><dt>{escape(f.name)}</dt><dd>{escape(f.value)}</dd>"
        + (f"<dd>{escape(f.detail)}</dd>" if f.detail else "")
        for f in figures
    ]
    return '<dl class="figures">' + "".join(f"{item}</div>" for item in items) + "</dl>" if items else ""


def chart_article(chart: Chart) -> str:
    """A chart's place on the page; the page's script draws it there."""
    wide = " wide" if chart.wide else ""
    return (
        f'<article class="chart{wide}"><h3>{escape(chart.title)}</h3><p>{escape(chart.text)}</p>'
        f'<div class="plot" id="plot-{chart.name}"></div></article>'
    )


def _prompts(records: Sequence[Record]) -> Iterator[str]:
    """Yield the texts that the model wrote behind the job's prompts, at the last evaluation that has them."""
    samples: list[Record] = next((record["samples"] for record in reversed(records) if record.get("samples")), [])
    if samples:
        rows = [(str(sample["prompt"]), str(sample["text"]), None) for sample in samples]
        yield f"<section><h2>Prompts at the last evaluation</h2>{data_table(('Prompt', 'Written'), rows)}</section>"


def _sections(run: Mapping[str, Any], sample: Path) -> Iterator[str]:
    if sample.exists() and (text := sample.read_text(encoding="utf-8", errors="replace").strip("\n")):
        yield f"<section><h2>Generated sample</h2><pre>{escape(text)}</pre></section>"
    if sources := list(_source_rows(run)):
        yield f"<section><h2>Data</h2>{data_table(('Source', 'Share of the samples', 'Read'), sources)}</section>"
    if plan := _part(run, "plan"):
        yield f"<section><h2>Plan</h2>{_plan_table(plan)}{_notes(plan)}</section>"
    if job := _part(run, "job") or _part(run, "plan", "job"):
        yield f"<details><summary>Job</summary>{data_table(('Key', 'Value'), _job_rows(job))}</details>"
    if versions := _part(run, "versions"):
        rows = [(str(name), str(version), None) for name, version in versions.items()]
        yield f"<details><summary>Versions</summary>{data_table(('Package', 'Version'), rows)}</details>"


def _source_rows(run: Mapping[str, Any]) -> Iterator[Row]:
    """Yield each source of the data with its share, and how much of it has been read."""
    for name, read in _part(run, "result", "sources").items():
        corpus = str(_part(run, "data", "sources", name).get("corpus") or _part(run, "data").get("corpus") or "")
        whole = f"{read['shards']:,} shards" if "shards" in read else f"{read['sequences']:,} sequences"
        what = f"{read['samples']:,} samples, {read['passes']:.3f} passes of {whole}; {corpus}"
        yield name, f"{read['share']:.2%}", what


Row = tuple[str, str, str | None]  # key, value, and the rule where there is a column for it


def _plan_table(plan: Mapping[str, Any]) -> str:
    rules = _part(plan, "rules")
    leaves = _flat(plan, ("job", "rules", "notes"))
    known = ((key, value) for key, value in leaves if value not in (None, "", [], {}))
    rows = [(key, _shown(value), str(rules.get(key.split(".")[-1], ""))) for key, value in known]
    return data_table(("Key", "Value", "Rule"), rows)


def _notes(plan: Mapping[str, Any]) -> str:
    notes = plan.get("notes")
    if not isinstance(notes, list | tuple) or not notes:
        return ""
    return '<ul class="notes">' + "".join(f"<li>{escape(str(note))}</li>" for note in notes) + "</ul>"


def _job_rows(job: Mapping[str, Any]) -> list[Row]:
    return [(key, _shown(value), None) for key, value in _flat(job, ())]


def _flat(tree: Mapping[str, Any], leave_out: Sequence[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`section.key` and value of every leaf; an empty dict is a leaf."""
    for key, value in tree.items():
        if key in leave_out:
            continue
        if isinstance(value, dict) and value:
            yield from _flat(value, (), f"{prefix}{key}.")
        else:
            yield prefix + str(key), value


def data_table(head: Sequence[str], rows: Sequence[Row]) -> str:
    """A table of two columns, or of three where the rows have a rule."""
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = []
    for key, value, rule in rows:
        unset = ' class="unset"' if value == "–" else ""
        last = "" if rule is None else f'<td class="rule">{escape(rule)}</td>'
        body.append(f'<tr{unset}><td><code>{escape(key)}</code></td><td class="value">{escape(value)}</td>{last}</tr>')
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _shown(value: Any) -> str:
    if value in (None, "", [], {}):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and abs(value) >= 100_000:
        return f"{value:,}"
    return ", ".join(map(_shown, value)) if isinstance(value, list | tuple) else str(value)


def _footer(run: Mapping[str, Any]) -> str:
    version = _part(run, "versions").get("shardwise")
    return f"Written by shardwise{f' {version}' if version else ''}. Nothing on this page is loaded from a network."


def scaled(value: float) -> str:
    """`10.2M` and so on; small numbers as they are."""
    rounded = float(f"{value:.3g}")  # 999.9 million are 1B, and no 1e+03M
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e4, "k")):
        if rounded >= size:
            return f"{value / (1e3 if name == 'k' else size):.3g}{name}"
    return f"{value:,.0f}"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 4 * 2**30 else f"{value / 2**20:,.0f} MiB"


def script_json(value: Any) -> str:
    """JSON that cannot end the script element that holds it."""
    return json.dumps(value, cls=PlotlyJSONEncoder).replace("<", "\\u003c").replace("&", "\\u0026")
