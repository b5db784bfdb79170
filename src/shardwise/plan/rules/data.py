"""Rules about the corpus: where samples come from, and whether they suit the model."""

from __future__ import annotations

from functools import partial

from shardwise.job.data_section import ROW_FORMATS, STREAMED_FORMATS
from shardwise.job.mixture import HUB_KEYS, fault_of
from shardwise.model.added_tokens import frozen_embeddings
from shardwise.model.class_loss import OTHER
from shardwise.plan.draft import Draft, changed
from shardwise.plan.rules.rule import Rule, idle
from shardwise.words import one_of

DATA_FILES = ("text", "jsonl", "csv", "parquet", "dataset", "tokens", "image_folder", *ROW_FORMATS)
ROW_KEYS = ("chat_template", "train_on", "packing", "truncation")
TRAINABLE_PARTS = {  # of the rows of each format
    "chat": ("auto", "assistant", "last_assistant", "all"),
    "prompt_completion": ("auto", "completion", "all"),
    "preference": ("auto", "completion"),
}
TEXT_KEYS = ("tokenizer", "vocabulary_size", "added_tokens", "field", "isolate_documents", "max_documents", "filter")

STREAM_KEYS = ("shuffle_buffer_size", "validation_sequences", "on_bad_files", "num_workers", "cache_limit")


def data_from_factory(d: Draft) -> bool:
    """Return whether samples come from `data.factory`."""
    return d.data.factory is not None


def _hidden_by_model(d: Draft) -> tuple[str, int]:
    """Return what the model's own mask hides that one of documents would not, and its length; ("", 0) for nothing.

    Kernels keep a window beside documents. Chunks are counted in a sequence; in a document alone they begin with it.
    """
    chunks = [call.chunk for call in d.facts.attention if call.chunk]
    hidden = [("chunks", min(chunks))] if chunks else []
    if d.facts.sliding_window and not d.uses_kernels:
        hidden.append(("sliding window", d.facts.sliding_window))
    shortest = min(hidden, key=lambda one: one[1], default=("", 0))
    return shortest if shortest[1] < d.data.sequence_length else ("", 0)


def _isolates_rows(d: Draft) -> bool:
    return d.data.has_rows and d.job.isolates_documents


def _shorter(d: Draft) -> str:
    return f"a sequence_length of at most {_hidden_by_model(d)[1]}"


def _replaced(d: Draft) -> str:
    name, length = _hidden_by_model(d)
    return f"would replace the model's {name} of {length}"


def _thaw(d: Draft) -> str:
    """Return the way to train the embeddings of a job that freezes them."""
    if not d.facts.adapters:
        return "leave them out of model.freeze"
    names = [name for first in frozen_embeddings(d.facts) for name in d.facts.names_of(first)]
    modules = sorted({name.rpartition(".")[0].rpartition(".")[2] for name in names})
    return f"set adapter.modules_to_save to {[*d.adapter.modules_to_save, *modules]}"


def _trains_other_part(d: Draft) -> bool:
    return any(d.data.train_on not in TRAINABLE_PARTS[name] for name in d.data.row_formats)


def _parts_of_all(d: Draft) -> list[str]:
    """The values of train_on that all formats of the rows have."""
    first, *others = (TRAINABLE_PARTS[name] for name in d.data.row_formats)
    return [part for part in first if all(part in parts for parts in others)]


def _because(d: Draft) -> str:
    fault = fault_of(d.job)
    return fault.because if fault else ""


def _way_out(d: Draft) -> str:
    fault = fault_of(d.job)
    return fault.fix if fault else ""


def _is_beside_sources(key: str, draft: Draft) -> bool:
    return bool(draft.data.sources and changed(draft.job, f"data.{key}"))


