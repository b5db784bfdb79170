"""SMP's options in a script's arguments, in both forms that SageMaker's launchers write."""

from __future__ import annotations

import json

import pytest

from shardwise.errors import ConfigError
from shardwise.smp.options import options_of_arguments

OPTIONS = {"hybrid_shard_degree": 8, "sm_activation_offloading": True, "pipeline": "simple"}
PAIRS = "hybrid_shard_degree=8,sm_activation_offloading=True,pipeline=simple"


@pytest.mark.parametrize(
    "words",
    [
        ["--epochs", "3", "--mp_parameters", json.dumps(OPTIONS)],
        ["--mp_parameters", PAIRS],
        [f"--mp_parameters={PAIRS}"],
    ],
    ids=["json", "pairs", "equals"],
)
def test_both_forms_are_read(words: list[str]) -> None:
    assert options_of_arguments(words) == OPTIONS


def test_there_need_be_none() -> None:
    assert options_of_arguments(["--epochs", "3"]) is None
    assert options_of_arguments(["--mp_parameters", ""]) == {}


@pytest.mark.parametrize("text", ["8", "hybrid_shard_degree", "a=1,b"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither a JSON object nor key=value"):
        options_of_arguments(["--mp_parameters", text])
