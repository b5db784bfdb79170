"""The legality table: every row fires on its case and not on the case beside it, and says key, value and fix."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.config import Job
from shardwise.draft import Draft, World, divisors, one_of
from shardwise.errors import LegalityError
from shardwise.families.facts import AttentionFacts, BlockFacts, ModelFacts, StageFacts, TensorSplit
from shardwise.legality import RULES, check, rules, running, structure
from shardwise.optimizers import ELEMENTWISE, UNUSABLE, classes

FACTS = ModelFacts(
    family="gpt_neox",
    is_hugging_face=True,
    parameters=1000,
    embedding_parameters=100,
    blocks=tuple(BlockFacts(f"layers.{i}", 100) for i in range(4)),
    max_positions=512,
    head="embed_out",
    attention_heads=12,
    key_value_heads=6,
    stages=StageFacts(before={"embed_in": 100}, after={"embed_out": 100}),
)
BRANCHED = replace(FACTS, sequence_refusal="its blocks are not one chain")
NO_PLAN = replace(FACTS, tensor_refusal="there is no plan for xlm yet")
LISTS = replace(FACTS, stages=StageFacts(refusal="it has two lists of blocks"))
OTHER_ARGUMENTS = replace(FACTS, blocks_share_arguments=False)
FLAT = replace(FACTS, is_hugging_face=False, blocks=(), head=None, max_positions=None, family="Net")
LED = replace(FACTS, kernel_refusal="", attention=(AttentionFacts("layers.0.attn", 8, 8),))
LINEAR = replace(FACTS, linears={f"layers.{i}.{name}": (4096, 4096) for i in range(4) for name in ("up", "down")})
FUSIBLE = replace(FACTS, fusible={"layers.0.norm": "RMS norm"})
SMALL = replace(FACTS, linears={"layers.1.up": (512, 512)})
CPU4 = World(4, "cpu", 4)
CUDA4 = World(4, "cuda", 4)
CUDA1 = World(1, "cuda", 1)
GRAPHS = {"model": {"compile": True, "cuda_graphs": True}, "precision": {"compute": "fp32"}}
FACTORY = {"model": {"factory": "a:b"}}
FULL = {"activation_checkpointing": "full"}
TWO = {"tensor_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
NO_INTERFACE = replace(FACTS, context_refusal="the attention of bloom does not go through transformers' interface")


def resolve_case(job: dict[str, Any], world: World = CPU4, facts: ModelFacts = FACTS) -> None:
    check(Draft(Job.model_validate(job), world, facts))


def case(
    broken: dict, legal: dict, says: str, world: World = CPU4, facts: ModelFacts = FACTS, legal_facts=None
) -> tuple:
    return broken, legal, says, world, facts, legal_facts or facts


def staged(**parallel: Any) -> dict[str, Any]:
    return {"parallel": {"pipeline_parallel_degree": 2, **parallel}}


def mapped(*stages: int) -> dict[str, Any]:
    return staged(auto_partition=False, partition={f"layers.{i}": stage for i, stage in enumerate(stages)})


PIPELINE_CASES = {
    **{
        f"{key.replace('_', '-')}-without-stages": case(
            {"parallel": {key: value}}, staged(**beside, **{key: value}), key
        )
        for key, value, beside in (
            ("pipeline", "simple", {}),
            ("virtual_pipeline_degree", 2, {}),
            ("active_microbatches", 8, {}),
            ("auto_partition", False, {"default_partition": 0, "partition": {"layers.3": 1}}),
            ("memory_weight", 0.5, {}),
            ("default_partition", 0, {"auto_partition": False, "partition": {"layers.3": 1}}),
            ("partition", {"layers.3": 1}, {"auto_partition": False, "default_partition": 0}),
        )
    },
    "pipeline-model": case(staged(), staged(), "two lists", CPU4, LISTS, FACTS),
    "zero-bubble-compile": case(
        {**staged(pipeline="zero_bubble"), "model": {"compile": True}},
        {**staged(), "model": {"compile": True}},
        "pipeline interleaved",
    ),
    "pipeline-loss": case(
        {**FACTORY, **staged()},
        {"model": {"factory": "a:b", "loss": "a:c"}, **staged()},
        "give model.loss",
        facts=replace(FACTS, is_hugging_face=False, head=None),
    ),
    "pipeline-blocks": case(
        staged(virtual_pipeline_degree=3), staged(virtual_pipeline_degree=2), "6 stages, and the model has 4 blocks"
    ),
    "virtual-simple": case(
        staged(virtual_pipeline_degree=2, pipeline="simple"),
        staged(virtual_pipeline_degree=2),
        "virtual_pipeline_degree 1",
    ),
    "pipeline-microbatches": case(
        {**staged(), "training": {"gradient_accumulation": 1}},
        {**staged(pipeline="simple"), "training": {"gradient_accumulation": 1}},
        "use at least 2",
    ),
    "virtual-microbatches": case(
        {**staged(virtual_pipeline_degree=2), "training": {"gradient_accumulation": 5, "microbatch_size": 1}},
        {**staged(virtual_pipeline_degree=2), "training": {"gradient_accumulation": 6, "microbatch_size": 1}},
        "5 microbatches do not divide into 2 turns",
    ),
    "active-microbatches": case(staged(active_microbatches=1), staged(active_microbatches=2), "use at least 2"),
    "partition-auto": case(staged(default_partition=0), staged(), "auto_partition false"),
    "memory-weight-given-stages": case(
        {"parallel": {**mapped(0, 0, 1, 1)["parallel"], "memory_weight": 0.5}}, mapped(0, 0, 1, 1), "as given"
    ),
    "partition-names": case(
        staged(auto_partition=False, partition={"layer.0": 0}),
        mapped(0, 0, 1, 1),
        "no block 'layer.0'; use names such as",
    ),
    "partition-stages": case(mapped(0, 0, 1), mapped(0, 0, 1, 1), "layers.3 is on none of the stages 0 to 1"),
    "partition-order": case(mapped(0, 1, 0, 1), mapped(0, 0, 0, 1), "stages [0, 1, 0, 1]"),
}

EMULATE = {"precision": {"fp8": "emulate"}}
FLOAT8_CASES = {
    "fp8-scaling": case(
        {"precision": {"fp8_scaling": "rowwise"}},
        {"precision": {"fp8": "emulate", "fp8_scaling": "rowwise"}},
        "set precision.fp8",
        facts=LINEAR,
    ),
    "fp8-layers": case(
        {"precision": {"fp8_layers": "all"}},
        {"precision": {"fp8": "emulate", "fp8_layers": "all"}},
        "nothing is in float8",
        facts=LINEAR,
    ),
    "fp8-transformer-engine": case(
        {"precision": {"fp8": "transformer_engine"}}, EMULATE, "modules of its own", facts=LINEAR
    ),
    "fp8-device": case(
        {"precision": {"fp8": "torchao"}}, EMULATE, "cpu has no products of float8; GPUs have them", facts=LINEAR
    ),
    "fp8-installed": case(
        {"precision": {"fp8": "torchao"}},
        EMULATE,
        "pip install 'shardwise[fp8]'",
        World(4, "cuda", 4, "NVIDIA H100", float8=True),
        LINEAR,
    ),
    "fp8-compute": case(
        {"precision": {"fp8": "emulate", "compute": "fp16"}},
        {"precision": {"fp8": "emulate", "compute": "bf16"}},
        "computes in fp16, and emulate takes bf16 or fp32",
        facts=LINEAR,
    ),
    "fp8-gains": case(
        EMULATE,
        {"precision": {"fp8": "emulate", "fp8_layers": "all"}},
        "0 of 1 linear layers of the blocks; 1 left: 512 x 512 is too small to gain from tensorwise scaling; use",
        facts=SMALL,
    ),
}

# rule id -> (a job that breaks it, the nearest one that does not, what the message holds, world, facts)
CASES = {
    **FLOAT8_CASES,
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
    "graphs-compile": case({"model": {"cuda_graphs": True}}, GRAPHS, "use model.compile true", CUDA1, FACTS),
    "graphs-device": case(GRAPHS, {"model": {"compile": True}}, "the ranks run on cpu"),
    "graphs-alone": case(GRAPHS, {"model": {"compile": True}}, "4 ranks gather weights", CUDA4),
    "graphs-dtype": case({"model": GRAPHS["model"]}, GRAPHS, "cast to bf16", CUDA1),
    "graphs-memory": case({**GRAPHS, "memory": FULL}, GRAPHS, "checkpointing none", CUDA1),
    "liger-model": case({"model": {"liger": True}}, {}, "no module of gpt_neox"),
    "liger-device": case({"model": {"liger": True}}, {}, "the ranks run on cpu", facts=FUSIBLE),
    "liger-installed": case({"model": {"liger": True}}, {}, "shardwise[liger]", CUDA4, FUSIBLE),
    "liger-compile": case(
        {"model": {"liger": True, "compile": True}}, {"model": {"compile": True}}, "use one of them", CUDA4, FUSIBLE
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
    "data-factory-text": case(
        {"data": {"factory": "a:b", "isolate_documents": True}},
        {"data": {"path": "p", "isolate_documents": True}},
        "leave data.isolate_documents out",
    ),
    "data-factory-tokens": case(
        {"data": {"factory": "a:b"}, "training": {"tokens_per_step": 4096}},
        {"data": {"factory": "a:b"}, "training": {"sequences_per_step": 16}},
        "training.sequences_per_step",
    ),
    "vocabulary-size": case(
        {"data": {"tokenizer": "t", "vocabulary_size": 512}}, {"data": {"vocabulary_size": 512}}, "vocabulary_size=512"
    ),
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
    "world": case(
        {"parallel": {"tensor_parallel_degree": 3}}, {}, "3 does not divide the 4 ranks; use a product of 1, 2"
    ),
    "tensor-model": case({"parallel": TWO}, {"parallel": TWO}, "no plan for xlm", CPU4, NO_PLAN, FACTS),
    "tensor-heads": case(
        {"parallel": {"tensor_parallel_degree": 4}},
        {"parallel": TWO},
        "does not share out the 12 attention heads and 6 key-value heads; use 1, 2, 3 or 6",
    ),
    "sequence-model": case(
        {"parallel": {**TWO, "sequence_parallel": True}}, {"parallel": TWO}, "not one chain", CPU4, BRANCHED
    ),
    "sequence-compile": case(
        {"parallel": {**TWO, "sequence_parallel": True}, "model": {"compile": True}},
        {"parallel": TWO, "model": {"compile": True}},
        "use model.compile false",
    ),
    **PIPELINE_CASES,
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
    "context-compile": case(
        {"parallel": CONTEXT, "model": {"compile": True}}, {"parallel": CONTEXT}, "use model.compile false"
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
    "loss-scale": case(
        {"precision": {"loss_scale": {"scale_window": 10}}},
        {"precision": {"compute": "fp16", "loss_scale": {"scale_window": 10}}},
        "computes in fp32",
    ),
    "static-loss-scale": case(
        {"precision": {"compute": "fp16", "loss_scale": {"static": 8, "scale_window": 10}}},
        {"precision": {"compute": "fp16", "loss_scale": {"static": 8}}},
        "leave static out",
    ),
    "loss-scale-range": case(
        {"precision": {"compute": "fp16", "loss_scale": {"init_scale": 2, "min_scale": 4}}},
        {"precision": {"compute": "fp16", "loss_scale": {"init_scale": 4, "min_scale": 4}}},
        "at most 2",
    ),
    "optimizer-name": case({"optimizer": {"name": "AdamX"}}, {"optimizer": {"name": "Adam"}}, "did you mean 'Adam"),
    "optimizer-usable": case({"optimizer": {"name": "LBFGS"}}, {"optimizer": {"name": "SGD"}}, "closure"),
    "optimizer-elementwise": case(
        {"optimizer": {"name": "Adafactor"}},
        {"optimizer": {"name": "Adafactor"}, "parallel": {"sharded_data_parallel_degree": 1}},
        "cut over 4 ranks",
    ),
    "optimizer-options": case(
        {"optimizer": {"options": {"beta": [0.9, 0.95]}}},
        {"optimizer": {"options": {"betas": [0.9, 0.95]}}},
        "no option 'beta'; did you mean 'betas'?",
    ),
    "optimizer-values": case(
        {"optimizer": {"options": {"betas": [2.0, 0.95]}}},
        {"optimizer": {"options": {"betas": [0.9, 0.95]}}},
        "Invalid beta",
    ),
    "warmup": case(
        {"optimizer": {"warmup_steps": 10}, "training": {"steps": 10}},
        {"optimizer": {"warmup_steps": 9}, "training": {"steps": 10}},
        "use at most 9 warmup_steps",
    ),
    "final-learning-rate": case(
        {"optimizer": {"schedule": "constant", "final_learning_rate_ratio": 0.5}},
        {"optimizer": {"schedule": "linear", "final_learning_rate_ratio": 0.5}},
        "linear or cosine",
    ),
    "profile": case(
        {"observe": {"profile": [90, 101]}, "training": {"steps": 100}},
        {"observe": {"profile": [99, 100]}, "training": {"steps": 100}},
        "[99, 100]",
    ),
    "tokens-per-step": case(
        {"training": {"tokens_per_step": 1000}}, {"training": {"tokens_per_step": 1024}}, "use 768 or 1024"
    ),
    "step-size": case(
        {"training": {"tokens_per_step": 4096, "sequences_per_step": 8}},
        {"training": {"tokens_per_step": 4096, "sequences_per_step": 16}},
        "sequences_per_step=8",
    ),
    "idle-ranks": case(
        {"training": {"sequences_per_step": 3}}, {"training": {"sequences_per_step": 4}}, "at least 4 sequences"
    ),
    "microbatch": case(
        {"training": {"microbatch_size": 5}},
        {"training": {"microbatch_size": 4}},
        "gives each data rank 4; use at most 4",
    ),
    "accumulation": case(
        {"training": {"microbatch_size": 2, "gradient_accumulation": 3, "sequences_per_step": 16}},
        {"training": {"microbatch_size": 2, "gradient_accumulation": 2, "sequences_per_step": 16}},
        "use gradient_accumulation 2",
    ),
    "checkpoint-keep-last": case(
        {"checkpoint": {"keep_last": 3}}, {"checkpoint": {"keep_last": 3, "every": 5}}, "set checkpoint.every"
    ),
    "checkpoint-keep-every": case(
        {"checkpoint": {"keep_every": 10}}, {"checkpoint": {"keep_every": 10, "every": 5}}, "keep_every=10"
    ),
    "checkpoint-asynchronous": case(
        {"checkpoint": {"asynchronous": False}}, {"checkpoint": {"asynchronous": False, "every": 5}}, "at intervals"
    ),
    "checkpoint-keep-best": case(
        {"checkpoint": {"keep_best": True, "every": 5}, "training": {"evaluate_every": 2}},
        {"checkpoint": {"keep_best": True, "every": 4}, "training": {"evaluate_every": 2}},
        "training.evaluate_every to a divisor of checkpoint.every",
    ),
    "checkpoint-staging": case(
        {"checkpoint": {"staging_bytes": 1 << 24, "asynchronous": False, "every": 5}},
        {"checkpoint": {"staging_bytes": 1 << 24, "every": 5}},
        "staging_bytes=16777216",
    ),
}
MORE = [
    ("backend", {"parallel": {"ddp_dist_backend": "gloo"}}, CUDA4, FACTS),
    ("backend", {"parallel": {"ddp_dist_backend": "shardwise"}}, CUDA4, FACTS),
    ("device", {"parallel": {"device": "cpu"}}, CUDA4, FACTS),
    ("shard-degree", {"parallel": {"sharded_data_parallel_degree": 8}}, CPU4, FACTS),
    ("checkpoint-strategy-name", {"memory": {**FULL, "checkpoint_strategy": "group_x"}}, CPU4, FACTS),
    ("checkpoint-arguments", {"memory": {**FULL, "checkpoint_strategy": "contiguous"}}, CPU4, OTHER_ARGUMENTS),
    ("compile-memory", {"model": {"compile": True}, "memory": {**FULL, "checkpoint_strategy": "group_2"}}, CPU4, FACTS),
    ("compile-memory", {"model": {"compile": True}, "memory": {**FULL, "offload_activations": True}}, CPU4, FACTS),
    ("optimizer-options", {"optimizer": {"options": {"lr": 1.0}}}, CPU4, FACTS),
    (
        "optimizer-elementwise",
        {"optimizer": {"name": "Adafactor"}, "parallel": {"shard_optimizer_state": True}},
        CPU4,
        FACTS,
    ),
    ("profile", {"observe": {"profile": [1]}}, CPU4, FACTS),
    ("profile", {"observe": {"profile": [0, 1]}}, CPU4, FACTS),
    ("profile", {"observe": {"profile": [3, 2]}}, CPU4, FACTS),
    ("accumulation", {"training": {"gradient_accumulation": 3}}, CPU4, FACTS),  # 4 a rank in 3: 2 + 2 + nothing
    ("graphs-memory", {**GRAPHS, "training": {"gradient_accumulation": 2}}, CUDA1, FACTS),
    ("graphs-memory", {**GRAPHS, "memory": {"offload_parameters": True}}, CUDA1, FACTS),
    ("fp8-device", {"precision": {"fp8": "torchao"}}, World(4, "cuda", 4, "NVIDIA A100", float8=False), LINEAR),
    ("fp8-gains", EMULATE, CPU4, replace(LINEAR, linears={"layers.0.up": (4096, 4096), "layers.3.up": (4096, 4096)})),
    ("idle-ranks", {}, World(32, "cpu", 32), FACTS),
]


def test_key_value_heads_are_held_in_copies_where_their_projections_are_apart() -> None:
    job = {"parallel": {"tensor_parallel_degree": 12}}
    world = World(12, "cpu", 12)
    apart = replace(FACTS, tensor_splits={"k": TensorSplit("column", key_value=True)})
    resolve_case(job, world, apart)
    with pytest.raises(LegalityError, match="use 1, 2, 3 or 6"):
        resolve_case(job, world, replace(FACTS, tensor_splits={"qkv": TensorSplit("column")}))
    with pytest.raises(LegalityError, match="use 1, 2, 3, 6 or 12"):
        resolve_case({"parallel": {"tensor_parallel_degree": 4}}, CPU4, apart)


def test_every_row_has_a_case_and_a_name_of_its_own() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    assert set(ids) == set(CASES)
    assert [doc.id for doc in rules()] == ids
    assert all(doc.sentence and doc.fix and doc.keys for doc in rules())


@pytest.mark.parametrize("id", CASES)
def test_row_fires_and_its_neighbour_passes(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, legal, says, world, facts, legal_facts = CASES[id]
    for rows in (running, structure):
        monkeypatch.setattr(rows, "installed", lambda package: not id.endswith("-installed"))
    with pytest.raises(LegalityError) as raised:
        resolve_case(broken, world, facts)
    rule = next(rule for rule in RULES if rule.id == id)
    assert raised.value.rule == id
    assert says in str(raised.value)
    assert all(f"{key}=" in str(raised.value) for key in rule.keys)
    assert raised.value.exit_code == 2
    resolve_case(legal, world, legal_facts)


@pytest.mark.parametrize(("id", "job", "world", "facts"), MORE)
def test_other_ways_to_break_a_row(id: str, job: dict[str, Any], world: World, facts: ModelFacts) -> None:
    with pytest.raises(LegalityError) as raised:
        resolve_case(job, world, facts)
    assert raised.value.rule == id


def test_the_default_job_is_legal_on_cpu_and_cuda() -> None:
    for world in (World(1, "cpu", 1), World(2, "cpu", 2), World(8, "cuda", 8)):
        resolve_case({}, world)


def test_gradient_accumulation_names_the_counts_around() -> None:
    job = {"training": {"gradient_accumulation": 4, "sequences_per_step": 20}}  # 5 sequences a rank
    with pytest.raises(LegalityError, match="use gradient_accumulation 3 or 5"):
        resolve_case(job)


def test_every_optimizer_of_torch_is_sorted() -> None:
    known = {*ELEMENTWISE, *UNUSABLE, "Adafactor"}
    assert set(ELEMENTWISE) <= set(classes())
    assert set(classes()) <= known, "a new optimizer in torch.optim: is it elementwise?"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_update_a_shard_as_the_whole(name: str) -> None:
    import torch

    torch.manual_seed(0)
    start, gradients = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, 4, dtype=torch.float64)

    def trained(rows: slice) -> torch.Tensor:
        tensor = torch.nn.Parameter(start[rows].clone())
        optimizer = classes()[name]([tensor], lr=0.1)
        for gradient in gradients:
            tensor.grad = gradient[rows].clone()
            optimizer.step()
        return tensor.detach()

    torch.testing.assert_close(trained(slice(0, 2)), trained(slice(0, 4))[:2], rtol=0, atol=0)


def test_words() -> None:
    assert one_of([1]) == "1"
    assert one_of([1, 2]) == "1 or 2"
    assert one_of([1, 2, 4]) == "1, 2 or 4"
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
