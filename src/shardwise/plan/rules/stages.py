"""Rules about pipeline stages: whether the model can be cut, where it is cut, and what the schedule needs."""

from __future__ import annotations

from itertools import pairwise

from shardwise.job.axes import Axis
from shardwise.plan.draft import Draft, stages_of_a_rank
from shardwise.plan.rules.rule import Rule, idle
from shardwise.words import listed, nearest

DEGREE, VIRTUAL = "parallel.pipeline_parallel_degree", "parallel.virtual_pipeline_degree"
MAP, DEFAULT, AUTO = "parallel.partition", "parallel.default_partition", "parallel.auto_partition"
COUNT = "training.gradient_accumulation"


def one_stage(d: Draft) -> bool:
    """Return whether there is one pipeline stage."""
    return d.parallel.pipeline_parallel_degree == 1


def _unknown(d: Draft) -> list[str]:
    names = {block.name for block in d.facts.blocks}
    return [name for name in d.parallel.partition if name not in names]


def _cuttable(d: Draft) -> int:
    """Blocks that can start or end a stage: not those that the first stage has together."""
    return len(d.facts.blocks) - max(0, d.facts.stages.first_blocks - 1)


def _unplaced(d: Draft) -> list[str]:
    return [block.name for block, stage in zip(d.facts.blocks, d.partition) if not 0 <= stage < d.stages]


def _too_few(d: Draft) -> bool:
    return not one_stage(d) and d.parallel.pipeline != "simple" and d.accumulation.value < _fewest(d)


def _too_few_at_first(d: Draft) -> bool:
    return not one_stage(d) and d.parallel.pipeline != "simple" and d.accumulations[0] < _fewest(d)


def _fewest(d: Draft) -> int:
    """Microbatches that a schedule needs: in a V one for each stage, else one for each rank."""
    return d.stages if d.in_v else d.parallel.pipeline_parallel_degree


def _takes_turns(d: Draft) -> bool:
    turns = stages_of_a_rank(d.parallel) > 1 or d.parallel.pipeline == "zero_bubble"
    return turns and not one_stage(d) and not d.in_v


