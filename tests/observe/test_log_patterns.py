"""The patterns of log services against the lines that the display prints."""

from __future__ import annotations

import re

from shardwise.observe.log_patterns import METRIC_PATTERNS
from tests.observe.plans import step_record
from tests.observe.test_display import plain_lines


def test_each_pattern_finds_its_figure() -> None:
    record = step_record(3, mfu=0.412, loss=2.5)
    lines = plain_lines([record, {"step": 3, "validation_loss": 4.0, "training_loss": 4.5}])
    values = {
        name: [m[1] for line in lines if (m := re.search(regex, line))] for name, regex in METRIC_PATTERNS.items()
    }
    assert values["train:loss"] == ["2.5000"] and values["validation:loss"] == ["4.0000"]
    assert values["train:step"] == ["3"] and values["train:mfu_percent"] == ["41.2"]
    assert float(values["train:tokens_per_second"][0]) == round(record["tokens_per_second"])
    assert all(len(found) == 1 for found in values.values()), values


def test_the_service_takes_them() -> None:
    assert len(METRIC_PATTERNS) <= 40 and all(len(regex) <= 500 for regex in METRIC_PATTERNS.values())
