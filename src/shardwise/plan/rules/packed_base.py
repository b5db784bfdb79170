"""Rules about frozen weights in 4 or 8 bits (`adapter.base`)."""

from __future__ import annotations

from shardwise.model.packed_weights import BLOCK, cut_blocks
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle


def _is_packed(d: Draft) -> bool:
    return d.adapter.kind != "none" and d.adapter.base != "full"


def _cut_block(d: Draft) -> tuple[str, int] | None:
    return next(cut_blocks(d.facts, d.parallel.tensor_parallel_degree), None)


def _block_reason(d: Draft) -> str:
    name, size = _cut_block(d) or ("", 0)
    degree = d.parallel.tensor_parallel_degree
    of_rank = f" as one of {degree} tensor ranks has them" if degree > 1 else ""
    return f"rows of {name} have {size} elements{of_rank}, and {BLOCK} share a scale"


# fmt: off
RULES: tuple[Rule, ...] = (
    idle("adapter-base", "adapter.base", "there is no adapter", lambda d: d.adapter.kind == "none",
         "set adapter.kind lora or dora, or leave it out"),
    Rule("adapter-base-path", ("adapter.base", "model.path"), "only weights of a directory are packed",
         lambda d: _is_packed(d) and d.model.path is None,
         fix="give model.path"),
    Rule("adapter-base-stacks", ("adapter.base",), "stacks of experts have no packed form",
         lambda d: _is_packed(d) and d.facts.expert_stacks,
         fix="leave adapter.base out"),
    Rule("adapter-base-fp8", ("adapter.base", "precision.fp8"), "packed weights are multiplied in the compute dtype",
         lambda d: _is_packed(d) and d.precision.fp8 != "none",
         fix="leave precision.fp8 out"),
    Rule("adapter-base-blocks", ("adapter.base", "parallel.tensor_parallel_degree"),
         f"rows of weights are blocks of {BLOCK}",
         _cut_block,
         fix="leave adapter.base out",
         because=_block_reason),
)
# fmt: on
