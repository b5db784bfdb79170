"""Rows about what is trained and how it is laid out: model, data, parallel, memory."""

from __future__ import annotations

from math import gcd

from shardwise.model.attention import WIDENING
from shardwise.model.attention_kernels import BY_NAME, KERNELS, alternatives, installed, refusal
from shardwise.model.facts import AttentionFacts, chunk
from shardwise.plan.draft import Draft, changed, group_size, placement_order
from shardwise.plan.rules.rule import Rule, idle
from shardwise.words import divisors, one_of

LIGER, GRAPHS = "model.liger", "model.cuda_graphs"
CHECKPOINTING, COUNT = "memory.activation_checkpointing", "training.gradient_accumulation"
SPLIT_KEYS = tuple(f"parallel.{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))
ALIGNED = 16  # bytes of which grouped products read a multiple at once
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
SOURCES = ("model.path", "model.config", "model.factory")


def _factory_model(d: Draft) -> bool:
    return d.model.factory is not None


def _refused_layer(d: Draft) -> AttentionFacts | None:
    return next((layer for layer, choice in d.attention_choices if choice is None), None)


def _kernel_reason(d: Draft) -> str:
    layer = _refused_layer(d)
    assert layer is not None
    if d.model.attention == "auto":
        return f"no kernel can do what {layer.name} needs"
    return f"{layer.name}: {refusal(BY_NAME[d.model.attention], d.attention_needs(layer))}"


def _possible_kernels(d: Draft) -> list[str]:
    each = [set(alternatives(d.attention_needs(layer))) for layer in d.facts.attention]
    return ["auto", *(kernel.name for kernel in KERNELS if all(kernel.name in names for names in each))]


def _widens(d: Draft) -> bool:
    """Whether attention that is called eager sums its scores in fp32: some families' own, and a ring's."""
    return d.facts.family in WIDENING or _method(d) == "ring"


# fmt: off
MODEL_RULES = (
    Rule("one-model", SOURCES, "a model comes from at most one of them (none: the embedded default)",
         lambda d: len(changed(d.job, *SOURCES)) > 1,
         fix="keep one"),
    idle("model-loss", "model.loss", "only a module of model.factory takes its loss from the job",
          lambda d: not _factory_model(d), "set model.factory or leave it out"),
    *(idle(f"factory-{key.replace('_', '-')}", f"training.{key}", "a module of model.factory brings its own loss",
           _factory_model, "leave it out and set it in the module or model.loss")
      for key in ("label_smoothing", "z_loss")),
    idle("model-factory-arguments", "model.factory_arguments", "there is no model.factory to take them",
          lambda d: not _factory_model(d), "set model.factory or leave it out"),
    idle("factory-attention", "model.attention", "a module of model.factory has no config in which to set it",
          _factory_model, "use auto and set it in the factory"),
    idle("factory-dropout", "model.dropout", "a module of model.factory has no config in which to set it",
          _factory_model, "leave it out and set it in the factory"),
    idle("factory-task", "model.task", "a module of model.factory brings its own head and loss",
          _factory_model, "use causal_lm (which a factory ignores), or model.config"),
    idle("remote-code", "model.trust_remote_code", "only a model.path or model.config can bring code of its own",
          lambda d: d.model.path is None and d.model.config is None),
    Rule("attention-led", ("model.attention",), "kernels are chosen for the families whose attention is led to them",
         lambda d: d.model.attention not in ("auto", "eager", "sdpa") and d.facts.kernel_refusal,
         fix="use auto, sdpa or eager",
         because=lambda d: d.facts.kernel_refusal),
    Rule("attention-kernel", ("model.attention",), "the kernel has to be there, and to do what every layer needs",
         lambda d: _refused_layer(d) is not None,
         fix="use auto",
         because=lambda d: _kernel_reason(d),
         use=lambda d: f"use {one_of(_possible_kernels(d))}"),
    Rule("attention-overflow", ("model.attention", "precision.compute"), "scores of fp16 are summed in fp32",
         lambda d: d.compute == "fp16" and d.model.attention == "eager" and not _widens(d),
         fix="use model.attention auto or sdpa, or precision.compute bf16",
         because=lambda d: f"{d.facts.family}'s eager attention keeps scores in fp16, where they overflow above 65504"),
    Rule("layer-drop", SPLIT_KEYS, "all ranks have to run the same blocks",
         lambda d: d.facts.drops_blocks and d.world.size > 1,
         fix="set the layerdrop fields of the model's config to 0, or use one rank",
         because=lambda d: f"{d.facts.family} drops blocks at random (LayerDrop), and each rank would drop others"),
    Rule("compile-blocks", ("model.compile",), "blocks are compiled one by one, and this model has no repeated blocks",
         lambda d: d.model.compile and not d.facts.blocks,
         fix="use false"),
    Rule("graphs-compile", (GRAPHS, "model.compile"), "what is captured are compiled blocks",
         lambda d: d.model.cuda_graphs and not d.model.compile,
         fix="use model.compile true"),
    Rule("graphs-device", (GRAPHS, "parallel.device"), "CUDA graphs need a GPU",
         lambda d: d.model.cuda_graphs and d.world.device_type != "cuda",
         fix="use cuda_graphs false",
         because=lambda d: f"CUDA graphs need a GPU, and the ranks run on {d.world.device_type}"),
    Rule("graphs-alone", (GRAPHS, *SPLIT_KEYS), "a graph reads weights where they were when it was captured",
         lambda d: d.model.cuda_graphs and d.world.size > 1,
         fix="use one rank, or cuda_graphs false",
         because=lambda d: f"{d.world.size} ranks gather weights and exchange activations, each time in other memory"),
    Rule("graphs-dtype", (GRAPHS, "precision.compute"), "weights that are cast for each step are never in place",
         lambda d: d.model.cuda_graphs and d.compute in ("bf16", "fp16"),
         fix="use precision.compute fp32, or cuda_graphs false",
         because=lambda d: f"weights are fp32, and cast to {d.compute} in other memory each time"),
    Rule("graphs-memory", (GRAPHS, CHECKPOINTING, "memory.offload_parameters", COUNT),
         "a graph's memory is its own until the step ends",
         lambda d: d.model.cuda_graphs and (not _no_checkpointing(d) or d.memory.offload_parameters
                                            or d.accumulation.value > 1),
         fix="use checkpointing none, offload_parameters false and one microbatch, or cuda_graphs false"),
    Rule("liger-model", (LIGER,), "the model has to have something that Liger's kernels compute",
         lambda d: d.model.liger and not d.facts.fusible,
         fix="use false",
         because=lambda d: f"no module of {d.facts.family} is a norm, MLP or rotation that Liger's kernels compute"),
    Rule("liger-device", (LIGER, "parallel.device"), "Liger's kernels run on a GPU",
         lambda d: d.model.liger and d.world.device_type != "cuda",
         fix="use false",
         because=lambda d: f"Liger's kernels run on a GPU, and the ranks run on {d.world.device_type}"),
    Rule("liger-installed", (LIGER,), "Liger has to be installed",
         lambda d: d.model.liger and not installed("liger_kernel"),
         fix="pip install 'shardwise[liger]', or use false",
         because=lambda d: "the package liger-kernel is not installed"),
    Rule("liger-compile", (LIGER, "model.compile"), "a compiled block has fused kernels of its own",
         lambda d: d.model.liger and d.model.compile,
         fix="use one of them"),
)
# fmt: on

DATA_FILES = ("text", "jsonl", "parquet", "dataset", "tokens")
TEXT_KEYS = ("tokenizer", "vocabulary_size", "field", "isolate_documents", "max_documents")


def _factory_data(d: Draft) -> bool:
    return d.data.factory is not None


# fmt: off
DATA_RULES = (
    Rule("one-corpus", ("data.path", "data.factory"), "data comes from one of them",
         lambda d: d.data.path is not None and _factory_data(d),
         fix="keep one"),
    Rule("data-factory-format", ("data.format", "data.factory"), "a data.factory has no other format",
         lambda d: _factory_data(d) and d.data.format not in ("auto", "factory"),
         fix="use format factory"),
    Rule("data-format-factory", ("data.format", "data.factory"), "format factory needs a data.factory",
         lambda d: d.data.format == "factory" and not _factory_data(d),
         fix="set data.factory"),
    idle("data-factory-arguments", "data.factory_arguments", "there is no data.factory to take them",
          lambda d: not _factory_data(d), "set data.factory or leave it out"),
    Rule("data-path", ("data.format", "data.path"), "this format is read from a path",
         lambda d: d.data.format in DATA_FILES and d.data.path is None,
         fix="set data.path"),
    Rule("stdlib-path", ("data.format", "data.path"), "format stdlib reads Python's own sources and no path",
         lambda d: d.data.format == "stdlib" and d.data.path is not None,
         fix="use format auto, or leave data.path out"),
    *(idle(f"data-factory-{key.replace('_', '-')}", f"data.{key}",
           "a data.factory returns tensors, there is no text to read", _factory_data) for key in TEXT_KEYS),
    Rule("data-factory-tokens", ("training.tokens_per_step", "data.factory"), "its samples have no tokens",
         lambda d: _factory_data(d) and d.training.tokens_per_step is not None,
         fix="give training.sequences_per_step, the samples of a step"),
    idle("vocabulary-size", "data.vocabulary_size", "no tokenizer is trained, since data.tokenizer is given",
          lambda d: d.data.tokenizer is not None, "leave one of them out"),
    idle("vocabulary-size-tokens", "data.vocabulary_size", "data.format tokens trains no tokenizer",
          lambda d: d.data.format == "tokens", "leave it out; the model's vocabulary is in model.config"),
    idle("mask-probability", "data.mask_probability", "model.task causal_lm masks no tokens",
          lambda d: d.model.task == "causal_lm", "use model.task masked_lm or seq2seq_lm, or leave it out"),
    idle("mean-span-length", "data.mean_span_length", "only model.task seq2seq_lm leaves out spans",
          lambda d: d.model.task != "seq2seq_lm", "use model.task seq2seq_lm, or leave it out"),
    Rule("spans", ("model.task", "data.sequence_length"), "of a span that is left out something else has to stay",
         lambda d: d.model.task == "seq2seq_lm" and d.data.sequence_length < 2,
         fix="use at least 2"),
    Rule("spans-documents", ("model.task", "data.isolate_documents"),
         "encoder, decoder and the attention between them would each need a mask of documents, and have none",
         lambda d: d.model.task == "seq2seq_lm" and d.data.isolate_documents,
         fix="use isolate_documents false"),
    Rule("positions", ("data.sequence_length",), "a sequence has to fit the model's positions",
         lambda d: d.facts.max_positions is not None and d.data.sequence_length > d.facts.max_positions,
         fix="use a shorter sequence",
         because=lambda d: f"longer than the model's {d.facts.max_positions} positions",
         use=lambda d: f"use at most {d.facts.max_positions}"),
    Rule("documents-window", ("data.isolate_documents", "data.sequence_length"),
         "the mask of documents takes the place of the model's own, which then must not hide more than it",
         lambda d: d.data.isolate_documents and not d.led and (d.facts.sliding_window or d.data.sequence_length)
         < d.data.sequence_length,
         fix="use isolate_documents false, or a sequence within the window",
         because=lambda d: f"the documents' mask would replace the model's sliding window of {d.facts.sliding_window}",
         use=lambda d: f"use isolate_documents false, or a sequence_length of at most {d.facts.sliding_window}"),
)
# fmt: on

ENGINE = "shardwise"  # of parallel.ddp_dist_backend


CONTEXT_DEGREE, CONTEXT_METHOD = "parallel.context_parallel_degree", "parallel.context_parallel_method"


def _method(d: Draft) -> str:
    return d.parallel.context_parallel_method if d.parallel.context_parallel_degree > 1 else ""


def _common_heads(d: Draft) -> int:
    return gcd(d.facts.attention_heads, d.facts.key_value_heads)


def _shares_heads(d: Draft, degree: int) -> bool:
    """Whether `degree` ranks can share the heads: equally, holding those of key-value modules in copies, or parts."""
    heads, key_value = d.facts.attention_heads, d.facts.key_value_heads
    if not key_value:  # a script's own model, in which no heads are split
        return True
    apart, shared = d.facts.key_values_apart, d.facts.shared_parts
    whole = key_value % degree == 0 or (apart and degree % key_value == 0)
    parts = degree // key_value if degree % key_value == 0 else 0  # of ranks that share a key-value head
    return heads % degree == 0 and (whole or (shared > 0 and parts > 0 and shared % parts == 0))


def _unaligned(d: Draft, degree: int) -> int:
    """Inner features of an expert's part on some of `degree` ranks that grouped products could not read; 0: none."""
    parts = [chunk(features, degree, index) for features in d.facts.grouped_features for index in (0, degree - 1)]
    sizes = (part.stop - part.start for part in parts if degree > 1)
    return next((features for features in sizes if not features or features * BYTES[d.compute] % ALIGNED), 0)


def _aligned_degrees(d: Draft) -> list[int]:
    return [n for n in divisors(d.facts.attention_heads) if _shares_heads(d, n) and not _unaligned(d, n)]


def _split(d: Draft) -> int:
    return d.split_degree * d.parallel.context_parallel_degree


# fmt: off
PARALLEL_RULES = (
    Rule("device", ("parallel.device",), "the ranks have to run on the device that the job names",
         lambda d: d.parallel.device not in ("auto", d.world.device_type),
         fix="use auto",
         because=lambda d: f"the ranks run on {d.world.device_type}"),
    Rule("backend", ("parallel.ddp_dist_backend",), "NCCL moves CUDA tensors, Gloo CPU tensors; the engine moves both",
         lambda d: d.parallel.ddp_dist_backend == {"cpu": "nccl", "cuda": "gloo"}[d.world.device_type],
         fix="use auto",
         because=lambda d: f"NCCL is for CUDA, Gloo for a CPU; the ranks run on {d.world.device_type}"),
    Rule("nccl-shared", ("parallel.ddp_dist_backend",), "NCCL joins one rank of each GPU",
         lambda d: d.parallel.ddp_dist_backend == "nccl" and d.world.shares_gpus,
         fix="use auto",
         because=lambda d: f"{d.world.nccl_refusal}; the engine moves their tensors through the host's memory",
         use=lambda d: f"use auto or shardwise, or {d.world.gpus} rank(s) a host"),
    Rule("world", SPLIT_KEYS, "the product of the degrees has to divide the number of ranks",
         lambda d: d.world.size % _split(d),
         fix="use degrees whose product divides the number of ranks",
         because=lambda d: f"their product {_split(d)} does not divide the {d.world.size} ranks",
         use=lambda d: f"use a product of {one_of(divisors(d.world.size))}"),
    Rule("tensor-model", ("parallel.tensor_parallel_degree",), "the model has to have a plan of what is split",
         lambda d: d.parallel.tensor_parallel_degree > 1 and d.facts.tensor_refusal,
         fix="use 1",
         because=lambda d: d.facts.tensor_refusal),
    Rule("tensor-heads", ("parallel.tensor_parallel_degree",), "has to divide the attention heads, and to divide the "
         "key-value heads or to be a multiple of them; ranks that share a head behind its queries divide its size",
         lambda d: d.parallel.tensor_parallel_degree > 1 and not _shares_heads(d, d.parallel.tensor_parallel_degree),
         fix="use a divisor of both",
         because=lambda d: f"does not share out the {d.facts.attention_heads} attention heads and "
         f"{d.facts.key_value_heads} key-value heads",
         use=lambda d: f"use {one_of(n for n in divisors(d.facts.attention_heads) if _shares_heads(d, n))}"),
    Rule("tensor-experts", ("parallel.tensor_parallel_degree", "precision.compute"),
         "grouped products of experts read a multiple of 16 bytes at once, of each rank's part of the features too",
         lambda d: _unaligned(d, d.parallel.tensor_parallel_degree),
         fix="use another degree, or experts_implementation batched_mm in the model's config",
         because=lambda d: f"{_unaligned(d, d.parallel.tensor_parallel_degree)} of an expert's "
         f"{d.facts.grouped_features[0]} inner features in {d.compute} are no multiple of the 16 bytes that grouped "
         "products read at once",
         use=lambda d: f"use a degree of {one_of(_aligned_degrees(d))}, or experts_implementation batched_mm in "
         "the model's config"),
    Rule("sequence-model", ("parallel.sequence_parallel", "parallel.tensor_parallel_degree"),
         "between split layers the model works on each position by itself, from block to block",
         lambda d: d.sequence_parallel and d.facts.sequence_refusal,
         fix="use sequence_parallel false",
         because=lambda d: d.facts.sequence_refusal),
    Rule("context-model", (CONTEXT_DEGREE,),
         "every look at another position has to go through transformers' AttentionInterface",
         lambda d: d.parallel.context_parallel_degree > 1 and d.facts.context_refusal,
         fix="use 1",
         because=lambda d: d.facts.context_refusal),
    Rule("context-data", (CONTEXT_DEGREE, "data.factory"), "sequences of tokens are split, and samples may be others",
         lambda d: d.parallel.context_parallel_degree > 1 and _factory_data(d),
         fix="use context_parallel_degree 1, or data.path"),
    idle("context-method", CONTEXT_METHOD, "sequences are whole",
         lambda d: d.parallel.context_parallel_degree == 1, "set context_parallel_degree, or leave it out"),
    Rule("context-heads", (CONTEXT_DEGREE, CONTEXT_METHOD), "ulysses shares the heads among the ranks",
         lambda d: _method(d) == "ulysses" and not d.heads_divide,
         fix="use all_gather or ring, or a degree that divides the heads",
         because=lambda d: f"tensor x context does not divide the {d.facts.attention_heads} attention heads and "
         f"{d.facts.key_value_heads} key-value heads",
         use=lambda d: f"use all_gather or ring, or a product of the degrees of {one_of(divisors(_common_heads(d)))}"),
    Rule("context-arguments", (CONTEXT_METHOD,),
         "ulysses and ring know attention of scale, masks, dropout and biases of keys alone",
         lambda d: _method(d) in ("ulysses", "ring") and d.facts.own_attention_arguments,
         fix="use all_gather",
         because=lambda d: f"this model's attention also takes {', '.join(d.facts.own_attention_arguments)}"),
    Rule("context-kernel", (CONTEXT_METHOD, "model.attention"), "a ring is a kernel of its own",
         lambda d: _method(d) == "ring" and d.model.attention not in ("auto", "eager", "sdpa"),
         fix="use model.attention auto"),
    Rule("context-dropout", (CONTEXT_METHOD, "model.attention"), "a ring drops attention in eager arithmetic only",
         lambda d: _method(d) == "ring" and d.facts.has_attention_dropout and not d.exact_dropout,
         fix="use model.attention eager, or all_gather"),
    Rule("context-shard", (CONTEXT_DEGREE, "parallel.sharded_data_parallel_degree"),
         "parameters are sharded over the context ranks too",
         lambda d: d.sharded % d.parallel.context_parallel_degree,
         fix="use a sharded_data_parallel_degree that is a multiple of the context degree, or leave it out"),
    Rule("placement", ("parallel.placement_strategy",), "has to hold D, P and T once each",
         lambda d: placement_order(d.parallel.placement_strategy) is None,
         fix="use cluster (DPT), spread (TPD) or another permutation of D, P and T"),
    Rule("optimizer-state", ("parallel.shard_optimizer_state", "parallel.sharded_data_parallel_degree"),
         "sharded parameters have sharded optimizer state already",
         lambda d: d.parallel.shard_optimizer_state and (d.parallel.sharded_data_parallel_degree or 1) > 1,
         fix="use shard_optimizer_state false, or sharded_data_parallel_degree 1"),
    Rule("shard-degree", ("parallel.sharded_data_parallel_degree",), "has to divide the number of data ranks",
         lambda d: d.data_axis % d.sharded,
         fix="use a divisor of the number of data ranks",
         because=lambda d: f"does not divide the {d.data_axis} data ranks",
         use=lambda d: f"use {one_of(divisors(d.data_axis))}"),
    Rule("offload-parameters", ("memory.offload_parameters", "parallel.shard_optimizer_state"),
         "offload keeps shards of parameters on the host, and shard_optimizer_state leaves parameters whole",
         lambda d: d.memory.offload_parameters and d.parallel.shard_optimizer_state,
         fix="use sharded_data_parallel_degree instead of shard_optimizer_state"),
)
# fmt: on

STRATEGY = "memory.checkpoint_strategy"


def _no_checkpointing(d: Draft) -> bool:
    return d.memory.activation_checkpointing == "none"


def _grouped(d: Draft) -> bool:
    return d.memory.checkpoint_strategy != "each"


def _nameless_strategy(d: Draft) -> bool:
    name = d.memory.checkpoint_strategy
    return name not in ("each", "contiguous") and group_size(name) is None


def _not_compilable(d: Draft) -> bool:
    return d.memory.activation_checkpointing == "selective" or _grouped(d) or d.memory.offload_activations


def _blocks(d: Draft) -> int:
    return max(1, len(d.facts.blocks))


# fmt: off
MEMORY_RULES = (
    Rule("checkpointing-blocks", (CHECKPOINTING,), "repeated blocks are checkpointed, and this model has none",
         lambda d: not _no_checkpointing(d) and not d.facts.blocks,
         fix="use none"),
    idle("checkpoint-every", "memory.checkpoint_every", "no activation is checkpointed", _no_checkpointing,
          f"set {CHECKPOINTING} to full or selective"),
    idle("checkpoint-strategy", STRATEGY, "no activation is checkpointed", _no_checkpointing,
          f"set {CHECKPOINTING} to full or selective"),
    Rule("checkpoint-strategy-name", (STRATEGY,), "has to be each, contiguous or group_N", _nameless_strategy,
         fix="use each, contiguous or group_N with N from 1, e.g. group_2"),
    Rule("checkpoint-grouping", ("memory.checkpoint_every", STRATEGY),
         "either every n-th block is checkpointed or groups of blocks are",
         lambda d: d.memory.checkpoint_every > 1 and _grouped(d),
         fix="use checkpoint_every 1 or checkpoint_strategy each"),
    Rule("checkpoint-every-blocks", ("memory.checkpoint_every",), "n is at most the number of blocks",
         lambda d: d.memory.checkpoint_every > _blocks(d),
         fix="use a smaller n",
         because=lambda d: f"more than the model's {_blocks(d)} blocks",
         use=lambda d: f"use at most {_blocks(d)}"),
    Rule("checkpoint-group-blocks", (STRATEGY,), "N is at most the number of blocks",
         lambda d: (group_size(d.memory.checkpoint_strategy) or 1) > _blocks(d),
         fix="use a smaller N",
         because=lambda d: f"N is more than the model's {_blocks(d)} blocks",
         use=lambda d: f"use contiguous, or group_N with N of at most {_blocks(d)}"),
    Rule("checkpoint-arguments", (STRATEGY,),
         "blocks checkpointed together have to be called with the same arguments, and this model's are not",
         lambda d: _grouped(d) and not d.facts.blocks_share_arguments,
         fix="use each"),
    Rule("offload-activations", ("memory.offload_activations", CHECKPOINTING),
         "what is offloaded are the kept activations of checkpointed blocks",
         lambda d: d.memory.offload_activations and _no_checkpointing(d),
         fix=f"set {CHECKPOINTING} to full"),
    Rule("compile-memory", ("model.compile", CHECKPOINTING, STRATEGY, "memory.offload_activations"),
         "a compiled block can be checkpointed in full and by itself, without offload",
         lambda d: d.model.compile and _not_compilable(d),
         fix="use model.compile false, or checkpointing none or full, strategy each and offload_activations false"),
    idle("loss-chunk", "memory.loss_chunk_tokens", "this model's head does not run inside the loss",
          lambda d: not d.chunked_loss),
)
# fmt: on
