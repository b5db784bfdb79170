"""Rules about context parallelism: which models, methods and degrees can split a sequence."""

from __future__ import annotations

from math import gcd

from shardwise.job.axes import Axis
from shardwise.plan.draft import Draft
from shardwise.plan.rules.data import data_from_factory
from shardwise.plan.rules.rule import Rule, idle
from shardwise.words import divisors, one_of

CONTEXT_DEGREE, CONTEXT_METHOD = "parallel.context_parallel_degree", "parallel.context_parallel_method"


def context_method(d: Draft) -> str:
    """Return the method that is asked for, `auto` included; empty where sequences are whole."""
    return d.parallel.context_parallel_method if d.parallel.context_parallel_degree > 1 else ""


def _splits_blocks(d: Draft) -> bool:
    """Tell whether blocks are given parts of sequences that the model is given whole."""
    return d.parallel.context_parallel_degree > 1 and d.facts.split_forward is not None


def _common_heads(d: Draft) -> int:
    return gcd(d.facts.attention_heads, d.facts.key_value_heads)


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("context-model", (CONTEXT_DEGREE,),
         "every look at another position has to go through transformers' AttentionInterface",
         lambda d: d.parallel.context_parallel_degree > 1 and not d.facts.supports(Axis.CONTEXT).ok,
         fix="use 1",
         because=lambda d: d.facts.supports(Axis.CONTEXT).reason),
    Rule("context-data", (CONTEXT_DEGREE, "data.factory", "model.task"),
         "sequences of tokens are split, and samples of a factory or of files may be others",
         lambda d: d.parallel.context_parallel_degree > 1 and (data_from_factory(d) or d.reads_files),
         fix="use context_parallel_degree 1, or data.path with text"),
    idle("context-method", CONTEXT_METHOD, "sequences are whole",
         lambda d: d.parallel.context_parallel_degree == 1, "set context_parallel_degree, or leave it out"),
    Rule("context-heads", (CONTEXT_DEGREE, CONTEXT_METHOD), "ulysses shares the heads among the ranks",
         lambda d: context_method(d) == "ulysses" and not d.heads_divide,
         fix="use all_gather or ring, or a degree that divides the heads",
         because=lambda d: f"tensor x context does not divide the {d.facts.attention_heads} attention heads and "
         f"{d.facts.key_value_heads} key-value heads",
         use=lambda d: f"use all_gather or ring, or a product of the degrees of {one_of(divisors(_common_heads(d)))}"),
    Rule("context-arguments", (CONTEXT_METHOD,),
         "ulysses and ring know attention of scale, masks, dropout and biases of keys alone",
         lambda d: context_method(d) in ("ulysses", "ring") and d.facts.own_attention_arguments,
         fix="use all_gather",
         because=lambda d: f"this model's attention also takes {', '.join(d.facts.own_attention_arguments)}"),
    Rule("context-blocks-method", (CONTEXT_METHOD,), "a model whose inputs cannot be split gathers rows for attention",
         lambda d: context_method(d) in ("ulysses", "ring") and _splits_blocks(d),
         fix="use auto or all_gather"),
    Rule("context-blocks-pipeline", (CONTEXT_DEGREE, "parallel.pipeline_parallel_degree"),
         "a model whose inputs cannot be split makes masks and positions of whole sequences for blocks of one stage",
         lambda d: _splits_blocks(d) and d.parallel.pipeline_parallel_degree > 1,
         fix="use one of them at 1"),
    Rule("context-blocks-sequence", (CONTEXT_DEGREE, "parallel.sequence_parallel"),
         "tensor ranks share no positions of a model whose blocks gather rows",
         lambda d: _splits_blocks(d) and d.sequence_parallel,
         fix="use sequence_parallel false"),
    Rule("context-blocks-compile", (CONTEXT_DEGREE, "model.compile"),
         "blocks that gather rows of whole sequences are no one graph",
         lambda d: _splits_blocks(d) and d.model.compile,
         fix="use model.compile false"),
    Rule("context-blocks-documents", (CONTEXT_DEGREE, "data.isolate_documents", "data.packing"),
         "a model whose inputs cannot be split is tried without a mask of documents",
         lambda d: _splits_blocks(d) and d.job.isolates_documents,
         fix="use isolate_documents false (packing false of rows), or context_parallel_degree 1"),
    Rule("context-blocks-attention", (CONTEXT_DEGREE, "model.attention"),
         "attention of some queries and all keys is given masks, which flash attention does not take",
         lambda d: _splits_blocks(d) and d.model.attention.startswith("flash"),
         fix="use model.attention auto"),
    Rule("context-kernel", (CONTEXT_METHOD, "model.attention"), "a ring is a kernel of its own",
         lambda d: context_method(d) == "ring" and d.model.attention not in ("auto", "eager", "sdpa"),
         fix="use model.attention auto"),
    Rule("context-dropout", (CONTEXT_METHOD, "model.attention"), "a ring drops attention in eager arithmetic only",
         lambda d: context_method(d) == "ring" and d.facts.has_attention_dropout and not d.exact_dropout,
         fix="use model.attention eager, or all_gather"),
    Rule("context-shard", (CONTEXT_DEGREE, "parallel.sharded_data_parallel_degree"),
         "parameters are sharded over the context ranks too",
         lambda d: d.sharded % d.parallel.context_parallel_degree,
         fix="use a sharded_data_parallel_degree that is a multiple of the context degree, or leave it out"),
)
# fmt: on
