"""The batch of a run whose hosts come and go: that of all of them, on any number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.checkpoint.load import _check_batch
from shardwise.errors import CheckpointError
from shardwise.job.schema import Job
from shardwise.plan.draft import Draft, World
from shardwise.plan.fixed_batch import with_fixed_batch
from shardwise.plan.plan import resolve
from tests.plan.rules.jobs import FACTS


def test_fewer_ranks_take_more_microbatches_of_the_same_batch() -> None:
    job = Job.model_validate({"training": {"microbatch_size": 2, "gradient_accumulation": 3}})
    fixed, note = with_fixed_batch(job, World(8, "cpu", 2, hosts=4))
    assert "a step has 48 sequences (microbatch_size 2 x gradient_accumulation 3 x 8 data ranks)" in note
    counts = []
    for hosts in (4, 3, 2, 1):
        draft = Draft(fixed, World(2 * hosts, "cpu", 2, hosts=hosts))
        counts.append((draft.sequences.value, draft.microbatch.value, draft.accumulation.value))
    assert counts == [(48, 2, 3), (48, 2, 4), (48, 2, 6), (48, 2, 12)]


def test_accumulation_alone_keeps_its_microbatch() -> None:
    job = Job.model_validate({"training": {"sequences_per_step": 10, "gradient_accumulation": 2}})
    fixed, _ = with_fixed_batch(job, World(4, "cpu", 1, hosts=4))
    draft = Draft(fixed, World(2, "cpu", 1, hosts=2))
    assert (draft.sequences.value, draft.microbatch.value, draft.accumulation.value) == (10, 2, 3)


def test_a_batch_that_no_rank_decides_is_left_as_it_is() -> None:
    job = Job.model_validate({"training": {"sequences_per_step": 10, "microbatch_size": 2}})
    assert with_fixed_batch(job, World(4, "cpu", 1, hosts=4)) == (job, "")


def test_a_batch_that_ranks_alone_have_changed_is_refused_at_a_resume() -> None:
    by_ranks, given = {"microbatch_size": 2, "gradient_accumulation": 2}, {"sequences_per_step": 8}
    written = Job.model_validate({"training": by_ranks})
    plan = resolve(written, World(2, "cpu", 2), FACTS)
    manifest: Any = SimpleNamespace(plan=plan.to_dict(), job=written.model_dump(mode="json"))

    def read(training: dict[str, Any], ranks: int) -> None:
        _check_batch(
            resolve(Job.model_validate({"training": training}), World(ranks, "cpu", ranks), FACTS), manifest, ""
        )

    with pytest.raises(
        CheckpointError, match=r"8 sequences a step.* are 4 on 1 data ranks; set training\.sequences_per"
    ):
        read(by_ranks, 1)
    read(by_ranks, 2)
    read(given, 1)
    read({**by_ranks, "gradient_accumulation": 1}, 1)  # which the user has changed
