"""`predict`: a configuration's step time and memory by cause, from closed forms alone.

The slowest pipeline stage sets the pace: step = microbatches x its forward and backward + bubble + what happens once a
step (gradients' reduction, optimizer). Traffic joins the computation it can hide behind (`communication.join`):

- traffic of each axis: `shardwise.planner.formulas.axis_traffic`. Of a block's parameters, one all-gather beside
  forward, another and a reduce-scatter beside backward, each microbatch. Where the last blocks wait gathered for
  backward, which begins with them, their second all-gather is spared.
- passes over parameters and gradients where one rank has all of them: `shardwise.planner.formulas.unit_passes`.
- bubble: (p-1)/v stages' time (arXiv 2104.04473, sections 2.2.1 and 2.2.2); a third of it where the gradients of
  weights fill in (arXiv 2401.10241, section 2.2, forward and both halves of backward taken as equally long).
- reference: the forward of a preference loss's reference, ahead of the step, with the bubble of forwards alone, and the
  loss's own first pass without gradients. Half of the blocks' traffic is forward's.
- offload: copies between accelerator and host, and updates in the host's memory, as far as they are exposed.
- copies: of the state into the host's memory, where `checkpoint.memory_every` keeps them; the step waits.
- launch: where the host is slower than the accelerator.
- stalls: of a pipeline whose allocator is full or whose whole gradients are reduced between nodes (`_stalls`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from shardwise.job.axes import Axis, data_axes
from shardwise.plan.draft import SPLIT_SCHEDULES
from shardwise.planner.formulas.axis_traffic import StageWork, elements_of_rank, step_traffic
from shardwise.planner.formulas.communication import overlapped_seconds, rank_group
from shardwise.planner.formulas.compute import OPTIMIZER_BYTES, KernelWork, head_work, optimizer_seconds, wide_rates
from shardwise.planner.formulas.footprint import has_head, host_bytes, stage_footprints, state_copy_bytes
from shardwise.planner.formulas.layer import BlockTime, block_time, host_bandwidth, message_waits
from shardwise.planner.formulas.prediction import EIGHTY, Prediction, TrainingConfiguration
from shardwise.planner.formulas.unit_passes import step_passes

GIVEN_BACK = 1.05  # reserved bytes against those in use: an allocator that is full gives back what it only kept
HOST_UPDATE_BYTES = 28.0  # of an element: Adam reads weight, gradient and states, and writes all but the gradient
KEPT_BYTES = 16.0  # of an element: its two states are read and written
HOST_MEMORY = 25e9  # bytes a second of host memory for one accelerator: 12 channels of DDR4-2933, 70 %, shared by 8
KEPT = 1.3e9  # bytes a second that a rank hashes and writes into its host's memory (one core, 2026-11-27)
STRAGGLERS = 0.006  # a step waits for the slowest node; so much more with each doubling of the nodes
FULL = 0.9  # of the memory, from which an allocator has to free before it can allocate
HOST = 4.0  # exponent that joins host and accelerator
# And in a forward with plain all-to-alls of experts' rows: the host waits for their numbers in each block, and runs
# ahead no more. Backward knows them, and exchanges with kernels of their own hand them over early.
COUNTED_HOST = 1.5


def predict(configuration: TrainingConfiguration) -> Prediction:
    """Return the step time and memory of `configuration`.

    Nothing is checked for legality here; `shardwise.plan.plan.resolve` is.
    """
    layer = block_time(configuration)
    memory = stage_footprints(configuration, layer)
    totals = [sum(causes.values()) for causes in memory]
    total, room = max(totals), math.exp(EIGHTY * configuration.stack.memory_spread)
    seconds = _seconds(configuration, layer, totals)
    step = sum(seconds.values())
    accelerator = configuration.cluster.accelerator
    prediction = Prediction(
        step_seconds=step,
        seconds=seconds,
        interval=(step, step),
        memory=memory[totals.index(total)],
        memory_interval=(total / room, total * room),
        host_bytes=host_bytes(configuration),
        stage_memory=tuple(totals),
        fits=total <= accelerator.memory_bytes,
        may_fit=total / GIVEN_BACK <= accelerator.memory_bytes,
        tokens=configuration.tokens,
        ranks=configuration.ranks,
        peak_tflops=accelerator.peak(configuration.precision) or accelerator.fp32,
        flops_per_token=configuration.model.flops_per_token(configuration.sequence),
    )
    stack = configuration.stack
    width = math.exp(EIGHTY * math.hypot(stack.spread, stack.wait_spread * prediction.waits))
    return replace(prediction, interval=(step / width, step * width))


def seconds_by_cause(configuration: TrainingConfiguration) -> dict[str, float]:
    """Return `Prediction.seconds` alone, without the memory that no second depends on."""
    layer = block_time(configuration)
    stalls = configuration.stack.stall > 0 and configuration.pipeline > 1
    stages = stage_footprints(configuration, layer) if stalls else []
    return _seconds(configuration, layer, [sum(causes.values()) for causes in stages])


def _seconds(configuration: TrainingConfiguration, layer: BlockTime, totals: Sequence[float]) -> dict[str, float]:
    ends = _ends(configuration)
    blocks, with_head = _slowest(configuration, layer.device, ends.device)
    m, p = configuration.accumulation, configuration.pipeline
    seconds = _causes(layer, ends, blocks, 1.0 if with_head else 0.0)
    seconds = {cause: m * value for cause, value in seconds.items()}
    seconds["launch"] = m * _launch(configuration, layer, ends, blocks)
    mean = (configuration.model.layers * layer.device + ends.device) / p
    idle = 1 / 3 if configuration.schedule in SPLIT_SCHEDULES else 1.0
    seconds["bubble"] = idle * (p - 1) / configuration.virtual * max(mean, mean + seconds["launch"] / m)
    seconds["memory_bound"] += step_passes(configuration, blocks)
    work = StageWork(blocks, blocks * (layer.backward.device + layer.again.device), blocks * layer.device)
    for axis, exposed in step_traffic(configuration, work).items():
        seconds[axis] += exposed
    seconds["optimizer"] = _optimizer(configuration, blocks)
    seconds["offload"] += _host_updates(configuration, work)
    seconds["copies"] = _copies(configuration, blocks)
    if configuration.reference:
        seconds["reference"] = (m + p - 1) * _reference(configuration, layer, blocks) + m * _head_forward(configuration)
    full = max(totals, default=0.0) > FULL * configuration.cluster.accelerator.memory_bytes
    seconds["stalls"] = _stalls(configuration, full)
    seconds["stragglers"] = STRAGGLERS * math.log2(configuration.cluster.nodes) * sum(seconds.values())
    return {cause: value * configuration.stack.step_factor for cause, value in seconds.items()}


def _ends(configuration: TrainingConfiguration) -> KernelWork:
    forward, backward = head_work(configuration)
    return forward.plus(backward)


def _slowest(configuration: TrainingConfiguration, layer: float, ends: float) -> tuple[int, bool]:
    """Return (blocks of the slowest stage, whether it has the head)."""
    layers, p = configuration.model.layers, configuration.pipeline
    if p == 1:
        return layers, True
    if configuration.rank_blocks:
        sizes = [(size, has_head(configuration, rank)) for rank, size in enumerate(configuration.rank_blocks)]
        return max(sizes, key=lambda rank: rank[0] * layer + rank[1] * ends)
    if not configuration.cuts_by_cost:
        return -(-layers // p), True
    best = (math.inf, layers, True)
    for last in range(layers // p + 1):
        rest = -(-(layers - last) // (p - 1))
        at_head, before = last * layer + ends, rest * layer
        best = min(best, (max(at_head, before), last if at_head >= before else rest, at_head >= before))
    return best[1], best[2]


def _causes(layer: BlockTime, ends: KernelWork, blocks: int, heads: float) -> dict[str, float]:
    """Return the seconds of one microbatch on one stage, by cause."""
    both = layer.forward.plus(layer.backward)
    return {
        "matmul": blocks * both.matmul + heads * ends.matmul,
        "attention": blocks * both.attention,
        "memory_bound": blocks * (both.memory_bound + layer.passes) + heads * ends.memory_bound,
        "recomputation": blocks * layer.again.device,
        **{str(axis): blocks * traffic for axis, traffic in layer.traffic.items()},
        "offload": blocks * layer.offload,
    }


def _reference(configuration: TrainingConfiguration, layer: BlockTime, blocks: int) -> float:
    """Return the seconds of a reference's forward of one microbatch on one stage."""
    device = blocks * (layer.forward.device + sum(layer.traffic.values()) / 2) + _head_forward(configuration)
    return overlapped_seconds(device, blocks * layer.forward.host, HOST)


