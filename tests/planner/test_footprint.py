"""The quick memory model, and how wide intervals are: each against a count or a truth that is known."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.planner.constants.hardware import GIB
from shardwise.planner.constants.inventory import cluster, presets, shipped, stack_of
from shardwise.planner.formulas.compute import KernelWork
from shardwise.planner.formulas.footprint import footprint, stage_blocks, stage_footprints
from shardwise.planner.formulas.layer import BlockTime, blocks_ahead
from shardwise.planner.formulas.predict import predict
from shardwise.planner.formulas.prediction import EIGHTY, Stack, TrainingConfiguration
from shardwise.planner.published.calibrate_memory import Held, fit_memory
from shardwise.planner.published.calibrate_spread import (
    Prior,
    Seen,
    alike,
    probed,
    spread,
    student,
    unknown_offset,
    unknown_spread,
    wait_spread,
)
from shardwise.planner.published.evaluate import evaluate_rows
from shardwise.planner.published.mapping import configuration
from shardwise.planner.published.tables import read_table

TABLES = Path("tests/data/perf-tables")


def made(**changes: object) -> TrainingConfiguration:
    model, where = presets()["llama3-8b"], cluster("p5.48xlarge:4")
    base = TrainingConfiguration(model, where, stack_of("default"), 4096, 2, accumulation=8, shard=8, tensor=4)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("balanced", [False, True])
def test_stages_hold_every_block_and_cost_alike(pipeline: int, balanced: bool) -> None:
    model = presets()["llama3-8b"]
    blocks = stage_blocks(model, pipeline, balanced)
    assert sum(blocks) == model.layers and len(blocks) == pipeline
    head = model.embedding_parameters / model.layer_parameters
    costs = [*blocks[:-1], blocks[-1] + head] if balanced else blocks
    assert balanced or max(blocks) - min(blocks) <= 1
    assert not balanced or max(costs) <= (model.layers + head) / pipeline + 1 or blocks[-1] == 0


def test_what_fsdp2_reserves_is_what_was_measured() -> None:
    """torchtitan's Llama 3 8B, on 8 and on 128 accelerators, eager and compiled; none of these rows was fitted."""
    rows = [row for row in read_table(TABLES / "torchtitan_bf16.csv") if "mem_gb" in row.numbers]
    for row in rows:
        found = predict(configuration(row)).memory_bytes / GIB
        assert found == pytest.approx(row.numbers["mem_gb"], rel=0.05), row.id
    eager, compiled = (predict(configuration(rows[index])).memory_bytes for index in (0, 2))
    assert (eager - compiled) / GIB == pytest.approx(4.0)  # the result of down, which no compiled backward reads


def test_zero_bubble_keeps_gradients_and_parameters_whole() -> None:
    plain = made(pipeline=2, shard=4, balanced=False)
    (before, _), (after, _) = footprint(plain), footprint(replace(plain, schedule="zero_bubble"))
    elements = (16 * plain.model.layer_parameters + plain.model.embedding_parameters) / 4
    assert after["gathered"] == pytest.approx(2 * elements) and after["communication"] == pytest.approx(4 * elements)
    assert sum(after.values()) > sum(before.values())


def test_a_full_or_reducing_pipeline_stalls_where_the_stack_does() -> None:
    plain = made(pipeline=2, shard=1, replica=4, zero=0, stack=replace(stack_of("default"), stall=0.5))
    sharded = replace(plain, zero=1, shard=4, replica=1)
    assert predict(plain).seconds["stalls"] == pytest.approx(8 * 0.5)
    assert predict(sharded).seconds["stalls"] == 0
    assert predict(replace(sharded, microbatch=64)).seconds["stalls"] == pytest.approx(8 * 0.5)
    assert predict(replace(plain, pipeline=1, replica=8)).seconds["stalls"] == 0
    assert predict(replace(plain, stack=stack_of("default"))).seconds["stalls"] == 0


