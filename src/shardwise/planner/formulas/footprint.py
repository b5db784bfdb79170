"""Peak memory of each pipeline rank by cause, from a TrainingConfiguration: a few sums, quick enough for a search.

`shardwise.planner.formulas.memory` follows FSDP2 allocation by allocation for a resolved Plan; this is what holds of
any stack. It counts what the allocator reserves, which is what trainers log, in the fuller of two moments: when the
loss turns round, and when the last block's backward begins.

States. Bytes a parameter: sharded (ZeRO-3) fp32 parameters, gradients and Adam's two states, 16 over the shard ranks;
else parameters and their copy in the compute dtype: 2 + those of reduced gradients + 12 of master weights and states,
of which ZeRO-1 shards the 12 and ZeRO-2 the gradients too (arXiv 1910.02054, section 3). A stack may hold gradients
in the compute dtype beside those that accumulate (`Stack.gradient_copy`), in the buckets of a reduction between data
ranks. Where a pipeline puts weight gradients off (zero bubble), parameters stay gathered and gradients whole until
the step's end.

Pools. torch's allocator keeps freed blocks for the stream they were made in (torch.cuda, "Memory management"), and
FSDP gathers and scatters in streams of its own. So ZeRO-3's flat buffers (the largest of a block's and of what stands
first and last, whose gathering is one) and gradient shards never share room with activations, at whatever moment.

Activations. A block keeps of each token (arXiv 2205.05198, section 4, in bytes of the compute dtype c, t tensor ranks,
all heads A wide, most often H): its two norms' inputs and the two linears' behind them 4cH, query, key, value and
result c(2A + 2K)/t, of latent attention the latents and what their norms read, scores (2c + 1)·heads·s/t without flash
attention, the MLP's inner tensors 2cI/t (gated 4cI/t), masks 2H. `half` keeps the results of every other matrix
product, torchtitan's rule: of query, value, gate and down (without gates: of query, key, value and up). Compiled, what
no backward reads is not kept, which down's result is. A stack may keep more (`Stack.activations`).

Pending. Tensor ranks make two partial results [T, H] of each block, whole on each rank, and hand them to a stream of
communication. torch's allocator did not give such a block out again, although it was free, before that stream had come
to it (torch.Tensor.record_stream; pytorch issues 76861 and 147168), and a host that is ahead of its accelerator
(`layer.blocks_ahead`) meanwhile takes others: as many as it is ahead, whatever t. A stack has `Stack.pending` of them,
none by default, since torch has stopped doing so.

Loss. `Stack.logit_bytes` a logit: 12 where logits, log-softmax and its gradient are three tensors in fp32; 10 where
tensor ranks share the vocabulary and the gradient is made in place (arXiv 1909.08053, section 3); 4 where a fused
kernel leaves logits and their gradient in the compute dtype.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from shardwise.job.axes import state_axes
from shardwise.plan.draft import SPLIT_SCHEDULES, V_SCHEDULES
from shardwise.planner.formulas.axis_traffic import RankElements, block_elements, elements_of_rank
from shardwise.planner.formulas.compute import BYTES, checkpoint_bytes, expert_rows, tokens_of
from shardwise.planner.formulas.layer import BlockTime, block_time, blocks_ahead
from shardwise.planner.formulas.prediction import ModelShape, TrainingConfiguration

GB = 10**9
COPIES = 2  # of the state in a host's memory (checkpoint/host_memory.py)
CHUNK = 1024  # rows of logits that a chunked loss holds
SHARED_LOGITS = 10.0  # bytes of a logit, at most, where tensor ranks share the vocabulary


def footprint(configuration: TrainingConfiguration) -> tuple[dict[str, float], list[float]]:
    """(bytes by cause on the fullest rank, bytes of each pipeline rank)."""
    stages = stage_footprints(configuration)
    totals = [sum(causes.values()) for causes in stages]
    return stages[totals.index(max(totals))], totals


def stage_footprints(configuration: TrainingConfiguration, layer: BlockTime | None = None) -> list[dict[str, float]]:
    """Bytes by cause of each pipeline rank. `layer` spares counting its seconds again, where they are needed."""
    kept = _activations(configuration)
    footprints = [_rank(configuration, rank, *kept) for rank in range(configuration.pipeline)]
    if configuration.stack.pending and configuration.tensor > 1:
        layer = layer or block_time(configuration)
        for rank, causes in enumerate(footprints):
            causes["pending"] = _pending(configuration, layer, rank)
    return footprints


def host_bytes(configuration: TrainingConfiguration) -> float:
    """Bytes of the host's memory of the rank that takes most: what offloading puts there, and copies of the state.

    Offloading puts parameters in fp32 there, of trained ones gradients, Adam's states and averages, and a frozen copy;
    of updates beside backward the states before too; inputs of checkpointed blocks.
    """
    size, largest = 0.0, 0.0
    if configuration.offload_activations and configuration.checkpointing != "none":
        size = configuration.checkpointed * checkpoint_bytes(configuration)
    for rank in range(configuration.pipeline):
        blocks = _blocks(configuration, rank)
        elements = _elements(configuration, rank)[0].sharded(configuration)
        trained = configuration.trained * elements
        copied, averaged = configuration.reference == "copy", configuration.averages
        stored = configuration.model.stored * (1 + copied) * elements
        states = configuration.host_optimizer * (stored + 4 * (3 + averaged) * trained)
        states += (16 + 8 * configuration.updates_in_backward) * configuration.host_updates * trained
        states += COPIES * state_copy_bytes(configuration, blocks)
        largest = max(largest, states + blocks * size * _in_flight(configuration, rank))
    return largest


def state_copy_bytes(configuration: TrainingConfiguration, blocks: int) -> float:
    """Bytes of a copy of a rank's state in its host's memory: parameters in fp32, Adam's states of the trained."""
    if not configuration.kept_every:
        return 0.0
    elements = elements_of_rank(configuration, blocks)
    whole, sharded = sum(elements), elements.sharded(configuration)
    parameters = sharded if configuration.zero == 3 else whole
    return 4.0 * parameters + 8.0 * configuration.trained * (sharded if configuration.zero else whole)


