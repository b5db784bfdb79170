"""Toy configs: small models of every type that transformers can build without further packages."""

from __future__ import annotations

import pytest

from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.testing.toy_configs import language_model_types, toy_config

LARGEST = 3_000_000  # parameters; most toys have 20,000 to 100,000
# Least share of a task's types. The others need packages, or sizes of their own; or they read sound instead of tokens.
BUILT = {"causal_lm": 0.8, "masked_lm": 0.8, "seq2seq_lm": 0.6}


def parameters(model_type: str, task: str) -> int:
    model = build_model(Job.model_validate({"model": {"config": toy_config(model_type), "task": task}}))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    "model_type, task",
    [
        ("llama", "causal_lm"),
        ("gpt2", "causal_lm"),
        ("mixtral", "causal_lm"),
        ("bert", "masked_lm"),
        ("t5", "seq2seq_lm"),
    ],
)
def test_a_toy_is_small(model_type: str, task: str) -> None:
    assert model_type in language_model_types(task)
    assert 5_000 < parameters(model_type, task) < 200_000


def test_values_of_the_caller_win() -> None:
    config = toy_config("llama", num_hidden_layers=3, hidden_act="relu")
    assert (config["num_hidden_layers"], config["hidden_act"], config["hidden_size"]) == (3, "relu", 32)


@pytest.mark.slow
@pytest.mark.parametrize("task", BUILT)
def test_most_types_of_transformers_have_a_toy(task: str) -> None:
    types = language_model_types(task)
    sizes: dict[str, int] = {}
    for model_type in types:
        try:
            sizes[model_type] = parameters(model_type, task)
        except Exception:  # each config class has its own way to refuse values, its own defaults among them
            continue
    small = [model_type for model_type, size in sizes.items() if size < LARGEST]
    assert len(small) >= BUILT[task] * len(types), sorted(set(types) - set(small))