def _streams(d: Draft) -> bool:
    return d.data.has_streams


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("one-corpus", ("data.path", "data.factory"), "data comes from one of them",
         lambda d: d.data.path is not None and data_from_factory(d),
         fix="keep one"),
    *(Rule(f"sources-{key.replace('_', '-')}", (f"data.{key}", "data.sources"),
           f"{key} is of one corpus, and each of the sources has its own",
           partial(_is_beside_sources, key),
           fix="leave one out" if key in ("path", "factory") else f"leave data.{key} out, and give it to a source")
      for key in ("path", "factory", "format", "field", "filter", "streaming", "dataset", *HUB_KEYS)),
    Rule("sources", ("data.sources",), "sources have names, and all of them weights or all of them passes",
         lambda d: fault_of(d.job) is not None,
         fix="give each a name, and weight or repeat to all",
         because=_because,
         use=_way_out),
    Rule("sources-precomputed", ("training.dpo.precompute_reference", "data.sources"),
         "a reference is run ahead of training for the pairs of one corpus",
         lambda d: d.data.sources and d.training.dpo.precompute_reference,
         fix="leave precompute_reference out"),
    idle("curriculum", "data.curriculum", "it changes the weights of data.sources, and there are none",
         lambda d: not d.data.sources),
    idle("change-sources", "checkpoint.change_sources", "it is of data.sources, and there are none",
         lambda d: not d.data.sources),
    Rule("data-factory-format", ("data.format", "data.factory"), "a data.factory has no other format",
         lambda d: data_from_factory(d) and d.data.format not in ("auto", "factory"),
         fix="use format factory"),
    Rule("data-format-factory", ("data.format", "data.factory"), "format factory needs a data.factory",
         lambda d: d.data.format == "factory" and not data_from_factory(d),
         fix="set data.factory"),
    idle("data-factory-arguments", "data.factory_arguments", "there is no data.factory to take them",
          lambda d: not data_from_factory(d), "set data.factory or leave it out"),
    Rule("data-path", ("data.format", "data.path"), "this format is read from a path",
         lambda d: d.data.format in DATA_FILES and d.data.path is None,
         fix="set data.path"),
    Rule("stdlib-path", ("data.format", "data.path"), "format stdlib reads Python's own sources and no path",
         lambda d: d.data.format == "stdlib" and d.data.path is not None,
         fix="use format auto, or leave data.path out"),
    *(idle(f"data-factory-{key.replace('_', '-')}", f"data.{key}",
           "a data.factory returns tensors, there is no text to read", data_from_factory) for key in TEXT_KEYS),
    Rule("data-factory-tokens", ("training.tokens_per_step", "data.factory"), "its samples have no tokens",
         lambda d: data_from_factory(d) and d.training.tokens_per_step is not None,
         fix="give training.sequences_per_step, the samples of a step"),
    idle("vocabulary-size", "data.vocabulary_size", "no tokenizer is trained, since data.tokenizer is given",
          lambda d: d.data.tokenizer is not None, "leave one of them out"),
    idle("vocabulary-size-tokens", "data.vocabulary_size", "data.format tokens trains no tokenizer",
          lambda d: d.data.format == "tokens", "leave it out; the model's vocabulary is in model.config"),
    idle("added-tokens", "data.added_tokens", "a tokenizer that is trained here holds what the text has",
         lambda d: d.data.tokenizer is None and d.model.path is None, "set data.tokenizer or model.path"),
    Rule("added-tokens-frozen", ("data.added_tokens", "adapter.modules_to_save", "model.freeze"),
         "embeddings of added tokens have to be trained: they start as the mean of all",
         lambda d: d.data.added_tokens and frozen_embeddings(d.facts),
         fix="name the embeddings in adapter.modules_to_save, or leave them out of model.freeze",
         because=lambda d: f"{frozen_embeddings(d.facts)[0]} is frozen, and its rows of added tokens would stay what "
         "they start as, the mean of all",
         use=_thaw),
    idle("mask-probability", "data.mask_probability", "only model.task masked_lm and seq2seq_lm mask tokens",
          lambda d: d.model.task not in ("masked_lm", "seq2seq_lm"), "use one of these, or leave it out"),
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
         lambda d: d.facts.max_positions is not None and d.data.sequence_length > d.facts.max_positions
         and d.model.task != "image_classification",  # whose rows have no text, though SigLIP's config has one of it
         fix="use a shorter sequence",
         because=lambda d: f"longer than the model's {d.facts.max_positions} positions",
         use=lambda d: f"use at most {d.facts.max_positions}"),
    Rule("logits", ("data.sequence_length",), "the loss asks for the logits of each token",
         lambda d: d.data.factory is None and d.facts.fixed_logits not in (0, d.data.sequence_length),
         fix="use as many tokens as the model has logits",
         because=lambda d: f"{d.facts.family} has logits for {d.facts.fixed_logits} positions, however many tokens",
         use=lambda d: f"use {d.facts.fixed_logits}"),
    Rule("class-loss", ("data.factory",), "labels of samples count as the model's class counts them",
         lambda d: d.data.factory is not None and d.model.loss is None and d.facts.returns_logits
         and not d.facts.classifies and d.facts.given_labels == OTHER,
         fix="give the module by model.factory and its loss by model.loss=package.module:function",
         because=lambda d: f"the loss of {d.facts.family}'s class is no mean cross-entropy of its logits"),
    *(idle(f"data-{key.replace('_', '-')}", f"data.{key}", "it is for rows of conversations and pairs",
           lambda d: not d.data.has_rows,
           "set data.format to chat, prompt_completion or preference, or leave it out") for key in ROW_KEYS),
    Rule("train-on", ("data.format", "data.train_on"), "a format has parts of its own that can be trained on",
         _trains_other_part,
         fix="use data.train_on auto",
         use=lambda d: f"use data.train_on {one_of(_parts_of_all(d))}"),
    Rule("rows-task", ("data.format", "model.task"), "what is trained on are next tokens of a causal language model",
         lambda d: d.data.has_rows and d.task.labels != "next",
         fix="use model.task causal_lm, or image_text_to_text for rows with images"),
    Rule("rows-own-loss", ("data.format", "model.factory"),
         "a module's own mean loss has no value for a microbatch in which no token is trained on",
         lambda d: d.data.has_rows and d.model.loss is None and not d.facts.returns_logits,
         fix="set model.loss=package.module:function(output, batch) -> (sum, count)"),
    idle("rows-isolate-documents", "data.isolate_documents", "packed rows are always isolated from each other",
         lambda d: d.data.has_rows, "leave it out, or set data.packing to false"),
    idle("rows-field", "data.field", "the columns of conversations and pairs have names of their own",
         lambda d: d.data.has_rows, "leave it out, and rename the columns"),
    Rule("rows-window", ("data.packing", "data.sequence_length"),
         "the mask of rows takes the place of the model's own, which then must not hide more than it",
         lambda d: _isolates_rows(d) and _hidden_by_model(d)[1],
         fix="use packing false, or a sequence within the window",
         because=lambda d: f"the rows' mask {_replaced(d)}",
         use=lambda d: f"use {'' if d.job.reads_pairs else 'packing false, or '}{_shorter(d)}"),
    Rule("documents-window", ("data.isolate_documents", "data.sequence_length"),
         "the mask of documents takes the place of the model's own, which then must not hide more than it",
         lambda d: d.data.isolate_documents and _hidden_by_model(d)[1],
         fix="use isolate_documents false, or a sequence within the window",
         because=lambda d: f"the documents' mask {_replaced(d)}",
         use=lambda d: f"use isolate_documents false, or {_shorter(d)}"),
    Rule("rows-apart", ("training.objective", "data.packing"),
         "masks of attention keep rows and answers of one sequence apart, so that there is no other look at positions",
         lambda d: _isolates_rows(d) and not d.facts.documents_apart.ok,
         fix="use packing false, without pairs of answers",
         because=lambda d: d.facts.documents_apart.reason,
         use=lambda d: f"use {'objective sft with ' if d.job.reads_pairs else ''}packing false"),
    Rule("documents-apart", ("data.isolate_documents",),
         "masks of attention keep documents of one sequence apart, so that there is no other look at positions",
         lambda d: d.data.isolate_documents and not d.facts.documents_apart.ok,
         fix="use isolate_documents false",
         because=lambda d: d.facts.documents_apart.reason),

    # A stream is read while it is trained on: it has no length, and no place to go back to.
    Rule("streaming-source", ("data.streaming", "data.path", "data.dataset"), "a stream is read from one place",
         lambda d: d.data.streaming and not d.data.sources and (d.data.path is None) == (d.data.dataset is None),
         fix="set data.path, or data.dataset for a name on the Hub, one of them"),
    Rule("dataset-streaming", ("data.dataset", "data.streaming"), "a data set on the Hub is read as a stream",
         lambda d: d.data.dataset is not None and not d.data.streaming and not d.data.sources,
         fix="set data.streaming, or download it and set data.path"),
    Rule("streaming-rows", ("data.streaming", "data.format"),
         "rows of conversations and pairs are packed whole, for which all of their lengths have to be known",
         lambda d: d.data.streaming and d.data.format in ROW_FORMATS,
         fix="leave data.streaming out: they are tokenized once"),
    Rule("streaming-format", ("data.streaming", "data.format"), "a stream is read row by row from shards",
         lambda d: d.data.streaming and d.data.format not in (*STREAMED_FORMATS, *ROW_FORMATS, "factory"),
         fix="write the documents as JSON lines or Parquet, or leave data.streaming out"),
    Rule("streaming-epochs", ("data.streaming", "training.epochs"), "nobody has counted the samples of a stream",
         lambda d: _streams(d) and d.training.epochs is not None,
         fix="set training.steps; the stream begins again where it ends"),
    Rule("streaming-place", ("data.streaming", "data.validation_split"),
         "a stream has no last sequences that could be held out",
         lambda d: _streams(d) and d.data.validation_split == "place",
         fix="use documents, or leave it out"),
    Rule("streaming-filter", ("data.streaming", "data.filter"), "a stream reads each of its rows",
         lambda d: d.data.streaming and d.data.filter,
         fix="filter the shards before, or leave data.streaming out"),
    idle("streaming-max-documents", "data.max_documents", "a stream ends with training.steps", _streams,
         "leave it out, or leave data.streaming out"),
    *(idle(f"hub-{key.replace('_', '-')}", f"data.{key}", "it is of a data.dataset",
           lambda d: d.data.dataset is None and not d.data.sources,
           "set data.dataset, or leave it out") for key in HUB_KEYS),
    *(idle(f"stream-{key.replace('_', '-')}", f"data.{key}", "it is of a stream",
           lambda d: not _streams(d), "set data.streaming, or leave it out") for key in STREAM_KEYS),
)
# fmt: on
