"""Seconds of the traffic along each axis that no computation hides, in one table keyed by axis.

A new axis is a row here. Gathering and scattering of a block's parameters hides behind the block's computation, and is
in `shardwise.planner.formulas.layer`; the reduction of gradients between replicas hides behind the last backward.

- shard (ZeRO-3, FSDP2, MiCS; arXiv 1910.02054, 2205.00119): what stands first and last in the model is gathered before
  anything runs and scattered after everything has.
- replica: all-reduce of the shards, beside the last backward. ZeRO-0: all-reduce of all gradients there; ZeRO-1 and 2:
  reduce-scatter there, and all-gather of parameters after the optimizer.
- tensor (arXiv 1909.08053, section 3; 2205.05198, section 4.2.2): two all-reduces a block each way, or as many pairs of
  all-gather and reduce-scatter. All-reduces are exposed; of the pairs it depends on the stack, since they can be cut in
  pieces beside the product that needs them (`Stack.tensor_exposed`, `async_tensor`). Of fused kernels these join the
  block's products (`layer.block_time`). Where backward gathers both regions' inputs again (`own_regions`), that goes on
  beside the first product that it makes.
- context: keys and values gathered, their gradients scattered; exposed.
- pipeline: a hidden state each way a stage and microbatch; exposed.
- expert: rows to their experts and back, each way, paced by the fullest rank (`imbalance`); a stack may hide a share
  (`Stack.expert_exposed`). Their numbers go ahead in an exchange of their own, which is exposed. Where blocks
  are recomputed the forward's two are made again, unless their rows are kept (`keeps_expert_rows`); under selective
  checkpointing only in a stack that keeps products alone (`selective_exchanges`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardwise.job.axes import Axis, data_axes, replica_axes, state_axes
from shardwise.plan.draft import V_SCHEDULES
from shardwise.planner.formulas.communication import (
    ExpertGroups,
    RankGroup,
    all_reduce_seconds,
    exchange_seconds,
    gather_seconds,
    message_seconds,
    nodes_of_row,
    overlapped_seconds,
    rank_group,
)
from shardwise.planner.formulas.compute import BYTES, matmul_seconds, rates, tokens_of
from shardwise.planner.formulas.prediction import TrainingConfiguration

ASYNC = 0.6  # of tensor traffic that stays exposed when it is cut in pieces (torchtitan gains 9 and 10 % a step by it)


class StageWork(NamedTuple):
    """The slowest pipeline rank: its blocks, and the seconds of its last backward that a reduction can hide behind, and
    of a whole microbatch."""

    blocks: int
    last_backward: float
    microbatch: float


class AxisTraffic(NamedTuple):
    """Exposed seconds of one axis: of a block and microbatch, and of a step besides; None where there are none."""

    in_block: Callable[[TrainingConfiguration], float] | None = None
    in_step: Callable[[TrainingConfiguration, StageWork], float] | None = None


def _tensor(configuration: TrainingConfiguration) -> float:
    if configuration.tensor == 1:
        return 0.0
    over = rank_group(configuration, Axis.TENSOR)
    size = float(tokens_of(configuration) * configuration.model.hidden * BYTES[configuration.precision])
    if configuration.sequence_parallel:
        sizes = size, (size / 2 if configuration.precision == "fp8" else size)
        exchange = sum(gather_seconds(moved, over) for moved in sizes) * configuration.stack.tensor_exposed
    else:
        exchange = all_reduce_seconds(size, over)
    again = configuration.checkpointed if configuration.checkpointing == "full" else 0.0
    exposed = (4 + 2 * again) * exchange * (ASYNC if configuration.async_tensor else 1.0)
    if configuration.own_regions and configuration.sequence_parallel:
        exposed += _gathered_again(configuration, gather_seconds(size, over))
    return exposed


def _gathered_again(configuration: TrainingConfiguration, seconds: float) -> float:
    """Return what is exposed of gathering the inputs of attention and of a dense MLP, `seconds` each, in backward.

    Of attention with three products the value's comes first, of a gated MLP one of two.
    """
    model, tokens = configuration.model, tokens_of(configuration)
    speed = rates(configuration.cluster.accelerator, configuration.stack, configuration.precision)
    into, outputs = model.attention_products(configuration.tensor)[0]
    own = model.attention_width // configuration.tensor
    readers = [(outputs - own) // 2 if model.gated and not model.latent else outputs]
    # Of experts a router is left, which counts as a few features: less than one for each rank are none.
    readers += [width] if (width := model.dense_width // configuration.tensor) else []
    return sum(max(0.0, seconds - matmul_seconds(tokens, into, width, speed)) for width in readers)


def _context(configuration: TrainingConfiguration) -> float:
    if configuration.context == 1:
        return 0.0
    width = 2 * configuration.model.key_value_width / configuration.tensor
    size = configuration.microbatch * configuration.sequence * width * BYTES[configuration.precision]
    return 3 * gather_seconds(size, rank_group(configuration, Axis.CONTEXT))


def _exchange(configuration: TrainingConfiguration) -> float:
    if configuration.expert == 1:
        return 0.0
    sharing, model = ExpertGroups.of(configuration).sharing, configuration.model
    rows = model.experts_of_token * tokens_of(configuration) / configuration.tensor
    size = configuration.imbalance * rows * model.hidden * BYTES[configuration.precision]
    policies = ("full", "selective") if configuration.selective_exchanges else ("full",)
    recomputed = configuration.checkpointing in policies and not configuration.keeps_expert_rows
    again = configuration.checkpointed if recomputed else 0.0
    rounds = (4 + 2 * again) * exchange_seconds(size, sharing, _crossing(configuration, sharing.nodes))
    if configuration.copies_on_nodes and not configuration.hides_exchange:
        rounds *= configuration.stack.expert_exposed
    counts = 0.0 if configuration.drops_rows else exchange_seconds(8.0 * model.experts, sharing)
    return model.expert_layers * model.expert_stacks * (rounds + counts)


def _crossing(configuration: TrainingConfiguration, nodes: int) -> float:
    """Return the share of a row's copies for experts that cross the network."""
    model = configuration.model
    if not configuration.copies_on_nodes:
        return 1.0
    reached = nodes_of_row(nodes, model.experts_of_token, model.expert_groups, model.groups_of_token)
    return reached / model.experts_of_token


