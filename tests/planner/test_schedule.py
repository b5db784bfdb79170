"""Stages and bubble: shares add up to the model, and the formula is what torch's schedules idle."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from rich.console import Console
from torch.distributed.pipelining import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from shardwise._torch_compat.pipelining import UnpairedDualPipeV
from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED
from shardwise.job.schema import Job, ParallelSection
from shardwise.model.facts import BlockFacts, ModelFacts, StageFacts
from shardwise.plan.draft import V_SCHEDULES, World, in_flight, stage_ranks
from shardwise.plan.plan import Plan, resolve
from shardwise.planner.formulas.in_flight import in_flight_of
from shardwise.planner.formulas.schedule import bubble, stage_shares
from shardwise.planner.formulas.timeline import tasks_of_rank
from shardwise.planner.search.stage_table import stage_table

FACTS = ModelFacts(
    family="gpt_neox",
    parameters=8 * 100 + 500 + 520,
    embedding_parameters=500,
    blocks=tuple(BlockFacts(f"layers.{i}", 100) for i in range(8)),
    capabilities=dict.fromkeys(Axis, SUPPORTED),
    layers=8,
    hidden_size=10,
    head="embed_out",
    parameter_shapes={"embed_in.weight": (50, 10), **{f"layers.{i}.weight": (10, 10) for i in range(8)},
                      "norm.weight": (20,), "embed_out.weight": (50, 10)},
    stages=StageFacts(before={"embed_in": 500}, after={"norm": 20, "embed_out": 500},
                      uses={"embed_in.weight": (0,), "norm.weight": (7,), "embed_out.weight": (7,)}),
)  # fmt: skip


def plan(**parallel: Any) -> Plan:
    job = {
        "parallel": parallel,
        "training": {"gradient_accumulation": 8, "sequences_per_step": 32},
        "data": {"sequence_length": 32},
    }
    return resolve(Job.model_validate(job), World(4, "cpu", 4), FACTS)


def test_shares_add_up_to_the_model() -> None:
    made = plan(pipeline_parallel_degree=4, virtual_pipeline_degree=2)
    rows = stage_shares(made, FACTS)
    assert [row.rank for row in rows] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert sum(row.parameters for row in rows) == FACTS.parameters
    assert sum(row.flops for row in rows) == pytest.approx(FACTS.model_flops_per_token(32))
    assert stage_shares(plan(), FACTS) == []
    tied = replace(FACTS, stages=replace(FACTS.stages, uses={**FACTS.stages.uses, "embed_in.weight": (0, 7)}))
    assert [row.parameters for row in stage_shares(made, tied)] == [600, *[100] * 6, 1120]
    experts = replace(FACTS, idle_parameters=100)
    assert sum(row.flops for row in stage_shares(made, experts)) == pytest.approx(experts.model_flops_per_token(32))


def test_the_bubble_is_what_the_schedule_idles() -> None:
    """1F1B: a rank's 2·m slots of work between p - 1 idle ones on either side."""
    assert bubble(plan()) == 0
    assert bubble(plan(pipeline_parallel_degree=4)) == pytest.approx(3 / 11)
    assert bubble(plan(pipeline_parallel_degree=4, pipeline="simple")) == pytest.approx(3 / 11)
    assert bubble(plan(pipeline_parallel_degree=4, virtual_pipeline_degree=2)) == pytest.approx(3 / 19)


def order_of(kind: Any, ranks: int, virtual: int, count: int) -> list[list[Any]]:
    """What torch's schedule lets each rank do, in order."""
    turns = max(1, count // ranks)
    asked: Any = object.__new__(kind)  # a schedule without stages, of which only the order is asked
    vars(asked).update(
        n_local_stages=virtual, pp_group_size=ranks, _n_microbatches=count, number_of_rounds=turns,
        microbatches_per_round=count // turns, num_stages=virtual * ranks,
    )  # fmt: skip
    return [[action for action in asked._calculate_single_rank_operations(r) if action] for r in range(ranks)]


def makespan(orders: list[list[Any]], stages: int) -> float:
    """When the last rank is done, if a forward and either half of a backward take 1 and messages take nothing."""
    cost = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}
    done: dict[tuple[str, int, int], int] = {}
    clocks, waiting = [0] * len(orders), [list(tasks) for tasks in orders]
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions:
                kind, stage, number = actions[0].computation_type.name, *actions[0][::2]
                back = "BACKWARD" in kind
                needs = [("FORWARD", stage - 1, number)] if not back and stage else []
                needs += [("BACKWARD", stage + 1, number)] if back and stage < stages - 1 else []
                needs += [("FORWARD", stage, number)] if back else []
                if not all(need in done for need in needs):
                    break
                clocks[rank] = max([clocks[rank], *(done[need] for need in needs)]) + cost[kind]
                done["FORWARD" if not back else "WEIGHT" if "WEIGHT" in kind else "BACKWARD", stage, number] = clocks[
                    rank
                ]
                actions.pop(0)
    return max(clocks)


KINDS = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": UnpairedDualPipeV,
}


@pytest.mark.parametrize(
    "schedule, virtual",
    [("interleaved", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2), ("zbv", 2), ("dualpipev", 2)],
)
def test_the_formula_is_what_torch_schedules_idle(schedule: str, virtual: int) -> None:
    whole = makespan(order_of(KINDS[schedule], 4, virtual, 8), 4 * virtual)
    made = plan(pipeline_parallel_degree=4, virtual_pipeline_degree=virtual, pipeline=schedule)
    assert bubble(made) == pytest.approx(1 - 3 * virtual * 8 / whole)


SAID = {
    "FORWARD": "forward",
    "BACKWARD_INPUT": "backward",
    "BACKWARD_WEIGHT": "weights",
    "FULL_BACKWARD": "whole backward",
}


@pytest.mark.parametrize("schedule", V_SCHEDULES)
@pytest.mark.parametrize("ranks, count", [(2, 4), (3, 7), (4, 8), (5, 13)])
def test_stages_in_a_v_are_drawn_and_counted_as_torch_orders_them(schedule: str, ranks: int, count: int) -> None:
    parallel = ParallelSection.model_validate({"pipeline_parallel_degree": ranks, "pipeline": schedule})
    for rank, actions in enumerate(order_of(KINDS[schedule], ranks, 2, count)):
        said = [(each.stage_index, each.microbatch_index, SAID[each.computation_type.name]) for each in actions]
        assert tasks_of_rank(rank, ranks, 2, count, schedule) == said
        assert {stage_ranks(parallel)[stage] for stage, _, _ in said} == {rank}
        forwards = list(accumulate({"forward": 1, "weights": 0}.get(kind, -1) for _, _, kind in said))
        waiting = list(accumulate({"backward": 1, "weights": -1}.get(kind, 0) for _, _, kind in said))
        assert max(forwards) == in_flight(parallel, count, rank)
        held = in_flight_of(rank, ranks, 2, count, schedule)
        assert max(sum(one.forwards) + (not one.in_backward) for one in held) == max(forwards)
        assert max(sum(one.weights) for one in held) + 1 == max(waiting)


def test_the_table_shows_every_stage() -> None:
    console = Console(width=140)
    with console.capture() as captured:
        console.print(stage_table(plan(pipeline_parallel_degree=4), FACTS))
    text = captured.get()
    assert text.count("█") > 4 and "27.3% of a step is bubble" in " ".join(text.split())
    assert [line.split("│")[1].strip() for line in text.splitlines() if "MiB" in line] == list("0123")