def _head_forward(configuration: TrainingConfiguration) -> float:
    return head_work(configuration)[0].device


def _launch(configuration: TrainingConfiguration, layer: BlockTime, ends: KernelWork, blocks: int) -> float:
    """Return the seconds that a slow host adds to a microbatch."""
    device = blocks * layer.device + ends.device
    host = blocks * layer.host + ends.host
    host += blocks * message_waits(configuration)
    busy, launched = (blocks * part for part in _counted(configuration, layer))
    counted = overlapped_seconds(busy, launched, COUNTED_HOST)
    return counted + overlapped_seconds(device - busy, host - launched, HOST) - device


def _counted(configuration: TrainingConfiguration, layer: BlockTime) -> tuple[float, float]:
    """(accelerator's, host's) seconds of a block in which the host waits for the numbers of experts' rows."""
    known = configuration.captured == 1.0 or configuration.sorts_rows or configuration.drops_rows
    if configuration.expert == 1 or known:
        return 0.0, 0.0
    work = layer.forward.plus(layer.again) if configuration.checkpointing == "full" else layer.forward
    return work.device + layer.traffic[Axis.EXPERT] / 2, work.host


def _stalls(configuration: TrainingConfiguration, full: bool) -> float:
    """Return the seconds lost where something waits for the whole device in every microbatch of a pipeline.

    That is an allocator that is full and frees before it can allocate, and gradients that are not sharded and are
    reduced between nodes beside the stages' messages. The next stage waits with it: two waits of four stages and
    more.
    """
    p, data = configuration.pipeline, configuration.degree(*data_axes())
    reduced = configuration.zero == 0 and data > 1 and configuration.cluster.nodes > 1
    if p == 1 or not (full or reduced):
        return 0.0
    return configuration.accumulation * configuration.stack.stall * min(2.0, p / 2)