def _ends_sharded(configuration: TrainingConfiguration, work: StageWork) -> float:
    """Return the seconds of gathering and scattering what stands first and last, in all microbatches."""
    if configuration.zero < 3 or configuration.degree(*state_axes()) == 1:
        return 0.0
    over = rank_group(configuration, *state_axes())
    size = BYTES[configuration.precision] + BYTES[configuration.reduction]
    gather = gather_seconds(configuration.model.embedding_parameters / configuration.tensor * size, over)
    return configuration.accumulation * gather


def _messages(configuration: TrainingConfiguration, work: StageWork) -> float:
    """Return the seconds of the messages between stages, of all microbatches and the bubble's."""
    if configuration.pipeline == 1:
        return 0.0
    size = float(tokens_of(configuration) * configuration.model.hidden * BYTES[configuration.precision])
    gathered = 0.0
    if configuration.sequence_parallel or configuration.scattered_messages:
        gathered = (
            0.0 if configuration.sequence_parallel else gather_seconds(size, rank_group(configuration, Axis.TENSOR))
        )
        size /= configuration.tensor
    there_and_back = 2 * (message_seconds(size, rank_group(configuration, Axis.PIPELINE)) + gathered)
    if configuration.virtual == 1:
        return there_and_back * (configuration.accumulation + configuration.pipeline - 1)
    beside = overlapped_seconds(work.microbatch, configuration.virtual * there_and_back, configuration.stack.overlap)
    return configuration.accumulation * (beside - work.microbatch) + there_and_back * (configuration.pipeline - 1)


