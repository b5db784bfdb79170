"""Rules about tasks whose samples are rows that name files: images with a class, sound with its text, chats."""

from __future__ import annotations

from functools import partial

from shardwise.job.tasks import FILE_FORMATS
from shardwise.plan.draft import Draft
from shardwise.plan.rules.rule import Rule, idle
from shardwise.words import one_of

UNREAD: dict[str, tuple[str, ...]] = {  # keys of text -> what of these tasks reads them; of the others nothing does
    "vocabulary_size": (),
    "added_tokens": (),
    "isolate_documents": (),
    "tokenizer": ("speech",),
    "field": ("speech",),
}


def _has_other_format(d: Draft) -> bool:
    return d.reads_files and d.data.format not in ("auto", *FILE_FORMATS[d.task.samples])


def _streams(d: Draft) -> bool:
    return d.reads_files and bool(d.data.sources or d.data.has_streams)


def _leaves_unread(key: str, d: Draft) -> bool:
    return d.reads_files and d.task.samples not in UNREAD[key]


def _counts_tokens(d: Draft) -> bool:
    training = d.training
    return bool(training.tokens_per_step or any(stage.until_tokens for stage in training.batch_size_schedule))


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("files-sources", ("model.task", "data.sources", "data.streaming"),
         "rows that name files are one corpus, known before training", _streams,
         fix="give one data.path, and no streaming"),
    Rule("files-path", ("model.task", "data.path"), "its samples are rows that name files",
         lambda d: d.reads_files and d.data.path is None,
         fix="set data.path, or data.factory to samples of your own"),
    Rule("files-format", ("model.task", "data.format"), "a task reads rows of its own", _has_other_format,
         fix="use auto",
         use=lambda d: f"use auto, {one_of(FILE_FORMATS[d.task.samples])}"),
    Rule("image-folder", ("data.format", "model.task"), "folders of images are read to classify them",
         lambda d: d.data.format == "image_folder" and d.task.samples != "images",
         fix="use model.task image_classification, or another format"),
    Rule("image-tokens", ("model.task", "training.tokens_per_step", "training.batch_size_schedule"),
         "images to be classified have no tokens",
         lambda d: d.reads_files and d.task.samples == "images" and _counts_tokens(d),
         fix="give training.sequences_per_step, and until_samples"),
    Rule("image-packing", ("model.task", "data.packing"), "rows with images stand one in each sequence, with padding",
         lambda d: d.reads_files and d.task.samples == "chat" and d.data.packing,
         fix="set data.packing to false"),
    Rule("image-truncation", ("model.task", "data.truncation"), "a cut row would lack tokens of its images",
         lambda d: d.reads_files and d.task.samples == "chat" and d.data.truncation,
         fix="use a longer data.sequence_length, or smaller images"),
    Rule("processor-directory", ("model.task", "data.processor"), "texts and images share a processor with a tokenizer",
         lambda d: d.reads_files and d.task.samples == "chat" and isinstance(d.data.processor, dict),
         fix="give the directory that holds it"),
    idle("processor", "data.processor", "only tasks that read files of images or of sound have a processor",
         lambda d: not d.reads_files),
    *(idle(f"files-{key.replace('_', '-')}", f"data.{key}", "the task reads files by its processor",
           partial(_leaves_unread, key)) for key in UNREAD),
)
# fmt: on
