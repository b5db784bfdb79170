"""A package `lm_eval` for tests where it is not installed: its names, and of its runs what they ask a model."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import yaml

NAMES = ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.models", "lm_eval.models.utils", "lm_eval.utils",
         "lm_eval.tasks")  # fmt: skip


class TemplateLM:
    """Encodes a prompt and its continuation apart, as lm-eval's class does for tokenizers that split no pair."""

    def loglikelihood(self, requests: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        pairs = [(pair, self.tok_encode(pair[0]), self.tok_encode(pair[1])) for pair in requests]  # type: ignore
        return self._loglikelihood_tokens(pairs)  # type: ignore


class TaskManager:
    def __init__(self, include_defaults: bool) -> None:
        assert not include_defaults

    def load(self, files: Sequence[str]) -> dict[str, Any]:
        tasks = [yaml.safe_load(Path(file).read_text()) for file in files]
        return {"tasks": {task["task"]: task for task in tasks}}


def normalize_gen_kwargs(settings: dict[str, Any], most: int) -> dict[str, Any]:
    return {"do_sample": False, "temperature": 0.0, "max_gen_toks": most, **settings}


def get_rolling_token_windows(
    tokens: Sequence[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Cut tokens into windows that are predicted from the token before each."""
    assert context_len == 1
    for start in range(0, len(tokens), max_seq_len):
        window = list(tokens[start : start + max_seq_len])
        yield [prefix_token if start == 0 else tokens[start - 1], *window[:-1]], window


def make_disjoint_window(window: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    read, predicted = window
    return read[: len(read) - len(predicted) + 1], predicted


def simple_evaluate(model: Any, tasks: Sequence[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    """Ask the model what each task asks; its answers take the place of metrics."""
    results = {task["task"]: _answer(model, task, settings["apply_chat_template"]) for task in tasks}
    return {"results": results, "n-samples": {name: {"effective": 1} for name in results}, "configs": object()}


def _answer(model: Any, task: dict[str, Any], as_chat: bool) -> dict[str, Any]:
    prompt = task["prompt"]
    if as_chat:
        prompt = model.apply_chat_template([{"role": "user", "content": prompt}])
    if task["output_type"] == "generate_until":
        return {"written,none": model.generate_until([SimpleNamespace(args=(prompt, task["generation_kwargs"]))])[0]}
    if task["output_type"] == "loglikelihood_rolling":
        return {"nats,none": model.loglikelihood_rolling([SimpleNamespace(args=(prompt,))])[0]}
    [(nats, greedy)] = model.loglikelihood([(prompt, task["continuation"])])
    return {"nats,none": nats, "nats_stderr,none": 0.5, "greedy,none": greedy}


@contextmanager
def lm_eval_double() -> Iterator[None]:
    """Let `import lm_eval` find it in this process."""
    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    contents: dict[str, list[Any]] = {
        "lm_eval": [simple_evaluate],
        "lm_eval.api.model": [TemplateLM],
        "lm_eval.models.utils": [normalize_gen_kwargs],
        "lm_eval.utils": [get_rolling_token_windows, make_disjoint_window],
        "lm_eval.tasks": [TaskManager],
    }
    for name, things in contents.items():
        for thing in things:
            setattr(modules[name], thing.__name__, thing)
    with mock.patch.dict(sys.modules, modules):
        yield
        sys.modules.pop("shardwise.commands.lm_eval_model", None)  # which has the double's names