def _optimizer(configuration: TrainingConfiguration, blocks: int) -> float:
    """Return the seconds of the optimizer's update, once a step."""
    local = _trained_elements(configuration, blocks)
    if configuration.host_optimizer:
        return OPTIMIZER_BYTES * local / HOST_MEMORY
    updated = optimizer_seconds((1 - configuration.host_updates) * local, configuration)
    return updated + _orthogonalization(configuration)


def _orthogonalization(configuration: TrainingConfiguration) -> float:
    """Return the seconds of Muon's iterations: products of whole matrices, behind what a rank receives for them."""
    received, flops = configuration.orthogonalized
    axes = data_axes() if configuration.degree(*data_axes()) > 1 else (Axis.TENSOR,)
    over = rank_group(configuration, *axes)
    link = over.intra if over.nodes == 1 else over.inter
    return flops / wide_rates(configuration).flops + received / link


def _copies(configuration: TrainingConfiguration, blocks: int) -> float:
    """Return the seconds that copies of the state into the host's memory add to a step, in the mean."""
    if not configuration.kept_every:
        return 0.0
    size = state_copy_bytes(configuration, blocks)
    on_device = configuration.cluster.accelerator.name != "CPU"
    there = size / host_bandwidth(configuration.cluster.accelerator) if on_device else 0.0
    return (there + size / KEPT) / configuration.kept_every


def _trained_elements(configuration: TrainingConfiguration, blocks: int) -> float:
    """Return the elements that a rank updates."""
    elements = elements_of_rank(configuration, blocks)
    local = elements.sharded(configuration) if configuration.zero else sum(elements)
    return local * configuration.trained


def _host_updates(configuration: TrainingConfiguration, work: StageWork) -> float:
    """Return the seconds that updates in the host's memory add to a step (training/host_updates.py).

    Gradients and weights go there in fp32 beside the last backward, and weights come back. The update runs beside that
    backward too, where it does not wait for the norm, and then writes the state before it.
    """
    elements = configuration.host_updates * _trained_elements(configuration, work.blocks)
    if not elements:
        return 0.0
    link, exponent = host_bandwidth(configuration.cluster.accelerator), configuration.stack.overlap
    there, back = 8 * elements / link, 4 * elements / link
    update = HOST_UPDATE_BYTES * elements / HOST_MEMORY
    beside = there
    if configuration.updates_in_backward:
        beside, update = max(there, update + KEPT_BYTES * elements / HOST_MEMORY), 0.0
    exposed = overlapped_seconds(work.last_backward, beside, exponent) - work.last_backward
    return exposed + update + back
