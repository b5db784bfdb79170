"""Peak memory of each pipeline rank by cause, from a Configuration: a few sums, quick enough for a search.

`shardwise.planner.memory` follows FSDP2 allocation by allocation for a resolved Plan; this is what holds of any
stack. Bytes a parameter: sharded (ZeRO-3) fp32 parameters, gradients and Adam's two states, 16 over the shard ranks;
else parameters and their copy in the compute dtype: 2 + 4 of gradients + 12 of master weights and states, of which
ZeRO-1 shards the 12 and ZeRO-2 the gradients too (arXiv 1910.02054, section 3). A block keeps of each token
(arXiv 2205.05198, section 4, in bytes of the compute dtype c, T tokens, t tensor ranks): its two norms' inputs and the
two linears' behind them 4cH, query, key, value and result c(2H + 2K)/t, scores (2c + 1)·heads·s/t without flash
attention, the MLP's inner tensors 2cI/t (gated 4cI/t), masks 2H. A stack may keep more (`Stack.activations`) and hold
gradients in the compute dtype beside those that accumulate (`Stack.gradient_copy`).
"""

from __future__ import annotations

from shardwise.draft import V_SCHEDULES
from shardwise.planner.compute import BYTES, tokens_of
from shardwise.planner.prediction import Configuration

GB = 10**9
CHUNK = 1024  # rows of logits that a chunked loss holds


def footprint(configuration: Configuration) -> tuple[dict[str, float], list[float]]:
    """(bytes by cause on the fullest rank, bytes of each pipeline rank)."""
    found = [_rank(configuration, rank) for rank in range(configuration.pipeline)]
    totals = [sum(causes.values()) for causes in found]
    return found[totals.index(max(totals))], totals


def _rank(configuration: Configuration, rank: int) -> dict[str, float]:
    model, t, p = configuration.model, configuration.tensor, configuration.pipeline
    blocks = _blocks(configuration, rank)
    in_v = configuration.schedule in V_SCHEDULES
    first, last = rank == 0, rank == (0 if in_v else p - 1)
    ends = model.embedding_parameters * (1 if model.tied and first and last else first + last)
    elements = (blocks * model.layer_parameters + ends) / t
    causes = _states(configuration, elements) | _buffers(configuration, ends / t)
    kept, working = _activations(configuration)
    causes["activations"] = configuration.stack.activations * kept * blocks * _in_flight(configuration, rank)
    causes["working"] = working
    rows = min(tokens_of(configuration), CHUNK) if configuration.chunked_loss else tokens_of(configuration)
    logits = rows * model.vocabulary / t if last else 0.0
    causes["logits"] = logits * (BYTES[configuration.precision] + 8)
    causes["slack"] = configuration.stack.memory_gb * GB
    return causes


def _blocks(configuration: Configuration, rank: int) -> int:
    layers, p = configuration.model.layers, configuration.pipeline
    return layers // p + (rank < layers % p)


def _in_flight(configuration: Configuration, rank: int) -> float:
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


def _states(configuration: Configuration, elements: float) -> dict[str, float]:
    data = configuration.shard * configuration.context
    if configuration.zero == 3:
        each = elements / data
        states = {"parameters": 4 * each, "gradients": 4 * each, "optimizer": 8 * each}
        return dict.fromkeys(states, 0.0) if configuration.offload_parameters else states
    size = BYTES[configuration.precision]
    master = 4 if size < 4 else 0
    gradients = 4 + configuration.stack.gradient_copy
    return {
        "parameters": size * elements,
        "gradients": gradients * elements / (data if configuration.zero == 2 else 1),
        "optimizer": (8 + master) * elements / (data if configuration.zero else 1),
    }


def _buffers(configuration: Configuration, ends: float) -> dict[str, float]:
    """ZeRO-3's gathered blocks: two and their flat buffers, the ends, and the gradients of one being reduced."""
    if configuration.zero < 3:
        return {"gathered": 0.0, "communication": 0.0}
    size, reduction = BYTES[configuration.precision], BYTES[configuration.reduction]
    one = configuration.model.layer_parameters / configuration.tensor
    return {"gathered": size * (2 * one + ends), "communication": size * one + (reduction + size) * one}


def _activations(configuration: Configuration) -> tuple[float, float]:
    """(kept of a block between forward and backward, held besides at the worst moment of a backward)."""
    model, t = configuration.model, configuration.tensor
    tokens, size = tokens_of(configuration), BYTES[configuration.precision]
    row = float(tokens * model.hidden * size)
    between = row / t if configuration.sequence_parallel else row
    masks = 2 * between / size if configuration.dropout else 0.0
    key_value = 2 * tokens * model.key_value_width * size / t
    heads = tokens * configuration.sequence * model.heads / t
    scores = 0.0 if configuration.flash else heads * ((2 * size + 1) if configuration.dropout else size)
    inner = (4 if model.gated else 2) * tokens * model.intermediate * size / t
    products = 2 * row / t + key_value + inner
    whole = 4 * between + masks + scores + products
    fraction = configuration.checkpointed if configuration.checkpointing != "none" else 0.0
    outputs = (3 * row + (2 if model.gated else 1) * tokens * model.intermediate * size) / t + key_value
    held = {
        "full": between,
        "attention": whole - scores,
        "selective": outputs + row / t + between,
        "half": outputs / 2 + row / t + between,
    }
    kept = held.get(configuration.checkpointing, whole)
    if configuration.checkpointing == "full" and configuration.offload_activations:
        kept = 0.0
    recomputed = (whole - kept) if fraction else 0.0
    return fraction * kept + (1 - fraction) * whole, recomputed + 2 * row + inner / 2
