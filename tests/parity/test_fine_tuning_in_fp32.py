"""The first step of fine-tuning in fp32 agrees with one process to 1e-5, on every layout and family.

The oracle is that of the matrices in fp64 (test_rows.py, test_row_adapters.py, test_preference.py): it masks, packs and
reduces by itself, and adapts with peft. Every layout is one world, and each of its cells a job of one step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from shardwise.job.schema import Job, PrecisionSection
from shardwise.model.facts import ModelFacts
from shardwise.testing import oracle
from shardwise.testing.comparison import Tolerances, VerifyReport
from shardwise.testing.world import WorldPool
from tests.parity.jobs import facts_of, verify_one
from tests.parity.test_adapters import STACKS, PeftModel
from tests.parity.test_preference import LORA, preference_job
from tests.parity.test_preference import preferences as preferences
from tests.parity.test_row_adapters import FOUR_EXPERTS, adapted
from tests.parity.test_rows import EVERY_LAYOUT, PADDED, row_job
from tests.parity.test_rows import rows as rows

FIRST = {"steps": 1, "sequences_per_step": 5, "microbatch_size": 1}
FAMILIES = ("llama", "qwen3", "gemma", "gpt2")
OF_EXPERTS = {"kind": "lora", "target_modules": ["q_proj", "o_proj"], "target_parameters": STACKS}


class Cell(NamedTuple):
    """A job of the matrix, and whether peft adapts the oracle."""

    name: str
    job: Job
    uses_peft: bool = False


def cells_of(rows: Path, preferences: Path, family: str, layout: str) -> list[Cell]:
    """Return what is trained on a family: rows and pairs, whole and with adapters."""
    config: dict[str, Any] = FOUR_EXPERTS if family == "mixtral" else {}
    packed = row_job(rows, family, layout, training=FIRST, config=config)
    padded = row_job(rows, family, layout, "prompt_completion", training=FIRST, config=config, **PADDED)
    pairs = {"training": FIRST, "model": config}
    cells = [
        Cell("sft", padded),
        Cell("sft packed", packed),
        Cell("dpo", preference_job(preferences, family, layout, **pairs)),
    ]
    parallel = EVERY_LAYOUT[layout][1]
    if family == "mixtral":
        return [*cells, Cell("lora of experts", adapted(packed, parallel, **OF_EXPERTS))]
    return [
        *cells,
        Cell("lora", adapted(packed, parallel, kind="lora"), uses_peft=True),
        Cell("dora", adapted(packed, parallel, kind="dora"), uses_peft=True),
        Cell("dpo with lora", preference_job(preferences, family, layout, adapter=LORA, **pairs), uses_peft=True),
    ]


def verify_cells(jobs: list[tuple[Job, ModelFacts, bool]]) -> list[VerifyReport | None]:
    """Run on every rank of a world."""
    reports = []
    for job, facts, uses_peft in jobs:
        with mock.patch.object(oracle, "adapt", PeftModel if uses_peft else oracle.adapt):
            reports.append(verify_one(job, 1, facts))
    return reports


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("layout", EVERY_LAYOUT)
def test_first_step(world_pool: WorldPool, rows: Path, preferences: Path, layout: str) -> None:
    families = ("mixtral",) if layout == "expert 2" else (*FAMILIES, "mixtral")
    cells = {family: cells_of(rows, preferences, family, layout) for family in families}
    named = {f"{family} {cell.name}": cell for family, of_family in cells.items() for cell in of_family}
    jobs = [cell.job.model_copy(update={"precision": PrecisionSection(compute="fp32")}) for cell in named.values()]
    uses_peft = [cell.uses_peft for cell in named.values()]
    asked = [(job, facts_of(job), flag) for job, flag in zip(jobs, uses_peft, strict=True)]
    reports = world_pool.run(EVERY_LAYOUT[layout][0], verify_cells, asked, timeout=1800)[0]
    assert Tolerances.of("fp32").loss.error == Tolerances.of("fp32").gradient.error == 1e-5
    wrong = {name: str(report.first) for name, report in zip(named, reports, strict=True) if not report.agrees}
    assert not wrong