def _rank(configuration: TrainingConfiguration, rank: int, kept: float, working: float) -> dict[str, float]:
    blocks, last = _blocks(configuration, rank), has_head(configuration, rank)
    elements, ends = _elements(configuration, rank)
    causes = _states(configuration, elements.shared, configuration.degree(*state_axes()))
    if elements.own:
        own = _states(configuration, elements.own, configuration.expert_shards)
        causes = {cause: size + own[cause] for cause, size in causes.items()}
    causes |= _buffers(configuration, sum(elements), ends)
    causes["activations"] = configuration.stack.activations * kept * blocks * _in_flight(configuration, rank)
    logits = _logits(configuration) if last else 0.0
    causes["working"] = max(0.0, working - logits)
    causes["logits"] = logits
    causes["slack"] = configuration.stack.memory_gb * GB
    causes["pending"] = 0.0
    return causes


def has_head(configuration: TrainingConfiguration, rank: int) -> bool:
    """Return whether a pipeline rank has the head."""
    return rank == (0 if configuration.schedule in V_SCHEDULES else configuration.pipeline - 1)


def _elements(configuration: TrainingConfiguration, rank: int) -> tuple[RankElements, float]:
    """Return a pipeline rank's elements before sharding, and how many of them stand first and last in the model."""
    model, first, last = configuration.model, rank == 0, has_head(configuration, rank)
    ends = model.embedding_parameters * (1 if model.tied and first and last else first + last) / configuration.tensor
    blocks, block = _blocks(configuration, rank), block_elements(configuration)
    return RankElements(blocks * block.shared + ends, blocks * block.own), ends


def _pending(configuration: TrainingConfiguration, layer: BlockTime, rank: int) -> float:
    """Partial results that are free but not to be had, when the last forward before a backward is launched."""
    blocks, forwards = _blocks(configuration, rank), _in_flight(configuration, rank)
    row = tokens_of(configuration) * configuration.model.hidden * BYTES[configuration.precision]
    return configuration.stack.pending * blocks_ahead(configuration, layer, blocks, forwards) * 2.0 * row


