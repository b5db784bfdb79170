"""The first module, in order of computation, at which the engine and the oracle part: on which ranks, and by how much.

Outputs in forward come first, then the gradients that reach outputs in backward. What tensor ranks have parts of is
passed over; the modules around it are whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from shardwise.testing.evidence import SAME_RATIO, Evidence
from shardwise.testing.module_trace import ModuleTrace, Rows, SampledOutput, sampled, traced

MOST_MICROBATCHES = 32  # that are looked at
ALLOWED = {"fp64": 1e-5, "fp32": 1e-3}  # relative L2 distance of an output
ALLOWED_ROUNDED = {"outputs": 0.15, "gradients": 0.5}  # in 16 bits
KINDS = {"outputs": "its output", "gradients": "the gradient that reaches its output"}


class Deviation(NamedTuple):
    """A module's output that is wrong; `factor` is what it is multiplied by, if it is."""

    rank: int
    microbatch: int
    factor: float | None


@dataclass(frozen=True)
class Origin:
    """The place at which two runs part."""

    module: str
    kind: str
    deviations: Sequence[Deviation]
    everyone: tuple[int, int]  # ranks that were looked at, microbatches

    @property
    def where(self) -> str:
        """Return the ranks and microbatches."""
        ranks = sorted({deviation.rank for deviation in self.deviations})
        numbers = sorted({deviation.microbatch for deviation in self.deviations})
        of_ranks = "every rank" if len(ranks) == self.everyone[0] > 1 else f"rank {', '.join(map(str, ranks))}"
        is_every = len(numbers) == self.everyone[1] > 1
        of_numbers = "every microbatch" if is_every else f"microbatch {', '.join(map(str, numbers))}"
        return f" {of_ranks}, {of_numbers}"

    @property
    def sentence(self) -> str:
        """Return module, place and factor."""
        factors = {round(d.factor, 4) for d in self.deviations if d.factor is not None}
        is_one = len(factors) == 1 and all(d.factor is not None for d in self.deviations)
        factor = f", {factors.pop():g} times what it should be" if is_one else ""
        return f"{self.module} on{self.where}: {KINDS[self.kind]} is the first that differs{factor}"


def find_origin(evidence: Evidence) -> Origin | None:
    """Return where the traces of a step part from the oracle's; None where they agree, or there are none."""
    if evidence.traced_origin is None:
        evidence.traced_origin = [_search(evidence)]
    return evidence.traced_origin[0]


def _search(evidence: Evidence) -> Origin | None:
    microbatches = {tuple(counters): number for _, number, counters in evidence.parts}
    whole = [samples for samples in microbatches if len(samples) == evidence.plan.microbatch][:MOST_MICROBATCHES]
    deviations: dict[str, dict[str, list[Deviation]]] = {kind: {} for kind in KINDS}
    order: dict[str, list[str]] = {}
    ranks: set[int] = set()
    for samples in whole:
        right, rows = _oracle_trace(evidence, samples), evidence.oracle.numbers(evidence.step, samples)
        for kind in KINDS:
            order[kind] = order.get(kind) or [name for name, _ in getattr(right, kind)]
            for rank, trace in enumerate(evidence.traces):
                ranks |= {rank} if any(own == rows for _, own in trace.outputs) else set()
                allowed = ALLOWED.get(evidence.plan.dtypes.compute, ALLOWED_ROUNDED[kind])
                wrong = _deviations(allowed, getattr(trace, kind), getattr(right, kind), rows)
                if kind == "gradients":
                    wrong |= _unreached(trace, right, rows)
                for name, factor in wrong.items():
                    deviations[kind].setdefault(name, []).append(Deviation(rank, microbatches[samples], factor))
    for kind, by_module in deviations.items():
        for name in order.get(kind, ()):
            if name in by_module:
                return Origin(name, kind, by_module[name], (len(ranks), len(set(microbatches.values()))))
    return None


def _oracle_trace(evidence: Evidence, samples: Rows) -> ModuleTrace:
    trace, step = ModuleTrace(), evidence.step
    with traced(evidence.oracle.model, trace, rows=evidence.oracle.numbers(step, samples), whole=True):
        evidence.oracle.backward_sum(step, samples)
    return trace


def _deviations(
    allowed: float,
    ours: Mapping[tuple[str, Rows], SampledOutput],
    right: Mapping[tuple[str, Rows], SampledOutput],
    rows: Rows,
) -> dict[str, float | None]:
    """Return the modules whose tensor of a microbatch differs, each with its factor."""
    wrong: dict[str, float | None] = {}
    for (name, own), output in ours.items():
        expected = _matching(output, right.get((name, rows))) if own == rows and name else None
        if expected is None:
            continue
        apart, size = float((output.elements - expected).norm()), float(expected.norm())
        if not apart <= allowed * size:
            ratio = float((output.elements * expected).sum()) / size**2 if size else 0.0
            is_multiple = float((output.elements - ratio * expected).norm()) <= SAME_RATIO * size
            wrong[name] = ratio if is_multiple and size else None
    return wrong


def _unreached(ours: ModuleTrace, right: ModuleTrace, rows: Rows) -> dict[str, float | None]:
    """Return the modules whose outputs no gradient has reached, where one does reach them in the oracle."""
    arrived = {name for (name, own), gradient in right.gradients.items() if own == rows and gradient.elements.any()}
    missing = ours.awaited - ours.gradients.keys()
    return {name: 0.0 for name, own in missing if own == rows and name in arrived}


def _matching(output: SampledOutput, right: SampledOutput | None) -> Tensor | None:
    """Return the oracle's elements where ours are; None where ours are a part of the features."""
    if right is None:
        return None
    whole = right.elements.view(right.shape)
    positions = output.positions
    if positions is not None and len(right.shape) > 1 and right.shape[1] != output.shape[1] == len(positions):
        whole = whole[:, positions.clamp(max=right.shape[1] - 1)]
    return sampled(whole) if tuple(whole.shape) == output.shape else None
