"""Cases of the rules in `plan/rules/file_rows.py`."""

from __future__ import annotations

from typing import Any

from tests.plan.rules.jobs import case

SEES, HEARS, TALKS = "image_classification", "speech_seq2seq", "image_text_to_text"


def files(task: str, model: dict[str, Any] | None = None, training: dict[str, Any] | None = None, **data: Any) -> Any:
    """Return a job of a task that reads files."""
    own = {"format": "chat", "packing": False} if task == TALKS else {}
    data = {"path": "rows", **own, **data}
    return {"model": {"task": task, **(model or {})}, "data": data, "training": training or {}}


OF_MODEL = {"path": "m"}
CASES = {
    "files-path": case(files(HEARS, path=None), files(HEARS), "set data.path"),
    "files-format": case(
        files(HEARS, format="tokens"), files(HEARS, format="parquet"), "use auto, jsonl, parquet or dataset"
    ),
    "image-folder": case(
        {"data": {"path": "images", "format": "image_folder"}}, files(SEES, format="image_folder"),
        "use model.task image_classification",
    ),
    "files-sources": case(
        files(SEES, path=None, sources=[{"path": "a"}, {"path": "b"}]), files(SEES), "give one data.path"
    ),
    "image-tokens": case(
        files(SEES, training={"tokens_per_step": 512}), files(HEARS, training={"tokens_per_step": 2048}),
        "give training.sequences_per_step",
    ),
    "image-packing": case(files(TALKS, packing=True), files(TALKS), "set data.packing to false"),
    "image-truncation": case(files(TALKS, truncation=True), files(TALKS), "use a longer data.sequence_length"),
    "processor-directory": case(
        files(TALKS, processor={"size": 8}), files(TALKS, processor="m"), "give the directory that holds it"
    ),
    "processor": case({"data": {"processor": "m"}}, files(SEES, processor="m"), "tasks that read files"),
    "files-vocabulary-size": case(
        files(SEES, vocabulary_size=300), {"data": {"vocabulary_size": 300}}, "reads files by its processor"
    ),
    "files-added-tokens": case(
        files(SEES, OF_MODEL, added_tokens=["a"]), {"model": OF_MODEL, "data": {"added_tokens": ["a"]}},
        "reads files by its processor",
    ),
    "files-isolate-documents": case(
        files(SEES, isolate_documents=True), {"data": {"isolate_documents": True}}, "reads files by its processor"
    ),
    "files-tokenizer": case(
        files(SEES, tokenizer="t"), files(HEARS, tokenizer="t"), "reads files by its processor"
    ),
    "files-field": case(files(SEES, field="name"), files(HEARS, field="words"), "reads files by its processor"),
}  # fmt: skip