def _reduction(configuration: TrainingConfiguration, work: StageWork) -> float:
    """Return the exposed seconds of the reduction of gradients between replicas, once a step."""
    elements = elements_of_rank(configuration, work.blocks)
    state, replicas = rank_group(configuration, *state_axes()), rank_group(configuration, *replica_axes())
    whole = rank_group(configuration, *data_axes())
    traffic, after = _reduced(configuration, elements.shared, state, replicas, whole)
    if elements.own:
        groups = ExpertGroups.of(configuration)
        more, later = _reduced(configuration, elements.own, groups.shards, groups.copies, groups.copies)
        traffic, after = traffic + more, after + later
    return overlapped_seconds(work.last_backward, traffic, configuration.stack.overlap) - work.last_backward + after


def _reduced(
    configuration: TrainingConfiguration, elements: float, state: RankGroup, replicas: RankGroup, whole: RankGroup
) -> tuple[float, float]:
    """Return the seconds of reducing the gradients of `elements`, and of gathering parameters after the update.

    Args:
        configuration: whose ZeRO stage decides.
        elements: of one rank, before sharding.
        state: the ranks that shard them.
        replicas: those that hold the same shards.
        whole: all that have them where nothing is sharded.
    """
    reduced = elements * configuration.trained
    parameter, reduction = BYTES[configuration.precision], BYTES[configuration.reduction]
    if configuration.zero == 3:
        return all_reduce_seconds(reduced / state.ranks * reduction, replicas), 0.0
    if configuration.zero == 0:
        return all_reduce_seconds(reduced * reduction, whole), 0.0
    traffic = gather_seconds(reduced * reduction, state)
    traffic += all_reduce_seconds(reduced / state.ranks * reduction, replicas)
    return traffic, gather_seconds(elements * parameter, state)


class RankElements(NamedTuple):
    """Elements of one rank before sharding: those that all data ranks have, and of its own experts, if ranks share."""

    shared: float
    own: float

    def sharded(self, configuration: TrainingConfiguration) -> float:
        """Return how many of them lie on one rank that shards them."""
        return self.shared / configuration.degree(*state_axes()) + self.own / configuration.expert_shards


def block_elements(configuration: TrainingConfiguration) -> RankElements:
    """Return the elements of one block. Experts that ranks share are whole on a tensor rank."""
    model = configuration.model
    if configuration.expert == 1:
        return RankElements(model.layer_parameters / configuration.tensor, 0.0)
    return RankElements(
        (model.layer_parameters - model.stacked) / configuration.tensor, model.stacked / configuration.expert
    )


def elements_of_rank(configuration: TrainingConfiguration, blocks: int) -> RankElements:
    """Return the elements of `blocks` blocks and of what stands first and last, on one tensor rank."""
    model, block = configuration.model, block_elements(configuration)
    one_rank_has_both = configuration.pipeline == 1 or configuration.schedule in V_SCHEDULES
    ends = model.embedding_parameters * (1 if model.tied or not one_rank_has_both else 2)
    return RankElements(blocks * block.shared + ends / configuration.tensor, blocks * block.own)


# In the order in which they are shown.
AXIS_TRAFFIC: dict[Axis, AxisTraffic] = {
    Axis.SHARD: AxisTraffic(in_step=_ends_sharded),
    Axis.REPLICA: AxisTraffic(in_step=_reduction),
    Axis.TENSOR: AxisTraffic(in_block=_tensor),
    Axis.CONTEXT: AxisTraffic(in_block=_context),
    Axis.PIPELINE: AxisTraffic(in_step=_messages),
    Axis.EXPERT: AxisTraffic(in_block=_exchange),
}


def block_traffic(configuration: TrainingConfiguration) -> dict[Axis, float]:
    """Return the exposed seconds of each axis in one block and microbatch."""
    return {axis: row.in_block(configuration) if row.in_block else 0.0 for axis, row in AXIS_TRAFFIC.items()}


def step_traffic(configuration: TrainingConfiguration, work: StageWork) -> dict[Axis, float]:
    """Return the exposed seconds of each axis in a step, beside those of blocks."""
    return {axis: row.in_step(configuration, work) if row.in_step else 0.0 for axis, row in AXIS_TRAFFIC.items()}
