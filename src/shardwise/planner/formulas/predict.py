"""`predict`: a configuration's step time and memory by cause, from closed forms alone.

The slowest pipeline stage sets the pace: step = microbatches x its forward and backward + bubble + what happens once a
step (gradients' reduction, optimizer). Traffic joins the computation it can hide behind (`communication.join`):

- shard (ZeRO-3, FSDP2, MiCS; arXiv 1910.02054, 2205.00119): of a block, one all-gather beside forward, another and a
  reduce-scatter beside backward, each microbatch. Where the last blocks wait gathered for backward, which begins with
  them, their second all-gather is spared.
- replica: all-reduce of the shards, beside the last backward. ZeRO-0: all-reduce of all gradients there; ZeRO-1 and 2:
  reduce-scatter there, and all-gather of parameters after the optimizer.
- tensor (arXiv 1909.08053, section 3; 2205.05198, section 4.2.2): two all-reduces a block each way, or as many pairs of
  all-gather and reduce-scatter; exposed, but for `async_tensor`.
- context: keys and values gathered, their gradients scattered; exposed.
- pipeline: a hidden state each way a stage and microbatch; exposed.
- bubble: (p-1)/v stages' time (arXiv 2104.04473, sections 2.2.1 and 2.2.2); a third of it where the gradients of
  weights fill in (arXiv 2401.10241, section 2.2, forward and both halves of backward taken as equally long).
- launch: where the host is slower than the accelerator.
- stalls: of a pipeline whose allocator is full or whose whole gradients are reduced between nodes (`_stalls`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from shardwise.plan.draft import SPLIT_SCHEDULES, V_SCHEDULES
from shardwise.planner.formulas.communication import gather, group, join, message, reduce
from shardwise.planner.formulas.compute import BYTES, OPTIMIZER_BYTES, Work, head, optimizer_seconds, tokens_of
from shardwise.planner.formulas.footprint import host_bytes, stages
from shardwise.planner.formulas.layer import Layer, layer_of, waits
from shardwise.planner.formulas.prediction import EIGHTY, Configuration, Prediction

GIVEN_BACK = 1.05  # reserved bytes against those in use: an allocator that is full gives back what it only kept
HOST_MEMORY = 25e9  # bytes a second of host memory for one accelerator: 12 channels of DDR4-2933, 70 %, shared by 8
STRAGGLERS = 0.006  # a step waits for the slowest node; so much more with each doubling of the nodes
FULL = 0.9  # of the memory, from which an allocator has to free before it can allocate
HOST = 4.0  # exponent that joins host and accelerator


def predict(configuration: Configuration) -> Prediction:
    """Step time and memory of `configuration`.

    Nothing is checked for legality here; `shardwise.plan.plan.resolve` is.
    """
    layer, ends = layer_of(configuration), _ends(configuration)
    blocks, with_head = _slowest(configuration, layer.device, ends.device)
    m, p = configuration.accumulation, configuration.pipeline
    seconds = _causes(layer, ends, blocks, 1.0 if with_head else 0.0)
    seconds = {cause: m * value for cause, value in seconds.items()}
    seconds["launch"] = m * _launch(configuration, layer, ends, blocks)
    mean = (configuration.model.layers * layer.device + ends.device) / p
    seconds["pipeline"] = _pipeline(configuration) * (m + p - 1) if p > 1 else 0.0
    idle = 1 / 3 if configuration.schedule in SPLIT_SCHEDULES else 1.0
    seconds["bubble"] = idle * (p - 1) / configuration.virtual * max(mean, mean + seconds["launch"] / m)
    seconds |= _once(configuration, layer, blocks)
    seconds["shard"] += m * _root(configuration)
    memory = stages(configuration, layer)
    totals = [sum(causes.values()) for causes in memory]
    total, room = max(totals), math.exp(EIGHTY * configuration.stack.memory_spread)
    accelerator = configuration.cluster.accelerator
    seconds["stalls"] = _stalls(configuration, full=total > FULL * accelerator.memory_bytes)
    seconds["stragglers"] = STRAGGLERS * math.log2(configuration.cluster.nodes) * sum(seconds.values())
    step = sum(seconds.values())
    found = Prediction(
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
    width = math.exp(EIGHTY * math.hypot(stack.spread, stack.wait_spread * found.waits))
    return replace(found, interval=(step / width, step * width))


def _ends(configuration: Configuration) -> Work:
    forward, backward = head(configuration)
    return forward.plus(backward)


def _slowest(configuration: Configuration, layer: float, ends: float) -> tuple[int, bool]:
    """(blocks of the slowest stage, whether it has the head)."""
    layers, p = configuration.model.layers, configuration.pipeline
    if p == 1:
        return layers, True
    if not configuration.cuts_by_cost:
        return -(-layers // p), True
    best = (math.inf, layers, True)
    for last in range(layers // p + 1):
        rest = -(-(layers - last) // (p - 1))
        at_head, before = last * layer + ends, rest * layer
        best = min(best, (max(at_head, before), last if at_head >= before else rest, at_head >= before))
    return best[1], best[2]


def _causes(layer: Layer, ends: Work, blocks: int, heads: float) -> dict[str, float]:
    """Seconds of one microbatch on one stage."""
    both = layer.forward.plus(layer.backward)
    return {
        "matmul": blocks * both.matmul + heads * ends.matmul,
        "attention": blocks * both.attention,
        "memory_bound": blocks * both.memory_bound + heads * ends.memory_bound,
        "recomputation": blocks * layer.again.device,
        "tensor": blocks * layer.tensor,
        "context": blocks * layer.context,
        "shard": blocks * layer.shard,
        "offload": blocks * layer.offload,
    }


def _launch(configuration: Configuration, layer: Layer, ends: Work, blocks: int) -> float:
    """What a slow host adds to a microbatch."""
    device = blocks * layer.device + ends.device
    host = blocks * layer.host + ends.host
    host += blocks * waits(configuration)
    return join(device, host, HOST) - device


def _root(configuration: Configuration) -> float:
    """Exposed: what stands first and last, gathered before anything runs and scattered after everything has."""
    if configuration.zero < 3 or configuration.shard * configuration.context == 1:
        return 0.0
    over, size = group("shard", configuration), BYTES[configuration.precision] + BYTES[configuration.reduction]
    return gather(configuration.model.embedding_parameters / configuration.tensor * size, over)


def _pipeline(configuration: Configuration) -> float:
    """Messages of one microbatch at one rank."""
    size = float(tokens_of(configuration) * configuration.model.hidden * BYTES[configuration.precision])
    gathered = 0.0
    if configuration.sequence_parallel or configuration.scattered_messages:
        gathered = 0.0 if configuration.sequence_parallel else gather(size, group("tensor", configuration))
        size /= configuration.tensor
    return 2 * configuration.virtual * (message(size, group("pipeline", configuration)) + gathered)


def _stalls(configuration: Configuration, full: bool) -> float:
    """What a stack loses where something waits for the whole device in every microbatch of a pipeline.

    That is an allocator that is full and frees before it can allocate, and gradients that are not sharded and are
    reduced between nodes beside the stages' messages. The next stage waits with it: two waits of four stages and
    more.
    """
    p, data = configuration.pipeline, configuration.replica * configuration.shard * configuration.context
    reduced = configuration.zero == 0 and data > 1 and configuration.cluster.nodes > 1
    if p == 1 or not (full or reduced):
        return 0.0
    return configuration.accumulation * configuration.stack.stall * min(2.0, p / 2)


def _ends_meet(configuration: Configuration) -> bool:
    """Whether one rank has the first and the last stage."""
    return configuration.pipeline == 1 or configuration.schedule in V_SCHEDULES


def _once(configuration: Configuration, layer: Layer, blocks: int) -> dict[str, float]:
    """What happens once a step: reduction between replicas, optimizer."""
    model, exponent = configuration.model, configuration.stack.overlap
    ends = model.embedding_parameters * (1 if model.tied or not _ends_meet(configuration) else 2)
    elements = (blocks * model.layer_parameters + ends) / configuration.tensor
    parameter, reduction = BYTES[configuration.precision], BYTES[configuration.reduction]
    data = configuration.shard * configuration.context
    hidden = blocks * (layer.backward.device + layer.again.device)
    traffic, after = 0.0, 0.0
    if configuration.zero == 3:
        traffic = reduce(elements / data * reduction, group("replica", configuration))
    elif configuration.zero == 0:
        traffic = reduce(elements * reduction, group("data", configuration))
    else:
        over = group("shard", configuration)
        traffic = gather(elements * reduction, over)
        traffic += reduce(elements / data * reduction, group("replica", configuration))
        after = gather(elements * parameter, over)
    local = elements / data if configuration.zero else elements
    on_host = OPTIMIZER_BYTES * local / HOST_MEMORY
    return {
        "replica": join(hidden, traffic, exponent) - hidden + after,
        "optimizer": on_host if configuration.host_optimizer else optimizer_seconds(local, configuration),
    }
