"""Cases of the rules in `plan/rules/model.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.model.facts import ModelFacts
from shardwise.model.parameter_writes import ForwardEffects
from shardwise.plan.draft import World
from tests.plan.rules.jobs import ACCUMULATING, CPU4, DROPPING, FACTORY, FACTS, FULL, HOOKED, case

WRITING = replace(FACTS, definition="Net (net.py:3)")


def with_effects(**effects: Any) -> ModelFacts:
    """Return facts of a module whose forward does these."""
    return replace(WRITING, effects=ForwardEffects(**effects))


def with_kinds(**kinds: tuple[Any, ...]) -> ModelFacts:
    """Return facts of a module with parameters of these kinds."""
    return replace(WRITING, parameter_kinds=replace(FACTS.parameter_kinds, **kinds))


CLASSES = {"task": "token_classification"}
OF_SAMPLES = {"model": {"task": "sequence_classification"}, "data": {"factory": "c:d"}}

CASES = {
    "read-statistics": case(
        {}, {"model": {"running_statistics": "first_rank"}}, "set model.running_statistics yourself", CPU4,
        replace(WRITING, reads_statistics=True, keeps_statistics=True, buffers=("mean",)),
    ),
    "classes-data": case({"model": CLASSES}, {"model": CLASSES, "data": {"factory": "c:d"}}, "set data.factory"),
    "classes-context": case(
        {"model": CLASSES, "data": {"factory": "c:d"}, "parallel": {"context_parallel_degree": 2}},
        {"model": CLASSES, "data": {"factory": "c:d"}}, "use context_parallel_degree 1",
    ),
    "classes-samples": case(
        {**OF_SAMPLES, "training": {"loss_reduction": "sample"}}, OF_SAMPLES, "each sample has one label",
    ),
    "labels": case({"model": {"labels": ["a"]}}, {"model": {**CLASSES, "labels": ["a"]}, "data": {"factory": "c:d"}},
                   "only tasks of classification have classes"),
    "one-model": case({"model": {"path": "m", "config": "c"}}, {"model": {"path": "m"}}, "keep one"),
    "model-loss": case({"model": {"loss": "a:b"}}, {"model": {"factory": "a:b", "loss": "a:c"}}, "model.loss=a:b"),
    "model-factory-arguments": case(
        {"model": {"factory_arguments": {"x": 1}}},
        {"model": {"factory": "a:b", "factory_arguments": {"x": 1}}},
        "'x': 1",
    ),
    "running-statistics": case(
        {"model": {"running_statistics": "synchronised"}},
        {},
        "model.running_statistics=synchronised",
    ),
    "model-weights": case(
        {"model": {"weights": "w.pt"}}, {"model": {"factory": "a:b", "weights": "w.pt"}}, "model.weights=w.pt"
    ),
    "factory-task": case(
        {"model": {"factory": "a:b", "task": "masked_lm"}}, {"model": {"config": "c", "task": "masked_lm"}}, "own head"
    ),
    "remote-code": case(
        {"model": {"trust_remote_code": True}}, {"model": {"path": "m", "trust_remote_code": True}}, "model.path"
    ),
    "gradient-hooks": case(
        {"training": {"gradient_accumulation": 2}},
        {"training": {"gradient_accumulation": 1}},
        "the hook on layers.0.weight of Net (net.py:3) does more than scale or mask",
        CPU4,
        HOOKED,
        HOOKED,
    ),
    "accumulate-grad-hooks": case({}, {}, "embed_in.weight of Net (net.py:3) has a hook", CPU4, ACCUMULATING, FACTS),
    "layer-drop": case({}, {}, "gpt_neox drops blocks at random (LayerDrop)", CPU4, DROPPING, FACTS),
    "written-activations": case(
        {}, {}, "layers.1 of Net (net.py:3) writes into a tensor that it is given and that was made from weights", CPU4,
        replace(WRITING, activation_writing_blocks=("layers.1",)), FACTS,
    ),
    "written-arguments": case(
        {"memory": FULL}, {}, "layers.1 of Net (net.py:3) writes into a tensor that it is given", CPU4,
        replace(WRITING, writing_blocks=("layers.1",)),
    ),
    "max-norm": case({}, {}, "table of Net (net.py:3) has max_norm", CPU4, with_kinds(bounded=("table",)), FACTS),
    "written-parameters": case(
        {}, {}, "the forward of Net (net.py:3) writes the parameter table.weight", CPU4,
        replace(WRITING, written_parameters=("table.weight",)), FACTS,
    ),
    "replaced-parameters": case(
        FACTORY, FACTORY, "the forward of Net (net.py:3) puts a new one in place of the parameter table.weight", CPU4,
        replace(WRITING, replaced_parameters=("table.weight",)), FACTS,
    ),
    "refrozen-parameters": case(
        {}, {}, "the forward of Net (net.py:3) freezes or unfreezes the parameter table.weight", CPU4,
        with_effects(refrozen=("table.weight",)), FACTS,
    ),
    "late-hooks": case(
        {}, {}, "the forward of Net (net.py:3) puts a hook on the gradient of table.weight", CPU4,
        with_effects(hooked=("table.weight",)), FACTS,
    ),
    "state-in-forward": case(
        {}, {}, "the forward of Net (net.py:3) calls state_dict", CPU4, with_effects(saves_state=True), FACTS
    ),
    "marked-tensors": case(
        {}, {}, "layers.1 of Net (net.py:3) returns a tensor with attributes", CPU4,
        with_effects(marking_block="layers.1"), FACTS,
    ),
    "global-tensors": case(
        {}, {}, "a block of Net (net.py:3) leaves a tensor with a gradient in LOSSES of net", CPU4,
        with_effects(global_tensor="LOSSES of net"), FACTS,
    ),
    "derived-attributes": case(
        FACTORY, FACTORY, "turned of Net (net.py:3) keeps a tensor made from parameters", CPU4,
        with_kinds(derived=("turned",)), FACTS,
    ),
    "overlapping-parameters": case(
        FACTORY, FACTORY, "head.weight and table.weight of Net (net.py:3) share memory", CPU4,
        with_kinds(overlapping=(("head.weight", "table.weight"),)), FACTS,
    ),
    "complex-parameters": case(
        {}, {}, "phase of Net (net.py:3) is complex", CPU4, with_kinds(complex=("phase",)), FACTS
    ),
    "stored-dtypes": case(
        FACTORY, FACTORY, "phase of Net (net.py:3) is of complex128", CPU4,
        with_kinds(unstored=(("phase", "complex128"),)), FACTS,
    ),
    "sparse-gradients": case(
        FACTORY, FACTORY, "table of Net (net.py:3) has sparse gradients", CPU4, with_kinds(sparse=("table",)), FACTS
    ),
    "parameter-classes": case(
        FACTORY, FACTORY, "scale of Net (net.py:3) is of a class of its own", CPU4,
        with_kinds(subclassed=("scale",)), FACTS,
    ),
    "listed-parameters": case(
        FACTORY, FACTORY, "parts of Net (net.py:3) keeps parameters", CPU4, with_kinds(listed=("parts",)), FACTS
    ),
}  # fmt: skip

OF_A_SCRIPT = {"has_config": False}
MORE = [
    ("accumulate-grad-hooks", {"training": {"gradient_accumulation": 2}}, World(1, "cpu", 1), ACCUMULATING),
    ("sparse-gradients", {}, CPU4, replace(with_kinds(sparse=("table",)), **OF_A_SCRIPT)),
    ("parameter-classes", {}, CPU4, replace(with_kinds(subclassed=("scale",)), **OF_A_SCRIPT)),
    ("late-hooks", {"training": {"gradient_accumulation": 2}}, World(1, "cpu", 1), with_effects(hooked=("w",))),
    ("marked-tensors", {"memory": FULL}, World(1, "cpu", 1), with_effects(marking_block="layers.1")),
    ("listed-parameters", {}, CPU4, replace(with_kinds(listed=("parts",)), **OF_A_SCRIPT)),
]
