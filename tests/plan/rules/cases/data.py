"""Cases of the rules in `plan/rules/data.py`."""

from __future__ import annotations

from dataclasses import replace

from shardwise.job.capability import refused
from tests.plan.rules.jobs import CPU4, FACTORY, FACTS, FLAT, SPANS, case

CHAT = {"format": "chat", "path": "p"}
ADDED = {"data": {"added_tokens": ["<a>"]}}
ROWS = replace(FACTS, vocabulary_size=10, parameter_shapes={"embed_in.weight": (10, 12), "norm.weight": (12,)})

SOURCES = {"sources": [{"path": "p"}, {"path": "q"}]}
WEIGHTED = {"sources": [{"path": "p", "weight": 1}, {"path": "q", "weight": 2}]}
AHEAD = {"dpo": {"precompute_reference": True}}
PAIRS = {"path": "p", "format": "preference"}
STREAM = {"path": "p", "streaming": True}
HUB = {"dataset": "org/name", "streaming": True}

STATES = replace(FACTS, documents_apart=refused("its mixer carries a state"))

CASES = {
    **{
        f"sources-{key.replace('_', '-')}": case(
            {"data": {**SOURCES, key: value}}, {"data": SOURCES}, f"{key} is of one corpus"
        )
        for key, value in {
            "path": "p",
            "factory": "a:b",
            "format": "jsonl",
            "field": "body",
            "filter": {"language": "en"},
            "streaming": True,
            "dataset": "org/name",
            "dataset_config": "x",
            "dataset_split": "x",
            "dataset_revision": "x",
        }.items()
    },
    "sources": case(
        {"data": {"sources": [{"path": "p", "weight": 1}, {"path": "q", "repeat": 2}]}}, {"data": WEIGHTED}, "weight"
    ),
    "sources-precomputed": case(
        {"data": {"sources": [PAIRS]}, "training": AHEAD}, {"data": PAIRS, "training": AHEAD}, "of one corpus"
    ),
    "curriculum": case(
        {"data": {"curriculum": [{"samples": 10, "weights": {"p": 1, "q": 1}}]}},
        {"data": {**WEIGHTED, "curriculum": [{"samples": 10, "weights": {"p": 1, "q": 1}}]}},
        "there are none",
    ),
    "change-sources": case(
        {"checkpoint": {"change_sources": True}},
        {"checkpoint": {"change_sources": True}, "data": WEIGHTED},
        "there are none",
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
            "filter": {"language": "en"},
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
    "data-factory-added-tokens": case(
        {"data": {"factory": "a:b", "added_tokens": ["<a>"]}},
        {"data": {"tokenizer": "t", "added_tokens": ["<a>"]}},
        "returns tensors",
    ),
    "added-tokens": case(
        {"data": {"added_tokens": ["<a>"]}}, {"data": {"added_tokens": ["<a>"], "tokenizer": "t"}}, "set data.tokenizer"
    ),
    "added-tokens-frozen": case(
        {**ADDED, "model": {"path": "m", "freeze": ["embed_in"]}},
        {**ADDED, "model": {"path": "m"}},
        "leave them out of model.freeze",
        CPU4,
        replace(ROWS, frozen=frozenset({"embed_in.weight"})),
        ROWS,
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
    "logits": case(
        {"data": {"sequence_length": 512}},
        {"data": {"sequence_length": 256}},
        "has logits for 256 positions, however many tokens; use 256",
        CPU4,
        replace(FACTS, fixed_logits=256),
    ),
    "class-loss": case(
        {"data": {"factory": "m:f"}},
        {"data": {"factory": "m:f"}, "model": {"factory": "a:b", "loss": "m:f"}},
        "is no mean cross-entropy of its logits; give the module by model.factory and its loss",
        CPU4,
        replace(FACTS, given_labels="other"),
    ),
    **{
        f"data-{key.replace('_', '-')}": case(
            {"data": {"path": "p", key: value}}, {"data": {**CHAT, key: value}}, "set data.format to chat"
        )
        for key, value in {"chat_template": "t", "train_on": "all", "packing": False, "truncation": True}.items()
    },
    "train-on": case(
        {"data": {**CHAT, "train_on": "completion"}},
        {"data": {**CHAT, "train_on": "last_assistant"}},
        "use data.train_on auto, assistant, last_assistant or all",
    ),
    "rows-task": case({"data": CHAT, "model": {"task": "masked_lm"}}, {"data": CHAT}, "model.task causal_lm"),
    "rows-own-loss": case(
        {"data": CHAT, **FACTORY}, {"data": CHAT, "model": {"factory": "a:b", "loss": "a:c"}}, "model.loss", CPU4, FLAT
    ),
    "rows-isolate-documents": case({"data": {**CHAT, "isolate_documents": True}}, {"data": CHAT}, "always isolated"),
    "rows-field": case({"data": {**CHAT, "field": "body"}}, {"data": CHAT}, "field=body"),
    "rows-window": case(
        {"data": {**CHAT, "sequence_length": 65}},
        {"data": {**CHAT, "sequence_length": 65, "packing": False}},
        "sliding window of 64; use packing false",
        CPU4,
        replace(FACTS, sliding_window=64),
    ),
    "documents-window": case(
        {"data": {"isolate_documents": True, "sequence_length": 65}},
        {"data": {"isolate_documents": True, "sequence_length": 64}},
        "sliding window of 64; use isolate_documents false",
        CPU4,
        replace(FACTS, sliding_window=64),
    ),
    "rows-apart": case(
        {"data": CHAT}, {"data": {**CHAT, "packing": False}}, "mixer carries a state; use packing false", CPU4, STATES
    ),
    "documents-apart": case(
        {"data": {"isolate_documents": True}}, {}, "mixer carries a state; use isolate_documents false", CPU4, STATES
    ),
    "streaming-source": case({"data": STREAM | {"dataset": "org/name"}}, {"data": STREAM}, "one of them"),
    "dataset-streaming": case({"data": {"dataset": "org/name"}}, {"data": HUB}, "set data.streaming"),
    "streaming-rows": case({"data": STREAM | {"format": "chat"}}, {"data": {"path": "p", "format": "chat"}}, "chat"),
    "streaming-format": case(
        {"data": STREAM | {"format": "text"}}, {"data": STREAM | {"format": "jsonl"}}, "write the documents"
    ),
    "streaming-epochs": case(
        {"data": STREAM, "training": {"epochs": 2}}, {"data": {"path": "p"}, "training": {"epochs": 2}}, "epochs=2"
    ),
    "streaming-place": case(
        {"data": STREAM | {"validation_split": "place"}},
        {"data": STREAM | {"validation_split": "documents"}},
        "use documents",
    ),
    "streaming-filter": case(
        {"data": STREAM | {"filter": {"a": 1}}}, {"data": {"path": "p", "filter": {"a": 1}}}, "each of its rows"
    ),
    "streaming-max-documents": case(
        {"data": STREAM | {"max_documents": 7}}, {"data": {"path": "p", "max_documents": 7}}, "max_documents=7"
    ),
    **{
        f"hub-{key.replace('_', '-')}": case(
            {"data": STREAM | {key: "x"}}, {"data": HUB | {key: "x"}}, "set data.dataset"
        )
        for key in ("dataset_config", "dataset_split", "dataset_revision")
    },
    **{
        f"stream-{key.replace('_', '-')}": case(
            {"data": {"path": "p", key: value}}, {"data": STREAM | {key: value}}, "set data.streaming"
        )
        for key, value in {
            "shuffle_buffer_size": 7,
            "validation_sequences": 7,
            "on_bad_files": "skip",
            "num_workers": 2,
            "cache_limit": 7,
        }.items()
    },
}
