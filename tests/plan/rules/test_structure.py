"""Rows about what is trained and how it is laid out: model, data, parallel, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.errors import LegalityError
from shardwise.model.facts import AttentionFacts, ModelFacts, TensorSplit
from shardwise.plan.draft import World
from tests.plan.rules.jobs import (
    BRANCHED,
    CONTEXT,
    CPU4,
    CPU6,
    CUDA4,
    DROPPING,
    FACTORY,
    FACTS,
    FLAT,
    FULL,
    GROUPED,
    LED,
    NO_INTERFACE,
    NO_PLAN,
    OTHER_ARGUMENTS,
    SPANS,
    TWO,
    case,
    check_case,
    check_row,
    resolve_case,
)

CASES = {
    "one-model": case({"model": {"path": "m", "config": "c"}}, {"model": {"path": "m"}}, "keep one"),
    "model-loss": case({"model": {"loss": "a:b"}}, {"model": {"factory": "a:b", "loss": "a:c"}}, "model.loss=a:b"),
    "model-factory-arguments": case(
        {"model": {"factory_arguments": {"x": 1}}},
        {"model": {"factory": "a:b", "factory_arguments": {"x": 1}}},
        "'x': 1",
    ),
    "factory-attention": case(
        {"model": {"factory": "a:b", "attention": "sdpa"}}, {"model": {"attention": "sdpa"}}, "attention=sdpa"
    ),
    "factory-dropout": case({"model": {"factory": "a:b", "dropout": 0}}, {"model": {"dropout": 0}}, "dropout=0"),
    "factory-task": case(
        {"model": {"factory": "a:b", "task": "masked_lm"}}, {"model": {"config": "c", "task": "masked_lm"}}, "own head"
    ),
    "remote-code": case(
        {"model": {"trust_remote_code": True}}, {"model": {"path": "m", "trust_remote_code": True}}, "model.path"
    ),
    "compile-blocks": case(
        {"model": {"compile": True}}, {"model": {"compile": True}}, "no repeated", CPU4, FLAT, FACTS
    ),
    "one-corpus": case({"data": {"path": "p", "factory": "a:b"}}, {"data": {"factory": "a:b"}}, "keep one"),
    "data-factory-format": case(
        {"data": {"format": "jsonl", "factory": "a:b"}}, {"data": {"format": "factory", "factory": "a:b"}}, "jsonl"
    ),
    "data-format-factory": case({"data": {"format": "factory"}}, {"data": {"format": "auto"}}, "set data.factory"),
    "data-factory-arguments": case(
        {"data": {"factory_arguments": {"n": 1}}}, {"data": {"factory": "a:b", "factory_arguments": {"n": 1}}}, "'n': 1"
    ),
    "data-path": case({"data": {"format": "jsonl"}}, {"data": {"format": "jsonl", "path": "p"}}, "format=jsonl"),
    "stdlib-path": case(
        {"data": {"format": "stdlib", "path": "p"}}, {"data": {"format": "auto", "path": "p"}}, "path=p"
    ),
    **{
        f"data-factory-{key.replace('_', '-')}": case(
            {"data": {"factory": "a:b", key: value}}, {"data": {"path": "p", key: value}}, "returns tensors"
        )
        for key, value in {
            "tokenizer": "t",
            "vocabulary_size": 512,
            "field": "body",
            "isolate_documents": True,
            "max_documents": 3,
        }.items()
    },
    "data-factory-tokens": case(
        {"data": {"factory": "a:b"}, "training": {"tokens_per_step": 4096}},
        {"data": {"factory": "a:b"}, "training": {"sequences_per_step": 16}},
        "training.sequences_per_step",
    ),
    "vocabulary-size": case(
        {"data": {"tokenizer": "t", "vocabulary_size": 512}}, {"data": {"vocabulary_size": 512}}, "vocabulary_size=512"
    ),
    "vocabulary-size-tokens": case(
        {"data": {"path": "p", "format": "tokens", "vocabulary_size": 512}},
        {"data": {"path": "p", "format": "tokens"}},
        "trains no tokenizer",
    ),
    "mean-span-length": case({"data": {"mean_span_length": 2.0}}, SPANS, "only model.task seq2seq_lm"),
    "spans": case({**SPANS, "data": {"sequence_length": 1}}, {**SPANS, "data": {"sequence_length": 2}}, "at least 2"),
    "spans-documents": case({**SPANS, "data": {"isolate_documents": True}}, SPANS, "isolate_documents false"),
    "mask-probability": case(
        {"data": {"mask_probability": 0.3}},
        {"data": {"mask_probability": 0.3}, "model": {"task": "masked_lm"}},
        "masked_lm",
    ),
    "positions": case({"data": {"sequence_length": 513}}, {"data": {"sequence_length": 512}}, "use at most 512"),
    "documents-window": case(
        {"data": {"isolate_documents": True, "sequence_length": 65}},
        {"data": {"isolate_documents": True, "sequence_length": 64}},
        "sliding window of 64; use isolate_documents false",
        CPU4,
        replace(FACTS, sliding_window=64),
    ),
    "device": case({"parallel": {"device": "cuda"}}, {"parallel": {"device": "cpu"}}, "run on cpu"),
    "backend": case({"parallel": {"ddp_dist_backend": "nccl"}}, {"parallel": {"ddp_dist_backend": "gloo"}}, "use auto"),
    "nccl-shared": case(
        {"parallel": {"ddp_dist_backend": "nccl"}},
        {"parallel": {"ddp_dist_backend": "shardwise"}},
        "4 ranks of a host share 2 GPU(s), and NCCL joins one rank of each; the engine moves their tensors through the "
        "host's memory; use auto or shardwise, or 2 rank(s) a host",
        replace(CUDA4, gpus=2),
    ),
    "world": case(
        {"parallel": {"tensor_parallel_degree": 3}}, {}, "3 does not divide the 4 ranks; use a product of 1, 2"
    ),
    "layer-drop": case({}, {}, "gpt_neox drops blocks at random (LayerDrop)", CPU4, DROPPING, FACTS),
    "tensor-model": case({"parallel": TWO}, {"parallel": TWO}, "no plan for xlm", CPU4, NO_PLAN, FACTS),
    "tensor-heads": case(
        {"parallel": {"tensor_parallel_degree": 4}},
        {"parallel": TWO},
        "does not share out the 12 attention heads and 6 key-value heads; use 1, 2, 3 or 6",
    ),
    "tensor-experts": case(
        {"parallel": {"tensor_parallel_degree": 3}, "precision": {"compute": "bf16"}},
        {"parallel": TWO, "precision": {"compute": "bf16"}},
        "6 of an expert's 16 inner features in bf16 are no multiple of the 16 bytes that grouped products read at "
        "once; use a degree of 1 or 2, or experts_implementation batched_mm",
        CPU6,
        GROUPED,
    ),
    "sequence-model": case(
        {"parallel": {**TWO, "sequence_parallel": True}}, {"parallel": TWO}, "not one chain", CPU4, BRANCHED
    ),
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
    "factory-label-smoothing": case(
        {**FACTORY, "training": {"label_smoothing": 0.1}}, {"training": {"label_smoothing": 0.1}}, "its own loss"
    ),
    "factory-z-loss": case({**FACTORY, "training": {"z_loss": 1e-4}}, {"training": {"z_loss": 1e-4}}, "its own loss"),
    "context-kernel": case(
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}, "model": {"attention": "blockwise"}},
        {"parallel": {**CONTEXT, "context_parallel_method": "ring"}},
        "a ring is a kernel of its own; use model.attention auto",
        CPU4,
        LED,
    ),
    "attention-led": case(
        {"model": {"attention": "blockwise"}},
        {"model": {"attention": "blockwise"}},
        "xlm is not among the families; use auto, sdpa or eager",
        CPU4,
        replace(FACTS, kernel_refusal="xlm is not among the families"),
        LED,
    ),
    "attention-kernel": case(
        {"model": {"attention": "sdpa"}},
        {"model": {"attention": "blockwise"}},
        "layers.0.attn: it has no soft cap on scores; use auto, blockwise or eager",
        CPU4,
        replace(LED, attention=(AttentionFacts("layers.0.attn", 8, 8, softcap=True),)),
    ),
    "attention-overflow": case(
        {"model": {"attention": "eager"}, "precision": {"compute": "fp16"}},
        {"model": {"attention": "eager"}, "precision": {"compute": "bf16"}},
        "overflow above 65504; use model.attention auto or sdpa, or precision.compute bf16",
    ),
    "context-shard": case(
        {"parallel": {**CONTEXT, "sharded_data_parallel_degree": 1}},
        {"parallel": {**CONTEXT, "sharded_data_parallel_degree": 2}},
        "a multiple of the context degree",
    ),
    "placement": case(
        {"parallel": {"placement_strategy": "DPP"}}, {"parallel": {"placement_strategy": "TDP"}}, "permutation"
    ),
    "optimizer-state": case(
        {"parallel": {"shard_optimizer_state": True, "sharded_data_parallel_degree": 2}},
        {"parallel": {"shard_optimizer_state": True, "sharded_data_parallel_degree": 1}},
        "sharded_data_parallel_degree 1",
    ),
    "shard-degree": case(
        {"parallel": {"sharded_data_parallel_degree": 3}},
        {"parallel": {"sharded_data_parallel_degree": 2}},
        "sharded_data_parallel_degree=3: does not divide the 4 data ranks; use 1, 2 or 4",
    ),
    "offload-parameters": case(
        {"memory": {"offload_parameters": True}, "parallel": {"shard_optimizer_state": True}},
        {"memory": {"offload_parameters": True}},
        "sharded_data_parallel_degree",
    ),
    "checkpointing-blocks": case({"memory": FULL}, {"memory": FULL}, "use none", CPU4, FLAT, FACTS),
    "checkpoint-every": case(
        {"memory": {"checkpoint_every": 2}}, {"memory": {**FULL, "checkpoint_every": 2}}, "every=2"
    ),
    "checkpoint-strategy": case(
        {"memory": {"checkpoint_strategy": "contiguous"}},
        {"memory": {**FULL, "checkpoint_strategy": "contiguous"}},
        "activation_checkpointing to full",
    ),
    "checkpoint-strategy-name": case(
        {"memory": {**FULL, "checkpoint_strategy": "group_0"}},
        {"memory": {**FULL, "checkpoint_strategy": "group_1"}},
        "group_N",
    ),
    "checkpoint-grouping": case(
        {"memory": {**FULL, "checkpoint_every": 2, "checkpoint_strategy": "group_2"}},
        {"memory": {**FULL, "checkpoint_every": 2}},
        "checkpoint_every=2, memory.checkpoint_strategy=group_2",
    ),
    "checkpoint-every-blocks": case(
        {"memory": {**FULL, "checkpoint_every": 5}}, {"memory": {**FULL, "checkpoint_every": 4}}, "use at most 4"
    ),
    "checkpoint-group-blocks": case(
        {"memory": {**FULL, "checkpoint_strategy": "group_5"}},
        {"memory": {**FULL, "checkpoint_strategy": "group_4"}},
        "at most 4",
    ),
    "checkpoint-arguments": case(
        {"memory": {**FULL, "checkpoint_strategy": "group_2"}}, {"memory": FULL}, "use each", CPU4, OTHER_ARGUMENTS
    ),
    "offload-activations": case(
        {"memory": {"offload_activations": True}},
        {"memory": {"offload_activations": True, **FULL}},
        "activation_checkpointing to full",
    ),
    "compile-memory": case(
        {"model": {"compile": True}, "memory": {"activation_checkpointing": "selective"}},
        {"model": {"compile": True}, "memory": FULL},
        "activation_checkpointing=selective",
    ),
    "loss-chunk": case(
        {**FACTORY, "memory": {"loss_chunk_tokens": 8}},
        {"memory": {"loss_chunk_tokens": 8}},
        "loss_chunk_tokens=8",
        CPU4,
        FLAT,
        FACTS,
    ),
}

MORE = [
    ("backend", {"parallel": {"ddp_dist_backend": "gloo"}}, CUDA4, FACTS),
    ("device", {"parallel": {"device": "cpu"}}, CUDA4, FACTS),
    ("shard-degree", {"parallel": {"sharded_data_parallel_degree": 8}}, CPU4, FACTS),
    ("checkpoint-strategy-name", {"memory": {**FULL, "checkpoint_strategy": "group_x"}}, CPU4, FACTS),
    ("checkpoint-arguments", {"memory": {**FULL, "checkpoint_strategy": "contiguous"}}, CPU4, OTHER_ARGUMENTS),
    ("compile-memory", {"model": {"compile": True}, "memory": {**FULL, "checkpoint_strategy": "group_2"}}, CPU4, FACTS),
    ("compile-memory", {"model": {"compile": True}, "memory": {**FULL, "offload_activations": True}}, CPU4, FACTS),
]


@pytest.mark.parametrize("id", CASES)
def test_row_fires_and_its_neighbour_passes(id: str) -> None:
    check_case(id, CASES[id])


@pytest.mark.parametrize(("id", "job", "world", "facts"), MORE)
def test_other_ways_to_break_a_row(id: str, job: dict[str, Any], world: World, facts: ModelFacts) -> None:
    check_row(id, job, world, facts)


def test_key_value_heads_are_held_in_copies_where_their_projections_are_apart() -> None:
    job = {"parallel": {"tensor_parallel_degree": 12}}
    world = World(12, "cpu", 12)
    apart = replace(FACTS, tensor_splits={"k": TensorSplit("column", key_value=True)})
    resolve_case(job, world, apart)
    with pytest.raises(LegalityError, match="use 1, 2, 3 or 6"):
        resolve_case(job, world, replace(FACTS, tensor_splits={"qkv": TensorSplit("column")}))
    with pytest.raises(LegalityError, match="use 1, 2, 3, 6 or 12"):
        resolve_case({"parallel": {"tensor_parallel_degree": 4}}, CPU4, apart)
