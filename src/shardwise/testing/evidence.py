"""The evidence of one step that disagreed, and the questions that a diagnosis puts to the oracle."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.model.experts import holds_experts
from shardwise.plan.plan import Plan
from shardwise.testing.batch_check import Misread
from shardwise.testing.capture import Captured
from shardwise.testing.comparison import Tolerances, Update, compare_tensors, compare_updates
from shardwise.testing.module_trace import ModuleTrace
from shardwise.testing.oracle import Oracle, Snapshot, Twist, UpdateTwist, counts_samples

MOST_PARTS = 128  # microbatches of all ranks in one step; each costs a backward of the oracle
ELEMENTS = 2000  # of each tensor that the fit looks at
NEARER = 0.2  # of the distance from right gradients, within which a mistake explains ours
SAME_RATIO = 1e-3  # updates of all tensors are one multiple of the right ones within this

Part = tuple[int, int]  # data rank, microbatch


class Diagnosis(NamedTuple):
    """`fault` as in `testing.faults` (or a name of its own), and a sentence."""

    fault: str
    sentence: str


@dataclass
class Evidence:
    """One disagreeing step. `update_with` are the gradients that the oracle's update used, `update` is ours."""

    plan: Plan
    step: int
    oracle: Oracle
    ours: Captured
    wrong: Mapping[str, str]  # quantities that disagree, each with the name of its first difference
    tolerances: Tolerances
    loss: float  # the oracle's
    norm: float  # of our gradients
    right: Mapping[str, Tensor]  # gradients of the oracle
    update_with: Mapping[str, Tensor]
    update: Update
    wrong_tensors: Sequence[str]  # whose gradient is wrong, in the order of the oracle's
    misread: Misread | None = None
    stale: Snapshot | None = None  # of the oracle before the step before
    earlier: Mapping[str, Tensor] = field(default_factory=dict)  # our gradients of the step before
    traces: Sequence[ModuleTrace] = ()  # of all ranks
    traced_origin: list[Any] | None = None  # once it has been looked for
    undropped: Mapping[str, Tensor] = field(default_factory=dict)  # our gradients of the summed loss without dropout

    @cached_property
    def parts(self) -> list[tuple[int, int, list[int]]]:
        """(data rank, microbatch, sample counters) of every microbatch that holds samples."""
        plan, counters = self.plan, self.oracle.rows_of(self.step)
        parts = []
        for rank in range(plan.data_ranks):
            for number in range(plan.accumulation_of(self.step)):
                start = (number * plan.data_ranks + rank) * plan.microbatch
                if own := counters[start : start + plan.microbatch]:
                    parts.append((rank, number, own))
        return parts

    @cached_property
    def expert_tensors(self) -> list[str]:
        """Return the parameters of experts."""
        stacks = tuple(f"{name}." for name, module in self.oracle.model.named_modules() if holds_experts(module))
        return [name for name in self.right if name.startswith(stacks or "\0")]

    @cached_property
    def counts(self) -> dict[Part, int]:
        """Return what the loss of each part is summed over: counted labels, or samples."""
        by_sample = counts_samples(self.plan.job)
        rows = {(rank, number): self.oracle.read(self.step, own) for rank, number, own in self.parts}
        return {part: len(own.samples()) if by_sample else own.count() for part, own in rows.items()}

    @cached_property
    def tokens(self) -> int:
        """Return the positions of the step's labels, counted or not; 0 where labels have no positions."""
        labels = [self.oracle.read(self.step, own).labels for _, _, own in self.parts]
        return sum(values.numel() for values in labels if values is not None and values.dim() > 1)

    @cached_property
    def part_gradients(self) -> dict[Part, dict[str, Tensor]]:
        """Return samples of the gradient of each part, by tensor; none where there are too many parts."""
        if len(self.parts) > MOST_PARTS:
            return {}
        gradients = {}
        for rank, number, counters in self.parts:
            self.oracle.backward(self.step, counters)
            gradients[rank, number] = {name: _sampled(value) for name, value in self.oracle.gradients.items()}
        return gradients

    @cached_property
    def coefficients(self) -> dict[Part, float]:
        """Return how often our gradient holds each part; nothing where it is no combination of them."""
        return self.coefficients_of(list(self.ours.gradients))

    def coefficients_of(self, names: Sequence[str]) -> dict[Part, float]:
        """Return the same for some tensors alone."""
        names = [name for name in names if name in self.ours.gradients and name in self.right]
        if not names:
            return {}
        columns = {
            part: torch.cat([gradients[name] for name in names]) for part, gradients in self.part_gradients.items()
        }
        present = {part: column for part, column in columns.items() if column.abs().max() > 0}
        if not present:
            return {}
        target = torch.cat([_sampled(self.ours.gradients[name]) for name in names])
        matrix = torch.stack(list(present.values()), dim=1)
        solution = torch.linalg.lstsq(matrix, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        residual = matrix @ solution - target
        apart = torch.cat([_sampled(self.right[name]) for name in names]) - target
        is_nearer = float(residual.norm()) <= NEARER * float(apart.norm())
        miss = float(residual.abs().max() / matrix.abs().max())
        if miss > 10 * self.tolerances.gradient.error or not is_nearer:
            return {}
        return dict(zip(present, solution.tolist(), strict=True))

    def reproduces(self, twist: Twist) -> bool:
        """Return True if the oracle with this mistake brings our gradients, and without it does not."""
        self.oracle.backward(self.step, twist=twist)
        differences = compare_tensors(
            self.step, "", self.ours.gradients, self.oracle.gradients, self.tolerances.gradient
        )
        is_nearer = self._distance(self.oracle.gradients) < NEARER * self._distance(self.right)
        return is_nearer and all(difference.agrees for difference in differences)

    def _distance(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the L2 distance of our gradients from others."""
        ours = self.ours.gradients
        names = [name for name in gradients if name in ours and ours[name].shape == gradients[name].shape]
        return math.hypot(*(float((ours[name].double() - gradients[name].double()).norm()) for name in names))

    def wrong_updates(self, twist: UpdateTwist) -> list[str]:
        """Return the tensors whose update is not that of the oracle with this mistake."""
        differences = compare_updates(self.step, self.update, self._updated(twist), self.tolerances.update)
        return [difference.name for difference in differences if not difference.agrees]

    @cached_property
    def update_ratio(self) -> float | None:
        """Our update as a multiple of the oracle's, if it is the same one, and not 1, in every tensor."""
        right, ratios = self._updated(UpdateTwist()), []
        for name in right.after:
            ours, theirs = self.update.of(name), right.of(name)
            noise = right.rounding(name)
            if not theirs.numel() or float(theirs.abs().max()) < 100 * float(noise.max()):
                continue  # it says nothing about a ratio
            ratio = float((ours * theirs).sum() / theirs.square().sum())
            misfit = ((ours - ratio * theirs).abs() - noise * max(1.0, abs(ratio))).clamp(min=0.0).max()
            if float(misfit) > 10 * self.tolerances.update.error * float(theirs.abs().max()) * max(1.0, abs(ratio)):
                return None
            ratios.append(ratio)
        mean = sum(ratios) / max(len(ratios), 1)
        is_one_ratio = all(abs(ratio - mean) <= SAME_RATIO * abs(mean) for ratio in ratios)
        return mean if ratios and is_one_ratio and abs(mean - 1) > 2 * SAME_RATIO else None

    def _updated(self, twist: UpdateTwist) -> Update:
        """The oracle's update with `twist`, taken back afterwards."""
        before = self.oracle.snapshot()
        self.oracle.update(self.step, self.update_with, twist)
        after = {name: parameter.detach().clone() for name, parameter in self.oracle.parameters.items()}
        self.oracle.restore(before)
        return Update(before[0], after)


def few(names: Sequence[str]) -> str:
    """Return at most four names, and how many there are where there are more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _sampled(tensor: Tensor) -> Tensor:
    """Return evenly spaced elements, fp64."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // ELEMENTS))].double()
