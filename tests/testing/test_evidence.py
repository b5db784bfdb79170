"""What evidence reads off numbers: coefficients of parts, multiples of updates, and where two traces part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.testing import evidence as evidence_module
from shardwise.testing.comparison import Tolerances, Update
from shardwise.testing.evidence import Evidence, few
from shardwise.testing.module_trace import ModuleTrace, SampledOutput
from shardwise.testing.oracle import Twist, UpdateTwist
from shardwise.testing.origin import _deviations, _matching, _oracle_trace, find_origin
from tests.testing.made_evidence import captured, made_plan, tensors

BEFORE = tensors(0.5)
RATE = 0.1


class SmallOracle:
    """Two parameters, a backward whose gradient is that of the samples asked for, and plain descent."""

    def __init__(self) -> None:
        self.parameters = tensors(0.5)
        self.gradients: dict[str, Tensor] = {}
        self.model = torch.nn.Module()

    def read(self, step: int, counters: list[int]) -> Any:
        return SimpleNamespace(count=lambda: 3 * len(counters))

    def numbers(self, step: int, counters: tuple[int, ...]) -> tuple[int, ...]:
        return counters

    def rows_of(self, step: int) -> list[int]:
        return [0, 1, 2, 3]

    def backward(self, step: int, counters: Any = None, twist: Twist | None = None) -> None:
        rows = self.rows_of(step) if counters is None else counters
        factor = -1.0 if twist == Twist(shift_labels=1) else 1.0
        self.gradients = added([part(row, factor) for row in rows])

    def snapshot(self) -> Any:
        return ({name: value.clone() for name, value in self.parameters.items()}, {}, {})

    def restore(self, snapshot: Any) -> None:
        self.parameters = dict(snapshot[0])

    def update(self, step: int, gradients: dict[str, Tensor], twist: UpdateTwist) -> None:
        rate = 0.0 if twist == UpdateTwist(decay_none=True) else RATE
        self.parameters = {name: value - rate * gradients[name] for name, value in self.parameters.items()}


def part(row: int, factor: float = 1.0) -> dict[str, Tensor]:
    """Return the gradient that a sample brings; those of different samples are no multiples of each other."""
    gradients = {name: (value.double() + row) ** (1 + row / 2) for name, value in tensors().items()}
    return {name: factor * value for name, value in gradients.items()}


def added(gradients: list[dict[str, Tensor]], *weights: float) -> dict[str, Tensor]:
    factors = weights or (1.0,) * len(gradients)
    return {
        name: torch.stack([factor * own[name] for factor, own in zip(factors, gradients, strict=True)]).sum(0)
        for name in gradients[0]
    }


def evidence_of(gradients: dict[str, Tensor], update: Update | None = None) -> Evidence:
    """Return evidence of four microbatches on two ranks, of one sample each."""
    oracle: Any = SmallOracle()
    oracle.backward(1)
    right = oracle.gradients
    return Evidence(
        plan=made_plan(), step=1, oracle=oracle, ours=captured(gradients=gradients), wrong={"gradient": "block.weight"},
        tolerances=Tolerances.of("fp64"), loss=1.0, norm=1.0, right=right, update_with=tensors(),
        update=update or Update(BEFORE, BEFORE), wrong_tensors=list(right),
    )  # fmt: skip


def test_our_gradient_is_written_by_what_each_microbatch_brings() -> None:
    rows = [part(row) for row in range(4)]
    evidence = evidence_of(added(rows, 1.0, 0.0, 2.0, 0.5))
    assert [own for _, _, own in evidence.parts] == [[0], [2], [1], [3]]  # of rank 0, then of rank 1
    assert evidence.counts == dict.fromkeys(((0, 0), (0, 1), (1, 0), (1, 1)), 3)
    expected = {(0, 0): 1.0, (1, 0): 0.0, (0, 1): 2.0, (1, 1): 0.5}
    assert evidence.coefficients == pytest.approx(expected, abs=1e-9)
    assert evidence.coefficients_of(["gone"]) == {}


def test_a_gradient_of_something_else_has_no_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = {"block.weight": tensors()["block.weight"].double(), "block.bias": torch.tensor([5.0, -7.0]).double()}
    assert evidence_of(noise).coefficients == {}
    monkeypatch.setattr(evidence_module, "MOST_PARTS", 3)
    assert evidence_of(added([part(row) for row in range(4)])).coefficients == {}  # too many to look at


def test_a_mistake_explains_our_gradient_if_the_oracle_s_with_it_is_ours() -> None:
    negative = added([part(row, -1.0) for row in range(4)])
    assert evidence_of(negative).reproduces(Twist(shift_labels=1))
    assert not evidence_of(negative).reproduces(Twist())
    assert not evidence_of(added([part(row, 3.0) for row in range(4)])).reproduces(Twist(shift_labels=1))


def stepped(scale: float, of: dict[str, Tensor] | None = None) -> Update:
    """Return an update by so many times the right one."""
    after = {name: value - scale * RATE * (of or tensors())[name] for name, value in BEFORE.items()}
    return Update(BEFORE, after)


@pytest.mark.parametrize(("scale", "ratio"), [(2.0, 2.0), (0.5, 0.5), (-1.0, -1.0), (1.0, None)])
def test_an_update_may_be_a_multiple_of_the_right_one(scale: float, ratio: float | None) -> None:
    evidence = evidence_of(tensors(), stepped(scale))
    assert evidence.update_ratio == (None if ratio is None else pytest.approx(ratio, rel=1e-4))
    assert {name: value.tolist() for name, value in evidence.oracle.parameters.items()} == {
        name: value.tolist() for name, value in BEFORE.items()
    }  # what was tried is taken back


def test_an_update_that_is_no_multiple_has_no_ratio() -> None:
    bent = {name: value.square() for name, value in tensors().items()}
    assert evidence_of(tensors(), stepped(1.0, bent)).update_ratio is None
    apart = stepped(2.0)
    apart.after["block.bias"] = stepped(3.0).after["block.bias"]  # type: ignore[index]
    assert evidence_of(tensors(), apart).update_ratio is None  # each tensor has another


def test_the_update_with_a_mistake_says_which_tensors_are_not_it() -> None:
    evidence = evidence_of(tensors(), stepped(0.0))
    assert evidence.wrong_updates(UpdateTwist(decay_none=True)) == []
    assert evidence.wrong_updates(UpdateTwist()) == ["block.weight", "block.bias"]


def test_many_names_are_counted() -> None:
    assert few(["a", "b"]) == "a, b" and few(list("abcdef")) == "a, b, c, d and 2 more"


ROWS = (0, 1)


def sample(values: list[float], shape: tuple[int, ...] | None = None, positions: Tensor | None = None) -> SampledOutput:
    elements = torch.tensor(values, dtype=torch.float64)
    return SampledOutput(shape or tuple(elements.shape), elements, positions)


def test_modules_whose_output_differs_have_its_factor() -> None:
    right = {(name, ROWS): sample([1.0, 2.0]) for name in ("same", "doubled", "bent", "lost")}
    right["zero", ROWS] = sample([0.0, 0.0])
    ours = {
        ("same", ROWS): sample([1.0, 2.0]),
        ("doubled", ROWS): sample([2.0, 4.0]),
        ("bent", ROWS): sample([2.0, 1.0]),
        ("lost", ROWS): sample([0.0, 0.0]),
        ("zero", ROWS): sample([1.0, 1.0]),
        ("ours alone", ROWS): sample([1.0]),
        ("doubled", (2, 3)): sample([9.0, 9.0]),  # of another microbatch
    }
    wrong = _deviations(1e-5, ours, right, ROWS)
    assert wrong == {"doubled": pytest.approx(2.0), "bent": None, "lost": 0.0, "zero": None}
    not_a_number = {("same", ROWS): sample([float("nan"), 2.0])}
    assert _deviations(1e-5, not_a_number, right, ROWS) == {"same": None}


def test_parts_of_sequences_are_compared_at_their_positions() -> None:
    whole = sample([float(value) for value in range(8)], (2, 4))
    middle = _matching(sample([1.0, 2.0, 5.0, 6.0], (2, 2), torch.tensor([1, 2])), whole)
    assert middle is not None and middle.tolist() == [1.0, 2.0, 5.0, 6.0]
    assert _matching(sample([0.0] * 4, (2, 2)), whole) is None  # a part of the features
    assert _matching(sample([0.0]), None) is None


def traced_evidence(change: float, at: str, kind: str = "outputs") -> Evidence:
    """Return evidence whose second rank's tensor of a module is `change` times the oracle's."""
    evidence = evidence_of(tensors())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()).double()
    samples = torch.arange(8, dtype=torch.float64).view(4, 2)

    def backward_sum(step: int, rows: tuple[int, ...]) -> None:
        model(samples[list(rows)]).sum().backward()

    evidence.oracle.model, evidence.oracle.backward_sum = model, backward_sum  # type: ignore[method-assign]
    traces = [ModuleTrace(), ModuleTrace()]
    for rank, _, counters in evidence.parts:
        rows = tuple(counters)
        trace = _oracle_trace(evidence, rows)
        traces[rank].outputs |= trace.outputs
        traces[rank].gradients |= trace.gradients
    own: dict[Any, SampledOutput] = getattr(traces[1], kind)
    for (name, rows), output in own.items():
        if name == at:
            own[name, rows] = SampledOutput(output.shape, change * output.elements, output.positions)
    evidence.traces = traces
    return evidence


@pytest.mark.parametrize("kind", ["outputs", "gradients"])
def test_the_first_module_at_which_two_runs_part_is_found(kind: str) -> None:
    evidence = traced_evidence(2.0, "1", kind)
    origin = find_origin(evidence)
    assert origin is not None and (origin.module, origin.kind) == ("1", kind)
    assert origin.where == " rank 1, every microbatch" and origin.sentence.endswith("2 times what it should be")
    evidence.traces = ()
    assert find_origin(evidence) is origin  # it is looked for once


def test_runs_that_agree_have_no_origin() -> None:
    assert find_origin(traced_evidence(1.0, "1")) is None
    nothing = evidence_of(tensors())
    nothing.traces = ()
    nothing.oracle.backward_sum = lambda step, rows: None  # type: ignore[method-assign]
    assert find_origin(nothing) is None
