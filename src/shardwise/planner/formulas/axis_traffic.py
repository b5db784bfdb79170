"""Seconds of the traffic along each axis that no computation hides, in one table keyed by axis.

A new axis is a row here. Gathering and scattering of a block's parameters hides behind the block's computation, and is
in `shardwise.planner.formulas.layer`; the reduction of gradients between replicas hides behind the last backward.

- shard (ZeRO-3, FSDP2, MiCS; arXiv 1910.02054, 2205.00119): what stands first and last in the model is gathered before
  anything runs and scattered after everything has.
- replica: all-reduce of the shards, beside the last backward. ZeRO-0: all-reduce of all gradients there; ZeRO-1 and 2:
  reduce-scatter there, and all-gather of parameters after the optimizer.
- tensor (arXiv 1909.08053, section 3; 2205.05198, section 4.2.2): two all-reduces a block each way, or as many pairs of
  all-gather and reduce-scatter; exposed, but for `async_tensor`.
- context: keys and values gathered, their gradients scattered; exposed.
- pipeline: a hidden state each way a stage and microbatch; exposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.job.axes import Axis, data_axes, replica_axes, state_axes
from shardwise.plan.draft import V_SCHEDULES
from shardwise.planner.formulas.communication import gather, group, join, message, reduce
from shardwise.planner.formulas.compute import BYTES, tokens_of
from shardwise.planner.formulas.prediction import Configuration

ASYNC = 0.6  # of tensor traffic that stays exposed when it is cut in pieces (torchtitan gains 9 and 10 % a step by it)


class StageWork(NamedTuple):
    """The slowest pipeline rank: its blocks, and the seconds of its last backward that a reduction can hide behind."""

    blocks: int
    last_backward: float


class AxisTraffic(NamedTuple):
    """Exposed seconds of one axis: of a block and microbatch, and of a step besides; None where there are none."""

    in_block: Callable[[Configuration], float] | None = None
    in_step: Callable[[Configuration, StageWork], float] | None = None


def _tensor(configuration: Configuration) -> float:
    if configuration.tensor == 1:
        return 0.0
    over = group(configuration, Axis.TENSOR)
    size = float(tokens_of(configuration) * configuration.model.hidden * BYTES[configuration.precision])
    one = 2 * gather(size, over) if configuration.sequence_parallel else reduce(size, over)
    again = configuration.checkpointed if configuration.checkpointing == "full" else 0.0
    return (4 + 2 * again) * one * (ASYNC if configuration.async_tensor else 1.0)


def _context(configuration: Configuration) -> float:
    if configuration.context == 1:
        return 0.0
    width = 2 * configuration.model.key_value_width / configuration.tensor
    size = configuration.microbatch * configuration.sequence * width * BYTES[configuration.precision]
    return 3 * gather(size, group(configuration, Axis.CONTEXT))


def _ends_sharded(configuration: Configuration, work: StageWork) -> float:
    """Return the seconds of gathering and scattering what stands first and last, in all microbatches."""
    if configuration.zero < 3 or configuration.degree(*state_axes()) == 1:
        return 0.0
    over = group(configuration, *state_axes())
    size = BYTES[configuration.precision] + BYTES[configuration.reduction]
    one = gather(configuration.model.embedding_parameters / configuration.tensor * size, over)
    return configuration.accumulation * one


def _messages(configuration: Configuration, work: StageWork) -> float:
    """Return the seconds of the messages between stages, of all microbatches and the bubble's."""
    if configuration.pipeline == 1:
        return 0.0
    size = float(tokens_of(configuration) * configuration.model.hidden * BYTES[configuration.precision])
    gathered = 0.0
    if configuration.sequence_parallel or configuration.scattered_messages:
        gathered = 0.0 if configuration.sequence_parallel else gather(size, group(configuration, Axis.TENSOR))
        size /= configuration.tensor
    one = 2 * configuration.virtual * (message(size, group(configuration, Axis.PIPELINE)) + gathered)
    return one * (configuration.accumulation + configuration.pipeline - 1)


def _reduction(configuration: Configuration, work: StageWork) -> float:
    """Return the exposed seconds of the reduction of gradients between replicas, once a step."""
    elements = elements_of_rank(configuration, work.blocks)
    parameter, reduction = BYTES[configuration.precision], BYTES[configuration.reduction]
    shards, after = configuration.degree(*state_axes()), 0.0
    if configuration.zero == 3:
        traffic = reduce(elements / shards * reduction, group(configuration, *replica_axes()))
    elif configuration.zero == 0:
        traffic = reduce(elements * reduction, group(configuration, *data_axes()))
    else:
        over = group(configuration, *state_axes())
        traffic = gather(elements * reduction, over)
        traffic += reduce(elements / shards * reduction, group(configuration, *replica_axes()))
        after = gather(elements * parameter, over)
    return join(work.last_backward, traffic, configuration.stack.overlap) - work.last_backward + after


def elements_of_rank(configuration: Configuration, blocks: int) -> float:
    """Return the elements of `blocks` blocks and of what stands first and last, on one tensor rank."""
    model = configuration.model
    one_rank_has_both = configuration.pipeline == 1 or configuration.schedule in V_SCHEDULES
    ends = model.embedding_parameters * (1 if model.tied or not one_rank_has_both else 2)
    return (blocks * model.layer_parameters + ends) / configuration.tensor


# In the order in which they are shown.
AXIS_TRAFFIC: dict[Axis, AxisTraffic] = {
    Axis.SHARD: AxisTraffic(in_step=_ends_sharded),
    Axis.REPLICA: AxisTraffic(in_step=_reduction),
    Axis.TENSOR: AxisTraffic(in_block=_tensor),
    Axis.CONTEXT: AxisTraffic(in_block=_context),
    Axis.PIPELINE: AxisTraffic(in_step=_messages),
}


def block_traffic(configuration: Configuration) -> dict[Axis, float]:
    """Return the exposed seconds of each axis in one block and microbatch."""
    return {axis: row.in_block(configuration) if row.in_block else 0.0 for axis, row in AXIS_TRAFFIC.items()}


def step_traffic(configuration: Configuration, work: StageWork) -> dict[Axis, float]:
    """Return the exposed seconds of each axis in a step, beside those of blocks."""
    return {axis: row.in_step(configuration, work) if row.in_step else 0.0 for axis, row in AXIS_TRAFFIC.items()}