def _rounds(d: Draft, count: int) -> int:
    """Turns in which a schedule of virtual stages takes `count` microbatches."""
    return max(1, count // d.parallel.pipeline_parallel_degree)


def _uneven(d: Draft) -> list[int]:
    """Numbers of microbatches, one for each stage of the batch size at most, that do not divide into their turns."""
    return [count for count in reversed(d.accumulations) if count % _rounds(d, count)]


def _why_not_cut(d: Draft) -> str:
    """Return the reason with a user's class and its line, of which it may speak already."""
    reason, definition = d.facts.supports(Axis.PIPELINE).reason, d.facts.definition
    return reason if d.facts.has_config or not definition or definition in reason else f"{definition}: {reason}"


# fmt: off
RULES: tuple[Rule, ...] = (
    *(idle(f"{key.rpartition('.')[2].replace('_', '-')}-without-stages", key, "there is one pipeline stage", one_stage)
      for key in ("parallel.pipeline", VIRTUAL, "parallel.active_microbatches", AUTO, "parallel.memory_weight", DEFAULT,
                  MAP)),
    Rule("pipeline-model", (DEGREE,), "the model has to be a chain of blocks, or one that torch can trace and cut",
         lambda d: not one_stage(d) and not d.facts.supports(Axis.PIPELINE).ok,
         fix="use 1",
         because=lambda d: _why_not_cut(d)),
    Rule("pipeline-loss", (DEGREE, "model.loss"), "the loss of a module of model.factory is taken on the last stage",
         lambda d: not one_stage(d) and d.facts.computes_own_loss and d.model.loss is None,
         fix="give model.loss, a function of output and batch, or use pipeline_parallel_degree 1"),
    Rule("pipeline-blocks", (DEGREE, VIRTUAL), "every stage has a block",
         lambda d: not one_stage(d) and d.stages > _cuttable(d),
         fix="use fewer stages",
         because=lambda d: f"{d.stages} stages, and the model has {_cuttable(d)} blocks",
         use=lambda d: f"use a product of at most {len(d.facts.blocks)}"),
    Rule("virtual-simple", ("parallel.pipeline", VIRTUAL), "only the interleaved schedule takes turns",
         lambda d: d.parallel.pipeline == "simple" and stages_of_a_rank(d.parallel) > 1,
         fix="use pipeline interleaved, or virtual_pipeline_degree 1"),
    Rule("virtual-v", ("parallel.pipeline", VIRTUAL), "stages that go down the ranks and up again are two on each rank",
         lambda d: d.in_v and stages_of_a_rank(d.parallel) != 2,
         fix="leave virtual_pipeline_degree out, or use pipeline zero_bubble"),
    Rule("traced-draws", (DEGREE,), "a forward that is cut by a trace runs in parts, each of which would draw anew",
         lambda d: d.facts.stages.traced and d.facts.draws_numbers and not one_stage(d),
         fix="hand on one tensor from block to block, or use pipeline_parallel_degree 1",
         because=lambda d: f"{d.facts.definition} or its loss draws random numbers, and its blocks are no chain"),
    Rule("pipeline-microbatches", (DEGREE, "parallel.pipeline", COUNT),
         "interleaved stages need a microbatch for every rank, those of zbv and dualpipev one for every stage",
         _too_few,
         fix="use as many microbatches as pipeline ranks (in a V: stages) or more, or pipeline simple",
         because=lambda d: f"a step has {d.accumulation.value} microbatches on each rank, fewer than pipeline "
         f"{'stages' if d.in_v else 'ranks'}",
         use=lambda d: f"use at least {_fewest(d)} (and training.sequences_per_step to hold "
         "them), or parallel.pipeline simple"),
    Rule("batch-size-pipeline", ("training.batch_size_schedule", DEGREE, "parallel.pipeline"),
         "a pipeline needs as many microbatches at every stage of the batch size as at the last",
         _too_few_at_first,
         fix="begin with more sequences a step, or use a smaller microbatch or pipeline simple",
         because=lambda d: f"a step of {d.step_sizes.sizes[0]} sequences has {d.accumulations[0]} "
         f"microbatches of {d.microbatch.value} on each rank, fewer than pipeline "
         f"{'stages' if d.in_v else 'ranks'}",
         use=lambda d: f"begin with at least {_fewest(d) * d.microbatch.value * d.data_ranks} sequences a step, or use "
         "a smaller training.microbatch_size or parallel.pipeline simple"),
    Rule("virtual-microbatches", (VIRTUAL, "parallel.pipeline", COUNT),
         "virtual stages, and zero_bubble, take the microbatches in equal turns",
         lambda d: _takes_turns(d) and _uneven(d),
         fix="use a multiple of parallel.pipeline_parallel_degree",
         because=lambda d: f"{_uneven(d)[0]} microbatches do not divide into {_rounds(d, _uneven(d)[0])} turns",
         use=lambda d: f"use a multiple of {d.parallel.pipeline_parallel_degree}"
         + (", at every stage of training.batch_size_schedule" if d.step_sizes.grow else "")),
    Rule("active-microbatches", ("parallel.active_microbatches", "parallel.pipeline"),
         "the schedule has to be able to keep within it",
         lambda d: not one_stage(d) and (d.parallel.active_microbatches or d.in_flight) < d.in_flight,
         fix="use a larger number, or pipeline interleaved",
         because=lambda d: f"the schedule keeps {d.in_flight} forwards in flight",
         use=lambda d: f"use at least {d.in_flight}"),
    Rule("partition-auto", (AUTO, MAP, DEFAULT), "stages are cut automatically or as given",
         lambda d: d.parallel.auto_partition and (d.parallel.partition or d.parallel.default_partition is not None),
         fix="use auto_partition false, or leave partition and default_partition out"),
    idle("memory-weight-given-stages", "parallel.memory_weight", "stages are cut as given",
         lambda d: not d.parallel.auto_partition),
    Rule("partition-names", (MAP,), "its keys are names of blocks", _unknown,
         fix="use names of blocks",
         because=lambda d: f"the model has no block {_unknown(d)[0]!r}",
         use=lambda d: f"use names such as {d.facts.blocks[0].name if d.facts.blocks else ''!r}."
         + nearest(_unknown(d)[0], [block.name for block in d.facts.blocks])),
    Rule("partition-stages", (AUTO, MAP, DEFAULT), "every block is on one of the stages",
         lambda d: not one_stage(d) and _unplaced(d),
         fix="give every block a stage, or a default_partition",
         because=lambda d: f"{_unplaced(d)[0]} is on none of the stages 0 to {d.stages - 1}"),
    Rule("partition-order", (AUTO, MAP, DEFAULT), "stages follow each other as the blocks do, and none is empty",
         lambda d: not one_stage(d) and (any(later < earlier for earlier, later in pairwise(d.partition))
                                          or len(set(d.partition)) < d.stages),
         fix="use a map whose stages never decrease and that leaves none out",
         because=lambda d: f"the blocks are on the stages {d.partition}"),
    Rule("partition-towers", (AUTO, MAP, DEFAULT), "towers stand on the first stage, with the first block behind them",
         lambda d: not one_stage(d) and any(d.partition[: d.facts.stages.first_blocks]),
         fix="use a map with stage 0 for these",
         because=lambda d: f"{listed(d.facts.stages.towers)} must be on the first stage, with "
         f"{d.facts.blocks[d.facts.stages.first_blocks - 1].name}, and blocks up to it are on the stages "
         f"{d.partition[: d.facts.stages.first_blocks]}"),
)
# fmt: on
