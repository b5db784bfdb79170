"""Rules about tensor parallelism: what the model must have for a degree to split it."""

from __future__ import annotations

from shardwise.job.axes import Axis
from shardwise.model.tensor_split import chunk
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule
from shardwise.words import divisors, one_of

ALIGNED = 16  # bytes of which grouped products read a multiple at once
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


def _shares_heads(d: Draft, degree: int) -> bool:
    """Return whether `degree` ranks can share the heads; key-value heads whole, in copies, or in parts."""
    if _too_many(d, degree):
        return False
    if d.facts.heads_whole:
        return True
    heads, key_value = d.facts.attention_heads, d.facts.key_value_heads
    if not key_value:  # a script's own model, in which no heads are split
        return True
    apart, shared = d.facts.key_values_apart, d.facts.shared_parts
    whole = key_value % degree == 0 or (apart and degree % key_value == 0)
    parts = degree // key_value if degree % key_value == 0 else 0  # of ranks that share a key-value head
    return heads % degree == 0 and (whole or (shared > 0 and parts > 0 and shared % parts == 0))


def _too_many(d: Draft, degree: int) -> bool:
    """Return whether some layer that is split by outputs has fewer of them than ranks."""
    return 0 < d.facts.fewest_gathered < degree


def _why_not_shared(d: Draft) -> str:
    if _too_many(d, d.parallel.tensor_parallel_degree):
        return f"is more than the {d.facts.fewest_gathered} outputs of the smallest split layer"
    heads, key_value = d.facts.attention_heads, d.facts.key_value_heads
    return f"does not share out the {heads} attention heads and {key_value} key-value heads"


def _unaligned(d: Draft, degree: int) -> int:
    """Return the features of an expert's part, on one of `degree` ranks, that grouped products cannot read; 0: none."""
    if d.parallel.expert_parallel_degree > 1:
        return 0  # experts are whole then
    parts = [chunk(features, degree, index) for features in d.facts.grouped_features for index in (0, degree - 1)]
    sizes = (part.stop - part.start for part in parts if degree > 1)
    return next((features for features in sizes if not features or features * BYTES[d.compute] % ALIGNED), 0)


def _aligned_degrees(d: Draft) -> list[int]:
    return [n for n in divisors(d.facts.attention_heads) if _shares_heads(d, n) and not _unaligned(d, n)]


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("tensor-model", ("parallel.tensor_parallel_degree",), "the model has to have a plan of what is split",
         lambda d: d.parallel.tensor_parallel_degree > 1 and not d.facts.supports(Axis.TENSOR).ok,
         fix="use 1",
         because=lambda d: d.facts.supports(Axis.TENSOR).reason),
    Rule("tensor-heads", ("parallel.tensor_parallel_degree",), "has to divide the attention heads, and to divide the "
         "key-value heads or to be a multiple of them; ranks that share a head behind its queries divide its size",
         lambda d: d.parallel.tensor_parallel_degree > 1 and not _shares_heads(d, d.parallel.tensor_parallel_degree),
         fix="use a divisor of both",
         because=_why_not_shared,
         use=lambda d: f"use at most {d.facts.fewest_gathered}"
         if _too_many(d, d.parallel.tensor_parallel_degree) else
         f"use {one_of(n for n in divisors(d.facts.attention_heads) if _shares_heads(d, n))}"),
    Rule("tensor-experts", ("parallel.tensor_parallel_degree", "precision.compute"),
         "grouped products of experts read a multiple of 16 bytes at once, of each rank's part of the features too",
         lambda d: _unaligned(d, d.parallel.tensor_parallel_degree),
         fix="use another degree, or experts_implementation batched_mm in the model's config",
         because=lambda d: f"{_unaligned(d, d.parallel.tensor_parallel_degree)} of an expert's "
         f"{d.facts.grouped_features[0]} inner features in {d.compute} are no multiple of the 16 bytes that grouped "
         "products read at once",
         use=lambda d: f"use a degree of {one_of(_aligned_degrees(d))}, or experts_implementation batched_mm in "
         "the model's config"),
)
# fmt: on