def _blocks(configuration: TrainingConfiguration, rank: int) -> int:
    """Blocks of a pipeline rank; in a V it has a stage on the way down and one on the way up."""
    if configuration.rank_blocks:
        return configuration.rank_blocks[rank]
    model, p, by_cost = configuration.model, configuration.pipeline, configuration.cuts_by_cost
    if configuration.schedule not in V_SCHEDULES:
        return stage_blocks(model, p, by_cost)[rank]
    blocks = stage_blocks(model, 2 * p, by_cost)
    return blocks[rank] + blocks[-1 - rank]


@lru_cache(maxsize=4096)
def stage_blocks(model: ModelShape, pipeline: int, balanced: bool) -> tuple[int, ...]:
    """Blocks of each pipeline rank: equal shares, or of the whole cost, with the head's matrix products counted in.

    Shares of the cost are rounded up to whole blocks, stage after stage; where that costs the slowest stage more than
    equal shares of the blocks do, these are taken.
    """
    head = model.embedding_parameters / model.layer_parameters
    even = tuple(model.layers // pipeline + (rank < model.layers % pipeline) for rank in range(pipeline))
    if not balanced:
        return even
    cost = model.layers + head
    ends = [min(model.layers, math.ceil(cost * (rank + 1) / pipeline)) for rank in range(pipeline - 1)]
    bounds = [0, *ends, model.layers]
    by_cost = tuple(end - start for start, end in pairwise(bounds))
    return min((by_cost, even), key=lambda blocks: max((*blocks[:-1], blocks[-1] + head)))


def _in_flight(configuration: TrainingConfiguration, rank: int) -> float:
    """Microbatches whose activations a rank holds (arXiv 2205.05198, section 4.2.3)."""
    p, v, m = configuration.pipeline, configuration.virtual, configuration.accumulation
    if p == 1:
        return 1.0
    if configuration.schedule == "simple":
        return float(m)
    if configuration.schedule in V_SCHEDULES:  # arXiv 2401.10241, section 6: a forward of each stage
        return min(float(m), p + (configuration.schedule == "dualpipev") / 2)
    if v > 1:
        return min(float(m), (p - rank) + (p - 1) / v)
    return float(min(m, p - rank))


def _states(configuration: TrainingConfiguration, elements: float, data: int) -> dict[str, float]:
    """Return the bytes of parameters, gradients, optimizer state and a frozen copy of `elements` over `data` ranks."""
    states = _trained_states(configuration, elements, data)
    if configuration.averages and not configuration.host_optimizer:
        states["ema"] = 4 * elements * configuration.trained / (data if configuration.zero else 1)
    if configuration.reference != "copy" or configuration.host_optimizer:
        return states
    stored = configuration.model.stored * elements
    return states | {"reference": stored / (data if configuration.zero == 3 else 1)}


def _trained_states(configuration: TrainingConfiguration, elements: float, data: int) -> dict[str, float]:
    """Return the same without the copy."""
    kept = 1 - configuration.host_updates
    if configuration.zero == 3:
        of_rank = elements / data
        updated = of_rank * configuration.trained
        states = {
            "parameters": configuration.model.stored * of_rank,
            "gradients": 4 * updated,
            "optimizer": 8 * kept * updated,
        }
        return dict.fromkeys(states, 0.0) if configuration.offload_parameters else states
    size = BYTES[configuration.precision]
    master = 4 if size < 4 else 0
    gradients = BYTES[configuration.reduction] + (
        configuration.stack.gradient_copy if data * configuration.replica > 1 else 0.0
    )
    return {
        "parameters": size * elements,
        "gradients": gradients * elements * configuration.trained / (data if configuration.zero == 2 else 1),
        "optimizer": (8 * kept * configuration.trained + master) * elements / (data if configuration.zero else 1),
    }


def _buffers(configuration: TrainingConfiguration, elements: float, ends: float) -> dict[str, float]:
    """ZeRO-3's parameters and gradients that are whole, and its flat buffers.

    Gathered: the ends and two blocks, or those that wait for backward. Communication: the flat buffers of the largest
    gathering and the largest reduction, and the gradients of a block. Backwards in two halves: everything gathered, all
    gradients whole.
    """
    if configuration.zero < 3:
        return {"gathered": 0.0, "communication": 0.0}
    size, reduction = BYTES[configuration.precision], BYTES[configuration.reduction]
    layer = sum(block_elements(configuration))
    if configuration.whole_in_step or (configuration.schedule in SPLIT_SCHEDULES and configuration.pipeline > 1):
        return {"gathered": size * elements, "communication": reduction * elements}
    flat = (size + reduction) * max(layer, ends)
    waiting = configuration.kept_blocks * layer if configuration.reshard_after_forward else elements - ends
    return {"gathered": size * (max(2 * layer, waiting) + ends), "communication": size * layer + flat}


def _logits(configuration: TrainingConfiguration) -> float:
    """Bytes while the loss turns round."""
    tokens, shared = tokens_of(configuration), configuration.tensor > 1
    rows = min(tokens, CHUNK) if configuration.chunked_loss else tokens
    size = configuration.stack.logit_bytes
    return rows * configuration.model.vocabulary / configuration.tensor * (min(size, SHARED_LOGITS) if shared else size)


def _activations(configuration: TrainingConfiguration) -> tuple[float, float]:
    """(kept of a block between forward and backward, held besides at the worst moment of a backward)."""
    model, t = configuration.model, configuration.tensor
    tokens, size = tokens_of(configuration), BYTES[configuration.precision]
    row = float(tokens * model.hidden * size)
    between = row / t if configuration.sequence_parallel else row
    masks = 2 * between / size if configuration.dropout else 0.0
    key_value = 2 * tokens * model.key_value_width * size / t
    heads = tokens * configuration.sequence * model.heads / t
    scores = 0.0 if configuration.flash else heads * ((2 * size + 1) if configuration.dropout else size)
    inner = (4 if model.gated else 2) * tokens * model.dense_width * size / t
    experts = _experts(configuration) * size
    query = tokens * model.attention_width * size / t
    latents = 2 * tokens * size * (model.latent.query + model.latent.key_value) if model.latent else 0
    products = 2 * query + key_value + latents + inner
    whole = 4 * between + masks + scores + products + experts
    fraction = configuration.checkpointed if configuration.checkpointing != "none" else 0.0
    up = tokens * model.intermediate * size / t
    kept_by_policy = {
        "full": between,
        "attention": whole - scores,
        "selective": 2 * (query + row / t) + (2 if model.gated else 1) * up + key_value + between,
        "half": _half(configuration, query, key_value, up, row) + row / t + between,
    }
    kept = kept_by_policy.get(configuration.checkpointing, whole)
    if configuration.keeps_expert_rows:
        kept += 2 * model.expert_layers * expert_rows(configuration) * model.hidden * size
    if configuration.checkpointing != "none" and configuration.offload_activations:
        kept -= between
    recomputed = (whole - kept) if fraction else 0.0
    return fraction * kept + (1 - fraction) * whole, recomputed + 2 * row + inner / 2


def _experts(configuration: TrainingConfiguration) -> float:
    """Numbers that stacked experts keep: the inner ones of each row, the row itself, and its result."""
    model = configuration.model
    wide = model.expert_width if configuration.expert > 1 else model.expert_width / configuration.tensor
    of_row = (4 if model.gated else 2) * wide + 2 * model.hidden
    return model.expert_layers * expert_rows(configuration) * of_row


def _half(configuration: TrainingConfiguration, query: float, key_value: float, up: float, down: float) -> float:
    """Results of every other matrix product of a block: query, value, gate, down; or query, key, value in one, and up.

    Down's, the last, is read by no backward.
    """
    if not configuration.model.gated:
        return query + key_value + up
    return query + key_value / 2 + up + (0.0 if configuration.compile else down)
