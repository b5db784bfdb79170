"""Cases of the rules in `plan/rules/context.py`."""

from __future__ import annotations

from dataclasses import replace

from tests.plan.rules.jobs import CONTEXT, CPU4, FACTS, KERNELS, NO_INTERFACE, case

CASES = {
    "context-model": case(
        {"parallel": CONTEXT}, {"parallel": CONTEXT}, "does not go through", CPU4, NO_INTERFACE, FACTS
    ),
    "context-data": case({"parallel": CONTEXT, "data": {"factory": "a:b"}}, {"parallel": CONTEXT}, "or data.path"),
    "context-method": case(
        {"parallel": {"context_parallel_method": "ring"}},
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}},
        "set context_parallel_degree",
    ),
    "context-heads": case(
        {"parallel": {"context_parallel_degree": 4, "context_parallel_method": "ulysses"}},
        {"parallel": {"context_parallel_degree": 4, "context_parallel_method": "ring"}},
        "does not divide the 12 attention heads and 6 key-value heads; use all_gather or ring, or a product of the "
        "degrees of 1, 2, 3 or 6",
    ),
    "context-arguments": case(
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}},
        {"parallel": {**CONTEXT, "context_parallel_method": "all_gather"}},
        "also takes softcap; use all_gather",
        CPU4,
        replace(FACTS, attention_arguments=("softcap",)),
    ),
    "context-dropout": case(
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}},
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}, "model": {"attention": "eager"}},
        "use model.attention eager",
        CPU4,
        replace(FACTS, has_attention_dropout=True),
    ),
    "context-kernel": case(
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}, "model": {"attention": "blockwise"}},
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}},
        "a ring is a kernel of its own; use model.attention auto",
        CPU4,
        KERNELS,
    ),
    "context-shard": case(
        {"parallel": {**CONTEXT, "sharded_data_parallel_degree": 1}},
        {"parallel": {**CONTEXT, "sharded_data_parallel_degree": 2}},
        "a multiple of the context degree",
    ),
}
