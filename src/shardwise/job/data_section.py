"""The `data` section of a Job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from shardwise.job.section import Section, UserPath
from shardwise.job.values import OwnObject, Positive, SetName

DataFormat = Literal[
    "auto", "stdlib", "text", "jsonl", "csv", "parquet", "dataset", "tokens", "factory", "chat", "prompt_completion",
    "preference", "image_folder",
]  # fmt: skip
SourceFormat = Literal[
    "auto", "stdlib", "text", "jsonl", "csv", "parquet", "dataset", "tokens", "chat", "prompt_completion", "preference"
]
ROW_FORMATS = ("chat", "prompt_completion", "preference")  # rows of conversations and pairs, some tokens trained on
STREAMED_FORMATS = ("auto", "jsonl", "parquet", "dataset", "tokens")
Weight = Annotated[float, Field(ge=0, strict=True)]
Plain = str | int | float | bool
Filter = OwnObject | dict[str, Plain | list[Plain] | dict[Literal["min", "max"], float]] | None


class DataSource(Section):
    """One of several corpora that are trained on together."""

    name: SetName | None = Field(
        default=None,
        description="Of its metric `validation_loss/NAME`, its counts and its state in checkpoints; unset: the last "
        "part of `path` without its ending, or of `dataset`.",
    )
    path: UserPath | None = Field(default=None, description="As `data.path`.")
    format: SourceFormat = Field(default="auto", description="As `data.format`. All sources hold documents, or rows.")
    field: str = Field(default="text", description="Column that holds the text.")
    filter: Filter = Field(default=None, description="As `data.filter`.")
    streaming: bool = Field(
        default=False,
        description="As `data.streaming`: it is read while the model is trained. Every source then has a weight. The "
        "keys of streams beside `sources` are for each of them.",
    )
    dataset: str | None = Field(default=None, min_length=1, description="As `data.dataset`.")
    dataset_config: str | None = Field(default=None, description="As `data.dataset_config`.")
    dataset_split: str = Field(default="train", min_length=1, description="As `data.dataset_split`.")
    dataset_revision: str | None = Field(default=None, description="As `data.dataset_revision`.")
    weight: Weight | None = Field(
        default=None,
        description="Its share of the samples, relative to the weights of the others; it is read as often as needed.",
    )
    repeat: Annotated[float, Field(gt=0, strict=True)] | None = Field(
        default=None,
        description="Passes through it, in the place of `weight`: the samples of all sources together are then an "
        "epoch, which ends. Without either key in any source: each by its size.",
    )

    @property
    def label(self) -> str:
        """Its name, given or made of its path; empty where there is none."""
        if self.name is not None:
            return self.name
        if self.dataset is not None:
            return self.dataset.rpartition("/")[2]
        return self.format if self.path is None else Path(self.path.rpartition(":")[2]).name.partition(".")[0]


class CurriculumStage(Section):
    """The weights of sources from some sample of the run on."""

    samples: Positive | None = Field(
        default=None, strict=True, description="The first sample that has these weights, from 0."
    )
    tokens: Positive | None = Field(
        default=None,
        strict=True,
        description="The same in tokens, `data.sequence_length` for each sample; rounded up to whole samples.",
    )
    weights: dict[SetName, Weight] = Field(
        description="Name of a source -> its `weight` from there on. Sources that are not named keep theirs."
    )


class DataSection(Section):
    """The corpus that the model is trained on."""

    path: UserPath | None = Field(
        default=None,
        description="File, directory or glob; a directory or URL of `shardwise data prepare`; or "
        "`package.module:function` of your own that returns rows. Unset with `format: auto`: `stdlib`.",
    )
    format: DataFormat = Field(
        default="auto",
        description="`stdlib`: the Python standard library's sources; `text`, `jsonl`, `csv` (`.tsv` too), `parquet`; "
        "`dataset`: a local directory of `datasets.save_to_disk`; `tokens`: rows with an `input_ids` list (jsonl, "
        "parquet or a saved dataset); `factory`: a map-style dataset of your own. Rows of the same files, found by "
        "their columns: `chat` (`messages`, or `conversations` of ShareGPT), `prompt_completion`, `preference` "
        "(`chosen`, `rejected`). `image_folder`: a directory with a folder of images for each class.",
    )
    factory: str | None = Field(
        default=None,
        description="`package.module:function` returning a map-style dataset of dicts of equally shaped tensors.",
    )
    factory_arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of `factory`.")
    field: str = Field(default="text", description="Column that holds the text.")
    filter: Filter = Field(
        default=None,
        description="Rows that are read, if not all: `package.module:function` of your own, which is called with each "
        "row as a dict and returns true or false; or column -> its value, a list of values, or `{min: 0.5, max: 3}`, "
        "all of which have to hold.",
    )
    sources: list[DataSource] = Field(
        default=[],
        description="Several corpora that are trained on together, in the place of `path`. Which of them a sample is "
        "of, and which of its sequences, follows from `training.seed` and the sample's number alone.",
    )
    curriculum: list[CurriculumStage] = Field(
        default=[], description="Other weights of the `sources` from some sample on, in ascending order."
    )
    streaming: bool = Field(
        default=False,
        description="The source is read, tokenized and shuffled while the model is trained on it, not tokenized whole "
        "before: JSON lines, Parquet, WebDataset tars (`.tar`) or saved data sets, in a directory, a "
        "glob, at a URL that fsspec opens, or a `dataset` of the Hub.",
    )
    dataset: str | None = Field(
        default=None,
        min_length=1,
        description="Name of a data set on the Hugging Face Hub, `org/name`, in the place of `path`; needs "
        "`streaming`. `HF_ENDPOINT` names another server.",
    )
    dataset_config: str | None = Field(default=None, description="Config of `dataset`; unset: its default.")
    dataset_split: str = Field(default="train", min_length=1, description="Split of `dataset` that is read.")
    dataset_revision: str | None = Field(
        default=None, description="Branch, tag or commit of `dataset`; unset: its main branch as it is now."
    )
    shuffle_buffer_size: Positive = Field(
        default=1024,
        description="Rows of a stream that are shuffled together; its shards are shuffled too. 1: rows stay in order.",
    )
    validation_sequences: Positive = Field(
        default=256,
        description="At most so many sequences of a stream are validated with: the first of the documents that are "
        "held out, a share `validation_fraction` of all.",
    )
    on_bad_files: Literal["error", "skip"] = Field(
        default="error",
        description="A shard of a stream that cannot be read further ends the run, or the rest of it is passed over, "
        "counted and named.",
    )
    num_workers: Positive | None = Field(
        default=None, description="Processes on each host that tokenize a stream; unset: half the cores, 8 at most."
    )
    cache_limit: Positive = Field(
        default=1 << 28, description="Bytes of tokens of a stream that each host keeps ahead on its disk."
    )
    tokenizer: UserPath | None = Field(
        default=None,
        description="Directory of a tokenizer; unset: the model directory's, or a byte-level BPE trained here, on "
        "equally much of each source.",
    )
    processor: UserPath | dict[str, Any] | None = Field(
        default=None,
        description="Of tasks that read files: the directory with the `preprocessor_config.json` by which images or "
        "sound become tensors, or what is in that file; unset: the model directory's.",
    )
    vocabulary_size: Positive = Field(default=4096, description="Vocabulary of a tokenizer trained here.")
    added_tokens: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[],
        description="Tokens that the tokenizer of `tokenizer` or of the model directory gets besides. A model with too "
        "few embeddings for them gets more, drawn around the mean of its own as `resize_token_embeddings` does.",
    )
    sequence_length: Positive = Field(default=256, description="Tokens in one sequence.")
    isolate_documents: bool = Field(
        default=False, description="No attention across the documents packed into one sequence."
    )
    chat_template: UserPath | None = Field(
        default=None, description="File with a Jinja chat template; unset: the tokenizer's own."
    )
    train_on: Literal["auto", "assistant", "last_assistant", "completion", "all"] = Field(
        default="auto",
        description="Tokens of a row that are trained on: what the `assistant` says, its last message alone, the "
        "`completion` of a pair, or all. `auto`: assistant for `chat`, else completion.",
    )
    packing: bool = Field(
        default=True,
        description="Rows are packed whole into sequences by first fit, isolated from each other; or one stands in "
        "each, with padding. A pair of `dpo` is one row, with both of its completions.",
    )
    truncation: bool = Field(
        default=False,
        description="Rows longer than a sequence are cut to it; else they are left out. Of a pair of `dpo` each "
        "completion with its prompt is cut to half a sequence, or to what the other leaves.",
    )
    validation_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="Share of sequences, or of rows, kept for validation."
    )
    validation_split: Literal["auto", "documents", "place"] = Field(
        default="auto",
        description="What is kept for validation: `documents` (or rows) drawn by a hash of each with `training.seed`, "
        "or the last sequences (or rows) by `place`. `auto`: documents, but place for a `factory`.",
    )
    mask_probability: float = Field(
        default=0.15, gt=0, lt=1, description="Share of tokens masked for `masked_lm`, or left out for `seq2seq_lm`."
    )
    mean_span_length: float = Field(
        default=3.0, ge=1, description="Tokens of a span that is left out for `seq2seq_lm`, in the mean."
    )
    max_documents: Positive | None = Field(
        default=None, description="Read only the first so many documents or rows, of each of several sources."
    )
    cache_directory: UserPath | None = Field(
        default=None, description="Where tokenizers and tokens are cached; unset: `$XDG_CACHE_HOME/shardwise`."
    )

    @property
    def has_streams(self) -> bool:
        """True where the data, or one of the sources, are read while the model is trained on them."""
        return self.streaming or any(source.streaming for source in self.sources)

    @property
    def row_formats(self) -> list[str]:
        """The formats of rows that are given or have been found: of the data, or of each source."""
        formats: list[str] = [source.format for source in self.sources] or [self.format]
        return [name for name in dict.fromkeys(formats) if name in ROW_FORMATS]

    @property
    def has_rows(self) -> bool:
        """True for rows of conversations or pairs, whose format is given or has been found."""
        return bool(self.row_formats)

    @property
    def trained_part(self) -> str:
        """`train_on` with `auto` resolved."""
        if self.train_on != "auto":
            return self.train_on
        return "assistant" if self.format == "chat" else "completion"
