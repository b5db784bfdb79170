"""Cases of the rules in `plan/rules/streaming.py`."""

from __future__ import annotations

from tests.plan.rules.jobs import case

STREAM = {"path": "p", "streaming": True}
HUB = {"dataset": "org/name", "streaming": True}

CASES = {
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
    "streaming-sources": case(
        {"data": {"streaming": True, "sources": [{"path": "p"}]}}, {"data": {"sources": [{"path": "p"}]}}, "one source"
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
            "shuffle_buffer_size": 7, "validation_sequences": 7, "on_bad_files": "skip", "num_workers": 2,
            "cache_limit": 7,
        }.items()
    },
}  # fmt: skip
