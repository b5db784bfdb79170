"""Cases of the rules in `plan/rules/context.py`."""

from __future__ import annotations

from dataclasses import replace

from shardwise.model.facts import SplitForward
from tests.plan.rules.jobs import CONTEXT, CPU4, FACTS, KERNELS, NO_INTERFACE, case

WHOLE = replace(FACTS, split_forward=SplitForward({}))

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
    "context-blocks-method": case(
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}},
        {"parallel": {**CONTEXT, "context_parallel_method": "all_gather"}},
        "use auto or all_gather",
        CPU4,
        WHOLE,
    ),
    "context-blocks-pipeline": case(
        {"parallel": {**CONTEXT, "pipeline_parallel_degree": 2}},
        {"parallel": CONTEXT},
        "for blocks of one stage; use one of them at 1",
        CPU4,
        WHOLE,
    ),
    "context-blocks-sequence": case(
        {"parallel": {**CONTEXT, "tensor_parallel_degree": 2, "sequence_parallel": True}},
        {"parallel": {**CONTEXT, "tensor_parallel_degree": 2}},
        "use sequence_parallel false",
        CPU4,
        WHOLE,
    ),
    "context-blocks-compile": case(
        {"parallel": CONTEXT, "model": {"compile": True}}, {"parallel": CONTEXT}, "no one graph", CPU4, WHOLE
    ),
    "context-blocks-documents": case(
        {"parallel": CONTEXT, "data": {"isolate_documents": True}},
        {"parallel": CONTEXT},
        "without a mask of documents; use isolate_documents false",
        CPU4,
        WHOLE,
    ),
    "context-blocks-attention": case(
        {"parallel": CONTEXT, "model": {"attention": "flash"}},
        {"parallel": CONTEXT, "model": {"attention": "blockwise"}},
        "which flash attention does not take; use model.attention auto",
        CPU4,
        replace(KERNELS, split_forward=SplitForward({})),
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