def test_a_stack_whose_rows_would_not_fit_in_eager_mode_has_a_fused_loss() -> None:
    large = made(tensor=1, shard=32, microbatch=6, checkpointing="full")
    assert predict(large).memory["logits"] > predict(large).memory["activations"]
    room = replace(large.cluster, accelerator=replace(large.cluster.accelerator, memory_bytes=40 * GIB))
    assert fit_memory([Held(large, None)], Stack("x")).logit_bytes == 12
    assert fit_memory([Held(replace(large, cluster=room), None)], Stack("x")).logit_bytes == 4


def test_memory_constants_are_found_again() -> None:
    truth = replace(Stack("x"), activations=1.3, gradient_copy=2.0, memory_gb=3.0, pending=0.8)
    shapes = [made(zero=1, tensor=t, shard=32 // t, microbatch=size) for t in (1, 2, 4, 8) for size in (1, 2, 4)]
    held = [Held(each, max(footprint(replace(each, stack=truth))[1])) for each in shapes]
    found = fit_memory(held, Stack("x"))
    assert found.activations == pytest.approx(1.3, rel=0.1) and found.gradient_copy == pytest.approx(2.0, rel=0.2)
    assert found.pending == pytest.approx(0.8, rel=0.2)
    for row in held:
        assert max(footprint(replace(row.configuration, stack=found))[1]) == pytest.approx(row.size, rel=0.08)


def test_partial_results_are_pending_as_far_as_the_host_is_ahead() -> None:
    """A queue of 1024 launches holds 25.6 forwards of a gated block's 40: two results of 2 x 4096 x 4096 in bf16 each,
    on however many tensor ranks. Without tensor ranks, or where the stack says nothing of it, there are none."""
    stack = replace(stack_of("default"), pending=1.0)
    found = [footprint(made(stack=stack, tensor=t, shard=32 // t, microbatch=8))[0]["pending"] for t in (1, 4, 8)]
    assert found == [0.0, *[pytest.approx(1024 / 40 * 2 * 2 * 8 * 4096 * 4096)] * 2]
    assert footprint(made())[0]["pending"] == 0
    slow = made(stack=replace(stack, launch=100.0), accumulation=2)
    assert footprint(slow)[0]["pending"] == 0


def test_a_host_is_ahead_where_it_is_quicker_and_does_not_wait() -> None:
    def ahead(host: float, blocks: int = 32, forwards: float = 1.0, **changes: object) -> float:
        layer = BlockTime(KernelWork(1.0, host=host), KernelWork(), KernelWork(), {}, 0.0)
        return blocks_ahead(made(**changes), layer, blocks, forwards)

    assert ahead(2.0) == ahead(3.0) == 0
    assert ahead(0.1) == ahead(1.0) == 25.6
    assert 0 < ahead(1.5) < 25.6
    assert ahead(0.5, accumulation=1) == 16  # of 32 blocks, half a block each
    waiting = {"pipeline": 4, "shard": 2, "stack": replace(stack_of("default"), pipeline_wait=1.0)}
    assert ahead(0.5, 8, 4.0, **waiting) == 8  # only two of the four first forwards
    assert ahead(0.5, 8, 2.0, **waiting) == 0


def test_reduction_buckets_are_held_with_several_data_ranks() -> None:
    stack = replace(stack_of("default"), gradient_copy=2.0)
    alone, several = (
        footprint(made(zero=0, shard=1, replica=n, tensor=t, stack=stack))[0]["gradients"] * t
        for n, t in ((1, 32), (4, 8))
    )
    assert several / alone == pytest.approx(6 / 4)


def test_memory_is_compared_with_that_of_the_rank_that_logs_it() -> None:
    """The first, also where the last, with its logits, is fuller."""
    rows = [row for row in read_table(TABLES / "nanotron_grid_h100.csv") if row.numbers["pp"] > 1]
    for result in evaluate_rows(rows[::50]):
        each = shipped().applied(configuration(result.row))
        assert result.memory == pytest.approx(sum(stage_footprints(each)[0].values()) / GIB)


def test_intervals_hold_what_they_say() -> None:
    """Errors drawn with known components: 80 % of as many new ones are inside."""
    draw = random.Random(0)

    def drawn() -> list[tuple[float, float]]:
        shares = [draw.random() for _ in range(400)]
        return [(draw.gauss(0.0, (0.05**2 + (0.3 * share) ** 2) ** 0.5), share) for share in shares]

    waits = wait_spread([drawn(), drawn()])
    own = spread(drawn(), waits)
    inside = [abs(error) <= EIGHTY * (own**2 + (waits * share) ** 2) ** 0.5 for error, share in drawn()]
    assert 0.2 <= waits <= 0.4 and 0.03 <= own <= 0.08
    assert 0.74 <= sum(inside) / len(inside) <= 0.86


def test_a_stack_nobody_measured_is_as_uncertain_as_the_others_differ() -> None:
    """Each of the others counts once, by its usual error, however many rows it has and however wrong the worst are."""
    near, far = [(0.02, 0.0)] * 50, [(0.3, 0.0)] * 4 + [(5.0, 0.0)]
    assert unknown_spread([near] * 4) == 0.05
    half = 0.3 / 0.6745
    assert unknown_spread([near] * 3 + [far]) == pytest.approx((half**2 / 4) ** 0.5 * student(2), rel=0.01)
    assert unknown_spread([near] * 3 + [far]) == unknown_spread([near[:5]] * 3 + [far])
    departing = [[alike(error, 0.0) for error, _ in rows] for rows in ([(-0.1, 0.0)], [(0.2, 0.0)], far)]
    assert unknown_offset(departing) == pytest.approx(0.2)


def test_students_t() -> None:
    """80 % of it, by a table, over that of a normal distribution."""
    for freedom, quantile in ((2, 1.886), (3, 1.638), (10, 1.372), (1e6, 1.2816)):
        assert student(freedom) == pytest.approx(quantile / 1.2816, rel=0.005)


def rows(scatter: Iterable[tuple[float, float]]) -> list[Seen]:
    """Rows of (log error, share of waits) all of whose step departs alike."""
    return [alike(error, share) for error, share in scatter]


def test_probe_rows_that_disagree_make_intervals_wide() -> None:
    prior = Prior(0.07, 0.05, 0.15, 1.0)
    agree, disagree = (probed(rows((0.2 + e, 0.0) for e in errors), prior) for errors in ((0, 0, 0), (0.4, -0.4, 0)))
    assert disagree.spread > 5 * agree.spread and disagree.waits > 5 * agree.waits
    assert 0.15 < agree.offset < 0.2  # drawn to none, since most stacks have none
    assert 0 < probed(rows([(0.01, 0.0), (0.05, 0.0), (-0.02, 0.0)]), prior).offset < 0.9 * 0.04 / 3  # their mean
    waiting = probed(rows([(0.0, 0.0), (0.0, 0.0), (0.3, 1.0)]), prior)
    assert waiting.offset < 0.03 < probed(rows([(0.0, 0.0), (0.0, 0.0), (0.3, 0.0)]), prior).offset


def test_intervals_after_a_probe_hold_what_they_say() -> None:
    """Stacks drawn as the prior has them: of a further row of each, 80 % are inside."""
    draw, prior, inside = random.Random(1), Prior(0.07, 0.05, 0.15, 3.0), []
    for _ in range(300):
        offset = prior.offset * math.tan(math.pi * (draw.random() - 0.5))
        wider = (prior.rows / (2 * draw.gammavariate(prior.rows / 2, 1.0))) ** 0.5
        drawn = [
            (draw.gauss(offset, wider * math.hypot(prior.spread, prior.waits * share)), share)
            for share in (draw.random() for _ in range(4))
        ]
        found, (error, share) = probed(rows(drawn[:3]), prior), drawn[3]
        inside.append(abs(error - found.offset) <= EIGHTY * math.hypot(found.spread, found.waits * share))
    assert 0.74 <= sum(inside) / len(inside) <= 0.87


def test_a_step_of_traffic_is_less_certain() -> None:
    stack = replace(stack_of("default"), spread=0.05, wait_spread=0.3)
    busy, waiting = (predict(made(stack=stack, tensor=t, shard=32 // t)) for t in (1, 8))
    assert waiting.waits > busy.waits
    assert waiting.interval[1] / waiting.step_seconds > busy.interval[1] / busy.step_seconds
