"""report.html: whole from whole files, useful from incomplete ones, harmless whatever text is in them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from shardwise.observe.charts import MAX_POINTS, make_charts
from shardwise.observe.metrics import MetricsWriter
from shardwise.observe.report import scaled, write_report
from tests.observe.plans import FACTS, make_plan, step_record

HOSTILE = "</script><script>alert(1)</script> & <b>bold</b>"


class Page(HTMLParser):
    """What a browser would see: elements, their attributes, and text outside of scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.scripts, self._inside = "", [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data + "\n"

    @property
    def specs(self) -> dict[str, Any]:
        (index,) = [
            i for i, (_, a) in enumerate(e for e in self.elements if e[0] == "script") if a.get("id") == "specs"
        ]
        return json.loads(self.scripts[index])


def write_run(output: Path, steps: int = 40, ranks: int = 2, **result: Any) -> Path:
    plan = make_plan(workers=ranks, training={"steps": steps}, data={"path": HOSTILE})
    with MetricsWriter(output / "metrics.jsonl") as writer:
        for step in range(1, steps + 1):
            writer.write(step_record(step, ranks, loss=float("nan") if step == 7 else 9 - step / steps))
            if step % 20 == 0:
                writer.write({"step": step, "validation_loss": 8.5 - step / 100})
    run = {
        "job": plan.job.model_dump(mode="json"),
        "plan": plan.to_dict() | {"notes": [f"a note {HOSTILE}"]},
        "facts": {"family": FACTS.family, "parameters": FACTS.parameters},
        "versions": {"torch": "2.13.0"},
        "started": "2026-01-02T03:04:05",
        "result": {"validation_loss": 8.1, "unigram_entropy": 9.25, "tokens": 163840, "seconds": 95.0, **result},
    }
    (output / "run.json").write_text(json.dumps(run))
    (output / "sample.txt").write_text(f"def f():\n    return '{HOSTILE}'\n")
    return write_report(output)


def test_header_holds_the_main_figures(tmp_path: Path) -> None:
    text = Page(write_run(tmp_path)).text
    assert "gpt_neox, 4.2M parameters" in text
    assert "2 cpu ranks · shard 2 · fp32 · started 2026-01-02 03:04" in text
    assert "8.100" in text and "1.15 nats below unigram entropy 9.250" in text
    assert "164k" in text and "in 0:13 of steps" in text
    assert "415 MiB" in text


def test_training_loss_is_the_mean_that_validation_can_be_compared_with(tmp_path: Path) -> None:
    text = " ".join(Page(write_run(tmp_path, training_loss=8.25, averaged_steps=8)).text.split())
    assert "Training loss 8.250 mean of the last 8 steps, from 8.975 in 40 steps" in text
    assert "Training loss 8.000 from 8.975 in 40 steps" in " ".join(Page(write_run(tmp_path / "b")).text.split())


def test_one_peak_is_shown_with_its_prediction(tmp_path: Path) -> None:
    write_run(tmp_path)
    comparison = {"step": 10, "measured_step_seconds": 2.0, "predicted_step_seconds": 3.0}
    comparison |= {"measured_peak_memory_bytes": 400 << 20, "predicted_peak_memory_bytes": 830 << 19}
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(comparison)
    text = " ".join(Page(write_report(tmp_path)).text.split())
    assert "Peak memory 415 MiB of the fullest rank; predicted 415 MiB, off by +0.0%" in text
    assert "Predicted step 3 s measured 2 s, off by +50.0%" in text and "Predicted memory" not in text


def test_no_row_of_the_plan_is_blank(tmp_path: Path) -> None:
    page = write_run(tmp_path).read_text(encoding="utf-8")
    assert '<td class="value"></td>' not in page and "<code>stages</code>" not in page


def test_charts_hold_the_records(tmp_path: Path) -> None:
    specs = Page(write_run(tmp_path)).specs
    assert list(specs) == ["plot-loss", "plot-throughput", "plot-memory", "plot-gradient", "plot-rate"]
    training, validation, entropy = specs["plot-loss"]["data"]
    assert training["x"] == list(range(1, 41))
    assert training["y"][6] is None and training["y"][-1] == 8.0
    assert (validation["x"], validation["y"]) == ([20, 40], [8.3, 8.1])
    assert entropy["y"] == [9.25, 9.25] and entropy["line"]["dash"] == "dash"
    assert [trace["name"] for trace in specs["plot-memory"]["data"]] == ["rank 0", "rank 1"]
    assert {trace["name"] for trace in specs["plot-throughput"]["data"]} == {"tokens/s", "TFLOP/s per rank"}
    for spec in specs.values():
        go.Figure(spec)  # plotly validates every property


def test_every_chart_has_its_place(tmp_path: Path) -> None:
    page = Page(write_run(tmp_path))
    places = {attributes.get("id") for tag, attributes in page.elements if tag == "div"}
    assert set(page.specs) <= places


def test_page_is_self_contained(tmp_path: Path) -> None:
    page = Page(write_run(tmp_path))
    for _, attributes in page.elements:
        assert not {"src", "href", "data", "action", "srcset"} & attributes.keys()
    (policy,) = [a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy and "default-src 'none'" in policy and "http" not in policy
    assert sum(len(script) > 1_000_000 for script in page.scripts) == 1  # plotly, once


def test_text_of_the_run_is_shown_and_never_markup(tmp_path: Path) -> None:
    page = Page(write_run(tmp_path))
    assert len(page.scripts) == 3
    assert [tag for tag, _ in page.elements].count("b") == 0
    assert page.text.count(HOSTILE) == 3  # sample, note, job


def test_plan_table_gives_the_rule_of_each_value(tmp_path: Path) -> None:
    text = Page(write_run(tmp_path)).text
    plan = make_plan()
    assert plan.rules["placement"] in text and plan.rules["shard"] in text and plan.rules["compute"] in text
    assert re.search(r"degrees\.shard\s+2\s", text)
    assert re.search(r"optimizer\.learning_rate\s+0\.003\s", text)


@pytest.mark.parametrize("content", [None, "", "not json", "[1, 2]", '{"job": 3, "plan": [], "result": null}'])
def test_report_without_a_usable_run_json(content: str | None, tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({"step": 1, "loss": 2.0})
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    page = Page(write_report(tmp_path))
    assert list(page.specs) == ["plot-loss"]
    assert "2.000" in page.text


def test_report_of_a_run_that_wrote_nothing_yet(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert page.specs == {}
    assert "No steps were recorded." in page.text


def test_losses_that_were_never_finite_give_no_loss_chart() -> None:
    assert (
        make_charts([{"step": 1, "loss": None}, {"step": 2, "loss": None, "grad_norm": 1.0}], 2.0)[0].name == "gradient"
    )


def test_a_worse_model_is_said_to_be_worse(tmp_path: Path) -> None:
    assert "0.75 nats above unigram entropy" in Page(write_run(tmp_path, validation_loss=10.0)).text


def test_a_loss_of_classes_is_of_labels(tmp_path: Path) -> None:
    assert "nats per token" in write_run(tmp_path).read_text()
    run = json.loads((tmp_path / "run.json").read_text())
    run["job"]["model"]["task"] = "image_classification"
    (tmp_path / "run.json").write_text(json.dumps(run))
    page = write_report(tmp_path).read_text()
    assert "nats per label" in page and "nats per token" not in page


def test_long_runs_are_thinned_and_smoothed() -> None:
    records = [step_record(step) for step in range(1, 10_001)]
    loss = make_charts(records, None)[0].figure
    assert [trace.name for trace in loss.data] == ["training", "training, smoothed"]
    for trace in loss.data:
        assert MAX_POINTS / 2 < len(trace.x) <= MAX_POINTS + 1
        assert (trace.x[0], trace.x[-1]) == (1, 10_000)
    raw, smooth = loss.data
    middle = len(raw.y) // 2
    assert smooth.y[middle] == pytest.approx(3.0, abs=0.02)  # the mean, without the lag of a running one
    assert max(abs(a - b) for a, b in zip(raw.y[middle:], smooth.y[middle:])) < 0.08


def test_many_ranks_are_shown_as_a_range() -> None:
    charts = {chart.name: chart.figure for chart in make_charts([step_record(1, ranks=16)], None)}
    assert [trace.name for trace in charts["memory"].data] == ["highest", "median", "lowest"]
    assert charts["memory"].data[0].y == (412 + 45,)


def test_pairs_and_sets_have_lines_of_their_own() -> None:
    steps = [
        step_record(step) | {"rewards_chosen": 0.5 * step, "rewards_rejected": -0.5, "rewards_margin": 0.5 * step + 0.5,
                             "rewards_accuracy": 0.75}
        for step in (1, 2)
    ]  # fmt: skip
    evaluated = {"step": 2, "validation_loss": 2.0, "validation_rewards_accuracy": 0.5, "validation_loss/code": 1.5}
    charts = {chart.name: chart.figure for chart in make_charts([*steps, evaluated], None)}
    rewards = {trace.name: trace.y for trace in charts["rewards"].data}
    assert rewards == {"chosen": (0.5, 1.0), "rejected": (-0.5, -0.5), "margin": (1.0, 1.5)}
    accuracy = {trace.name: (trace.x, trace.y) for trace in charts["accuracy"].data}
    assert accuracy == {"training": ((1, 2), (0.75, 0.75)), "validation": ((2,), (0.5,))}
    assert {trace.name: trace.y for trace in charts["loss"].data}["code"] == (1.5,)
    assert {"rewards", "accuracy"}.isdisjoint(chart.name for chart in make_charts([step_record(1)], None))


@pytest.mark.parametrize(
    ("number", "text"),
    [(9_994, "9,994"), (124_439_808, "124M"), (999_700_000, "1B"), (999_600, "1M"), (999.9e9, "1T"), (12_345, "12.3k")],
)
def test_numbers_are_short_without_exponents(number: float, text: str) -> None:
    assert scaled(number) == text
