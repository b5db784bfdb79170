"""Cases of the rules in `plan/rules/stages.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.plan.rules.jobs import CPU4, FACTORY, FACTS, LISTS, USERS_MODULE, case, staged


def mapped(*stages: int) -> dict[str, Any]:
    return staged(auto_partition=False, partition={f"layers.{i}": stage for i, stage in enumerate(stages)})


TOWERED = replace(FACTS, stages=replace(FACTS.stages, towers=("tower",), tower_blocks=1, first_blocks=2))
DRAWING = replace(FACTS, stages=replace(FACTS.stages, traced=True), draws_numbers=True)
SMALL = [{"sequences_per_step": 4, "until_samples": 8}]
CASES = {
    "traced-draws": case(
        {"parallel": {"pipeline_parallel_degree": 2, "pipeline": "simple"}, "training": {"microbatch_size": 1}},
        {"training": {"microbatch_size": 1}},
        "use pipeline_parallel_degree 1",
        facts=DRAWING,
    ),
    **{
        f"{key.replace('_', '-')}-without-stages": case(
            {"parallel": {key: value}}, staged(**beside, **{key: value}), key
        )
        for key, value, beside in (
            ("pipeline", "simple", {}),
            ("virtual_pipeline_degree", 2, {}),
            ("active_microbatches", 8, {}),
            ("auto_partition", False, {"default_partition": 0, "partition": {"layers.3": 1}}),
            ("memory_weight", 0.5, {}),
            ("default_partition", 0, {"auto_partition": False, "partition": {"layers.3": 1}}),
            ("partition", {"layers.3": 1}, {"auto_partition": False, "default_partition": 0}),
        )
    },
    "pipeline-model": case(staged(), staged(), "two lists", CPU4, LISTS, FACTS),
    "pipeline-loss": case(
        {**FACTORY, **staged()},
        {"model": {"factory": "a:b", "loss": "a:c"}, **staged()},
        "give model.loss",
        facts=replace(FACTS, **USERS_MODULE, head=None),
    ),
    "pipeline-blocks": case(
        staged(virtual_pipeline_degree=3), staged(virtual_pipeline_degree=2), "6 stages, and the model has 4 blocks"
    ),
    "virtual-simple": case(
        staged(virtual_pipeline_degree=2, pipeline="simple"),
        staged(virtual_pipeline_degree=2),
        "virtual_pipeline_degree 1",
    ),
    "virtual-v": case(
        staged(virtual_pipeline_degree=1, pipeline="zbv"), staged(pipeline="zbv"), "leave virtual_pipeline_degree out"
    ),
    "pipeline-microbatches": case(
        {**staged(), "training": {"gradient_accumulation": 1}},
        {**staged(pipeline="simple"), "training": {"gradient_accumulation": 1}},
        "use at least 2",
    ),
    "batch-size-pipeline": case(
        {**staged(), "training": {"microbatch_size": 2, "batch_size_schedule": SMALL}},
        {**staged(), "training": {"microbatch_size": 1, "batch_size_schedule": SMALL}},
        "has 1 microbatches of 2 on each rank, fewer than pipeline ranks; begin with at least 8 sequences",
    ),
    "virtual-microbatches": case(
        {**staged(virtual_pipeline_degree=2), "training": {"gradient_accumulation": 5, "microbatch_size": 1}},
        {**staged(virtual_pipeline_degree=2), "training": {"gradient_accumulation": 6, "microbatch_size": 1}},
        "5 microbatches do not divide into 2 turns",
    ),
    "active-microbatches": case(staged(active_microbatches=1), staged(active_microbatches=2), "use at least 2"),
    "partition-auto": case(staged(default_partition=0), staged(), "auto_partition false"),
    "memory-weight-given-stages": case(
        {"parallel": {**mapped(0, 0, 1, 1)["parallel"], "memory_weight": 0.5}}, mapped(0, 0, 1, 1), "as given"
    ),
    "partition-names": case(
        staged(auto_partition=False, partition={"layer.0": 0}),
        mapped(0, 0, 1, 1),
        "no block 'layer.0'; use names such as",
    ),
    "partition-stages": case(mapped(0, 0, 1), mapped(0, 0, 1, 1), "layers.3 is on none of the stages 0 to 1"),
    "partition-order": case(mapped(0, 1, 0, 1), mapped(0, 0, 0, 1), "stages [0, 1, 0, 1]"),
    "partition-towers": case(
        mapped(0, 1, 1, 1),
        mapped(0, 0, 1, 1),
        "tower must be on the first stage, with layers.1, and blocks up to it are on the stages [0, 1]",
        facts=TOWERED,
    ),
}
