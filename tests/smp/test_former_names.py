"""Names of transformers 4 and datasets 2 on modules made for the test: the installed packages stay as they are."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import transformers.utils  # noqa: F401 of which a former name asks

from shardwise.errors import ConfigError
from shardwise.smp.doors.former_names import add_former_names

Given = Callable[..., ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Make a module of a name, with former names added to it."""

    def make(name: str, **content: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)
        add_former_names(made)
        return made

    return make


def test_a_name_that_is_there_stays(module: Given) -> None:
    own = object()
    assert module("datasets", load_metric=own).load_metric is own
    assert module("transformers").is_torch_tpu_available() is False
    assert module("transformers.utils").send_example_telemetry("run", "args") is None


def test_a_metric_is_looked_for_when_it_computes(module: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    metric = module("datasets").load_metric("accuracy", trust_remote_code=True)
    copy.copy(metric)  # which asks for names of its own, none of them the metric's
    monkeypatch.setitem(sys.modules, "evaluate", None)
    with pytest.raises(ConfigError, match=r"load_metric\('accuracy'\) is no more in datasets; pip install evaluate"):
        metric.compute()
    loaded: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded.append((args, kwargs))
        return SimpleNamespace(compute=lambda: 0.5)

    monkeypatch.setitem(sys.modules, "evaluate", SimpleNamespace(load=load))  # type: ignore[arg-type]
    assert metric.compute() == 0.5 and loaded == [(("accuracy",), {"trust_remote_code": True})]


def test_from_pretrained_takes_its_former_words(module: Given) -> None:
    class Model:
        @classmethod
        def from_pretrained(cls, path: str, **kwargs: Any) -> Any:
            return cls, path, kwargs

    module("transformers.modeling_utils", PreTrainedModel=Model)
    assert Model.from_pretrained("here", use_auth_token="t", from_tf=False) == (Model, "here", {"token": "t"})
    assert Model.from_pretrained("here", use_auth_token="t", token="own")[2] == {"token": "own"}
    with pytest.raises(ConfigError, match=r"from_pretrained\(from_flax=True\): transformers reads such files no more"):
        Model.from_pretrained("here", from_flax=True)


def test_a_module_that_is_imported_anew_has_them_too(module: Given) -> None:
    utilities = module(
        "transformers.utils.import_utils", direct_transformers_import=lambda path: sys.modules["transformers.utils"]
    )
    anew = ModuleType("transformers.utils")
    sys.modules["transformers.utils"], before = anew, sys.modules["transformers.utils"]
    try:
        assert utilities.direct_transformers_import("path").send_example_telemetry() is None
    finally:
        sys.modules["transformers.utils"] = before


def test_arguments_of_the_trainer_are_fields_again(module: Given) -> None:
    @dataclass
    class TrainingArguments:
        eval_strategy: str = "no"
        use_cpu: bool = False

        def __post_init__(self) -> None:
            self.finished = True

    module("transformers.training_args", TrainingArguments=TrainingArguments)
    assert {"overwrite_output_dir", "evaluation_strategy", "no_cuda"} <= {
        item.name for item in fields(TrainingArguments)
    }
    made: Any = TrainingArguments(evaluation_strategy="steps", no_cuda=True)  # type: ignore[call-arg]
    assert (made.eval_strategy, made.use_cpu, made.overwrite_output_dir, made.finished) == ("steps", True, False, True)
    begin = TrainingArguments.__init__
    add_former_names(sys.modules["transformers.training_args"])  # a second time changes nothing
    assert TrainingArguments.__init__ is begin
