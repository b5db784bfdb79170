"""Seconds of one block and microbatch on one rank, with the traffic that stays exposed; how far its host runs ahead.

A host launches kernels without waiting for them. Where it is quicker than its accelerator, launches queue up, of each
block the share 1 - host / device, until 1024 wait, from where on the host waits too. In a pipeline it waits earlier,
for messages (`Stack.pipeline_wait`); but for the forwards before the first backward, which need none. Two of these are
left out: with all of them, pipelines of two stages would run ahead, which by the memory that was measured of them they
do not. That is observed, not derived.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwise.job.axes import Axis, state_axes
from shardwise.planner.constants.hardware import Accelerator
from shardwise.planner.formulas.axis_traffic import block_elements, block_traffic
from shardwise.planner.formulas.communication import ExpertGroups, gather_seconds, overlapped_seconds, rank_group
from shardwise.planner.formulas.compute import (
    BYTES,
    KernelWork,
    block_work,
    checkpoint_bytes,
    kernels_of_block,
    recomputed_work,
)
from shardwise.planner.formulas.prediction import TrainingConfiguration
from shardwise.planner.formulas.unit_passes import block_passes

HOST_BANDWIDTH = 12e9  # bytes a second of one accelerator to its host; two of them share 16 lanes of PCIe 4
HOST_LINK = 0.75  # of the nominal rate of a link of its own
QUEUE = 1024  # launches that an accelerator keeps before its host has to wait


class BlockTime(NamedTuple):
    """Seconds of one block, a microbatch: forward, backward with recomputation, exposed traffic in either, and passes
    over its parameters and gradients (`unit_passes`)."""

    forward: KernelWork
    backward: KernelWork
    again: KernelWork
    traffic: dict[Axis, float]
    offload: float
    passes: float = 0.0

    @property
    def device(self) -> float:
        work = self.forward.device + self.backward.device + self.again.device + self.passes
        return work + sum(self.traffic.values()) + self.offload

    @property
    def host(self) -> float:
        return self.forward.host + self.backward.host + self.again.host


def block_time(configuration: TrainingConfiguration) -> BlockTime:
    """The mean block of `configuration`."""
    forward, backward = block_work(configuration)
    again = recomputed_work(configuration, forward)
    traffic = block_traffic(configuration)
    busy = (forward.device, backward.device + again.device)
    beside = {}
    if configuration.hides_exchange:
        beside[Axis.EXPERT] = sum(busy)
    if configuration.fused and configuration.sequence_parallel:
        beside[Axis.TENSOR] = forward.matmul + backward.matmul + again.matmul
    for axis, work in beside.items():
        traffic[axis] = overlapped_seconds(work, traffic[axis], configuration.stack.overlap) - work
    shard, offload = _shard(configuration, busy)
    if configuration.kept_blocks and configuration.reshard_after_forward:
        # The mean of all blocks, which are on one stage: with several, none is kept.
        waiting = _shard(replace(configuration, reshard_after_forward=False), busy)
        kept = configuration.kept_blocks / configuration.model.layers
        shard, offload = ((1 - kept) * one + kept * two for one, two in zip((shard, offload), waiting))
    traffic[Axis.SHARD] += shard
    return BlockTime(forward, backward, again, traffic, offload, block_passes(configuration))


def blocks_ahead(configuration: TrainingConfiguration, layer: BlockTime, blocks: int, forwards: float) -> float:
    """Forwards of blocks that wait in the accelerator's queue when the last of `forwards` microbatches, of `blocks` of
    them each, is launched; `forwards` are those that a rank runs before its first backward."""
    most = QUEUE / kernels_of_block(configuration)
    free = forwards if configuration.pipeline == 1 else max(0.0, forwards - 2)
    filling = blocks * free * max(0.0, 1 - layer.host / layer.device)
    if configuration.accumulation <= configuration.pipeline:
        return min(most, filling)
    # Neither's seconds are known well enough for a switch: none of the queue where the host takes twice as long as the
    # accelerator, and all of it where it is as quick.
    ratio = layer.device / (layer.host + message_waits(configuration))
    return min(most, max(filling, most * (2 * ratio - 1)))


def message_waits(configuration: TrainingConfiguration) -> float:
    """Seconds that a block's share of messages costs the host."""
    between = rank_group(configuration, Axis.PIPELINE).nodes > 1
    return configuration.tensor * configuration.stack.pipeline_wait if between else 0.0


def _shard(configuration: TrainingConfiguration, busy: tuple[float, float]) -> tuple[float, float]:
    """Exposed in one block and microbatch: (gathering and scattering of parameters, what goes to the host and back).

    Both hide behind the same computation, and share the way to the host's side of the machine.
    """
    exponent = configuration.stack.overlap
    traffic, host = _parameter_traffic(configuration), _host_traffic(configuration)
    shard = sum(overlapped_seconds(work, moved, exponent) - work for work, moved in zip(busy, traffic))
    both = sum(
        overlapped_seconds(work, moved + more, exponent) - work for work, moved, more in zip(busy, traffic, host)
    )
    return shard, both - shard


def _host_traffic(configuration: TrainingConfiguration) -> tuple[float, float]:
    """Seconds of (forward's, backward's) copies of a block between accelerator and host.

    Offloaded activations go there and come back. Of offloaded parameters the shard comes before each gathering,
    and its gradient goes (torch, CPUOffloadPolicy).
    """
    forward = backward = 0.0
    if configuration.offload_activations and configuration.checkpointing != "none":
        forward = backward = configuration.checkpointed * checkpoint_bytes(configuration)
    if configuration.host_optimizer:
        elements = block_elements(configuration).sharded(configuration)
        shard = configuration.model.stored * elements
        forward += shard
        backward += shard * configuration.reshard_after_forward + 4.0 * configuration.trained * elements
    bandwidth = host_bandwidth(configuration.cluster.accelerator)
    return forward / bandwidth, backward / bandwidth


def host_bandwidth(accelerator: Accelerator) -> float:
    """Return the bytes a second between an accelerator and its host, one direction."""
    own = accelerator.host_link
    return own * 1e9 * HOST_LINK if own else HOST_BANDWIDTH


def _parameter_traffic(configuration: TrainingConfiguration) -> tuple[float, float]:
    """Seconds of (forward's, backward's) gathering and scattering of a block's parameters."""
    if configuration.zero < 3 or configuration.degree(*state_axes()) == 1:
        return 0.0, 0.0
    elements, over = block_elements(configuration), rank_group(configuration, *state_axes())
    units = [(elements.shared, over)]
    if elements.own:
        units.append((elements.own, ExpertGroups.of(configuration).shards))
    size = 1 if configuration.gathers_float8 else BYTES[configuration.precision]
    reduced = configuration.trained * BYTES[configuration.reduction]
    algorithm = configuration.collectives
    parameters = sum(gather_seconds(count * size, ranks, algorithm) for count, ranks in units)
    scattering = "nccl" if algorithm == "smddp" else algorithm  # SMDDP's own are gathering and all-reduce
    gradients = sum(gather_seconds(count * reduced, ranks, scattering) for count, ranks in units)
    if configuration.whole_in_step:
        return parameters / configuration.accumulation, gradients / configuration.accumulation
    return parameters, gradients + (parameters if configuration.reshard_after_forward else 0.0)
