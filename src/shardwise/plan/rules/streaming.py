"""Rules about a stream: what is read while it is trained on has no length, and no place to go back to."""

from __future__ import annotations

from shardwise.job.data_section import ROW_FORMATS
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle

HUB_KEYS = ("dataset_config", "dataset_split", "dataset_revision")
STREAM_KEYS = ("shuffle_buffer_size", "validation_sequences", "on_bad_files", "num_workers", "cache_limit")
STREAMED_FORMATS = ("auto", "jsonl", "parquet", "dataset", "tokens")


def _streams(d: Draft) -> bool:
    return d.data.streaming


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("streaming-source", ("data.streaming", "data.path", "data.dataset"), "a stream is read from one place",
         lambda d: _streams(d) and not d.data.sources and (d.data.path is None) == (d.data.dataset is None),
         fix="set data.path, or data.dataset for a name on the Hub, one of them"),
    Rule("dataset-streaming", ("data.dataset", "data.streaming"), "a data set on the Hub is read as a stream",
         lambda d: d.data.dataset is not None and not _streams(d),
         fix="set data.streaming, or download it and set data.path"),
    Rule("streaming-rows", ("data.streaming", "data.format"),
         "rows of conversations and pairs are packed whole, for which all of their lengths have to be known",
         lambda d: _streams(d) and d.data.format in ROW_FORMATS,
         fix="leave data.streaming out: they are tokenized once"),
    Rule("streaming-format", ("data.streaming", "data.format"), "a stream is read row by row from shards",
         lambda d: _streams(d) and d.data.format not in (*STREAMED_FORMATS, *ROW_FORMATS, "factory"),
         fix="write the documents as JSON lines or Parquet, or leave data.streaming out"),
    Rule("streaming-epochs", ("data.streaming", "training.epochs"), "nobody has counted the samples of a stream",
         lambda d: _streams(d) and d.training.epochs is not None,
         fix="set training.steps; the stream begins again where it ends"),
    Rule("streaming-place", ("data.streaming", "data.validation_split"),
         "a stream has no last sequences that could be held out",
         lambda d: _streams(d) and d.data.validation_split == "place",
         fix="use documents, or leave it out"),
    Rule("streaming-sources", ("data.streaming", "data.sources"), "a stream is one source",
         lambda d: _streams(d) and d.data.sources,
         fix="tokenize the sources before the run: leave data.streaming out"),
    Rule("streaming-filter", ("data.streaming", "data.filter"), "a stream reads each of its rows",
         lambda d: _streams(d) and d.data.filter,
         fix="filter the shards before, or leave data.streaming out"),
    idle("streaming-max-documents", "data.max_documents", "a stream ends with training.steps", _streams,
         "leave it out, or leave data.streaming out"),
    *(idle(f"hub-{key.replace('_', '-')}", f"data.{key}", "it is of a data.dataset",
           lambda d: d.data.dataset is None, "set data.dataset, or leave it out") for key in HUB_KEYS),
    *(idle(f"stream-{key.replace('_', '-')}", f"data.{key}", "it is of a stream",
           lambda d: not _streams(d), "set data.streaming, or leave it out") for key in STREAM_KEYS),
)
# fmt: on
