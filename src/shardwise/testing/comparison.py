"""The comparison of two sets of numbers: errors, tolerances, and the table that `shardwise verify` prints.

error = max|a - b| / max|b| for each tensor. A tensor that is nearly zero beside the largest one of its kind - the
gradient of a key bias is zero but for rounding - has no relative error of its own; its denominator is never smaller
than `Tolerance.floor` times that largest one.

Under a warm-up a parameter hardly moves, so its update, after minus before, is judged too, by the largest update of
the tensor. What adding it to the parameter rounds off, in the parameter's own dtype, is allowed element by element.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

NOISES = 6.0  # of a gradient in 16 bits, by which another right program may be off
CLEAR = 0.25  # share of noise in a gradient up to which its direction is judged
MOST_TURNED = 0.5  # of 1 - cosine, whatever the noise
SMALLEST = 1e-3  # of the largest tensor of a kind: below it a tensor is held to that tensor's absolute error
# by quantity: the fault and the sentence of checks whose difference is its own diagnosis
SENTENCES = {
    "schedule": ("wrong_schedule", "the learning rate of step {name} is not that of the job's schedule"),
    "order": ("repeated_sample", "the order of samples is no permutation: {name}"),
    "defined order": ("wrong_order", "{name}"),
    "buffers": ("buffers_apart", "buffer {name} differs between ranks after the update"),
    "start": ("unequal_start", "{name} differs between ranks before the first step"),
    "plain start": ("other_start", "the start is not that of the plainly built model: {name}"),
    "dropout": ("wrong_dropout_rate", "{name}"),
    "corpus": ("other_documents", "{name}"),
    "evaluation": ("trained_evaluation", "evaluation computes in training mode"),
    "evaluation data": ("wrong_evaluation", "{name}"),
    "evaluation loss": ("wrong_evaluation", "{name}"),
    "average": ("wrong_average", "the moving average of {name} is not that of its weights"),
    "router bias": ("wrong_router_bias", "{name}"),
    "mode": ("left_in_evaluation", "evaluation leaves the model in evaluation mode"),
}


@dataclass(frozen=True)
class Tolerance:
    """The largest error allowed, and the share of the largest tensor below which denominators stay constant."""

    error: float
    floor: float = SMALLEST

    @classmethod
    def of(cls, error: float, rounding: float) -> Tolerance:
        """With a floor at which one rounding unit of the largest tensor is just within the tolerance."""
        return cls(error, max(SMALLEST, rounding / error))


@dataclass(frozen=True)
class Tolerances:
    """Tolerances by quantity."""

    loss: Tolerance
    gradient: Tolerance
    norm: Tolerance
    parameter: Tolerance
    update: Tolerance

    @classmethod
    def of(cls, compute: str, float8: bool = False) -> Tolerances:
        """For a compute dtype: fp64 1e-9, fp32 1e-5, bf16 and fp16 2e-2 with parameters (fp32 masters) 1e-5.

        With layers in float8, whose rounding unit is 1/8 in gradients: loss 1e-2, norm 5e-2, gradients 0.25.
        """
        if float8:
            gradient = Tolerance.of(0.25, 0.1)
            return cls(Tolerance(1e-2), gradient, Tolerance(5e-2), cls.of("fp32").parameter, cls.of("fp32").update)
        forward = {"fp64": (1e-9, 2.3e-16), "fp32": (1e-5, 1.2e-7), "bf16": (2e-2, 7.9e-3), "fp16": (2e-2, 9.8e-4)}
        master = forward["fp64" if compute == "fp64" else "fp32"]
        error = Tolerance.of(*forward[compute])
        return cls(error, error, error, Tolerance.of(*master), Tolerance(1e-6 if compute == "fp64" else 1e-4))


@dataclass(frozen=True)
class Difference:
    """One compared number or tensor.

    `quantity` is "data", "dtype", "loss", "gradient", "direction", "norm", "clipping", "parameter", "update",
    "gradient copies", "replicas", or one of SENTENCES.
    """

    step: int
    quantity: str
    name: str
    error: float
    tolerance: float
    precision: str = ""  # of the run, where a job is verified in two

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance  # False for NaN

    @property
    def label(self) -> str:
        """Quantity, tensor and precision, as far as there are several."""
        return f"{self.quantity} {self.name}" + (f" in {self.precision}" if self.precision else "")


@dataclass
class VerifyReport:
    """Results of a verification. `diagnosis` and `fault` name the mistake, where one was recognised."""

    title: str
    differences: list[Difference] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fault: str = ""
    diagnosis: str = ""

    def add(self, differences: list[Difference]) -> None:
        """Add differences that name their own mistake; the first mistake that is named stays the diagnosis."""
        self.differences += differences
        for difference in differences:
            if not difference.agrees and not self.fault:
                fault, sentence = SENTENCES[difference.quantity]
                self.fault, self.diagnosis = fault, sentence.format(name=difference.name)

    def label(self, precision: str) -> None:
        """Say of all differences that have no precision yet that they are of a run in `precision`."""
        self.differences = [d if d.precision else replace(d, precision=precision) for d in self.differences]

    @property
    def first(self) -> Difference | None:
        """The first that disagrees: by step, then data, dtypes, loss, gradients in module order, norm, parameters."""
        return next((difference for difference in self.differences if not difference.agrees), None)

    @property
    def agrees(self) -> bool:
        return bool(self.differences) and self.first is None

    @property
    def max_relative_error(self) -> float:
        """Over everything compared; infinite where something is not a number."""
        errors = [difference.error for difference in self.differences]
        return max((math.inf if math.isnan(error) else error for error in errors), default=math.inf)

    def render(self) -> RenderableType:
        """For the terminal."""
        lines: list[RenderableType] = [_table(self.title, self.differences)]
        lines += [Text(f"note: {note}", style="yellow") for note in self.notes]
        first = self.first
        if first is not None:
            lines += [
                Text(f"first disagreement: step {first.step}, {first.label}: {first.error:.3g}"),
                Text(f"diagnosis: {self.diagnosis or 'none of the known mistakes explains it'}", style="bold"),
            ]
        verdict = "agrees" if self.agrees else "DISAGREES"
        lines.append(Text(f"max_relative_error = {self.max_relative_error:.3e}  {verdict}", style="bold"))
        return Group(*lines)


def in_double(tensor: Tensor) -> Tensor:
    """Return the values of a tensor in fp64; real and imaginary parts of a complex one stand in a last dim of two."""
    values = tensor.detach()
    return (torch.view_as_real(values.resolve_conj()) if values.is_complex() else values).to(torch.float64)


def is_differentiable(tensor: Tensor) -> bool:
    """Return whether tensors of this dtype can have gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def relative_error(ours: Tensor, reference: Tensor, least: float = 0.0) -> float:
    """max|ours - reference| / max(max|reference|, least); NaN where something is."""
    if not reference.numel():
        return 0.0
    a, b = in_double(ours), in_double(reference)
    difference, scale = float((a - b).abs().max()), max(float(b.abs().max()), least)
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else math.inf


def compare_numbers(step: int, quantity: str, ours: float, reference: float, tolerance: Tolerance) -> Difference:
    """Loss or norm."""
    a, b = (torch.tensor(value, dtype=torch.float64) for value in (ours, reference))
    return Difference(step, quantity, "", relative_error(a, b), tolerance.error)


def compare_tensors(
    step: int, quantity: str, ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: Tolerance
) -> list[Difference]:
    """Every tensor of either side, in the reference's order; one that a side does not have disagrees."""
    least = tolerance.floor * largest(reference.values())
    differences = []
    for name in [*reference, *(name for name in ours if name not in reference)]:
        there = name in ours and name in reference and ours[name].shape == reference[name].shape
        error = relative_error(ours[name], reference[name], least) if there else math.inf
        differences.append(Difference(step, quantity, name, error, tolerance.error))
    return differences


@dataclass(frozen=True)
class Update:
    """Whole parameters before and after one update."""

    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]

    def of(self, name: str) -> Tensor:
        """Return what was added to a parameter, in fp64."""
        return in_double(self.after[name]) - in_double(self.before[name])

    def rounding(self, name: str) -> Tensor:
        """Return how far two runs may round apart: each rounds weight decay and the sum, by half a unit."""
        parameter = self.after[name].detach()
        unit = torch.finfo(parameter.dtype).eps if is_differentiable(parameter) else 0.0
        return 2 * unit * in_double(parameter).abs()


def compare_updates(
    step: int, ours: Update, reference: Update, tolerance: Tolerance, noise: Mapping[str, Tensor] | None = None
) -> list[Difference]:
    """Compare what was added to each parameter that both have, beyond the rounding of the parameter's dtype.

    `noise` is allowed as well, by element.
    """
    names = [name for name in reference.after if name in ours.after and reference.after[name].numel()]
    updates = {name: reference.of(name) for name in names}
    least = tolerance.floor * largest(updates.values())
    differences = []
    for name, update in updates.items():
        allowed = reference.rounding(name) + (noise or {}).get(name, 0.0)
        excess = ((ours.of(name) - update).abs() - allowed).clamp(min=0.0)
        error = relative_error(update.abs() + excess, update.abs(), least)
        differences.append(Difference(step, "update", name, error, tolerance.error))
    return differences


def compare_directions(
    step: int,
    ours: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    noise: Mapping[str, float],
    least: Tolerance,
) -> list[Difference]:
    """Compare gradients in 16 bits by their L2 distance, and where noise allows it by their direction.

    Each tensor is held to NOISES times its own noise. One that noise is a quarter of, or less, has a direction too: it
    may not be at right angles, or zero.
    """
    differences = []
    for name in [*reference, *(name for name in ours if name not in reference)]:
        if name not in ours or name not in reference or ours[name].shape != reference[name].shape:
            differences.append(Difference(step, "gradient", name, math.inf, least.error))
            continue
        a, b = in_double(ours[name]), in_double(reference[name])
        size = max(float(b.norm()), noise[name])
        if size == 0.0 and not a.any():
            continue
        share = noise[name] / size if size else 0.0
        error = float((a - b).norm()) / size if size else math.inf
        differences.append(Difference(step, "gradient", name, error, max(least.error, NOISES * share)))
        if share < CLEAR and size:
            cosine = float((a * b).sum()) / (float(a.norm()) * size or math.inf)
            allowed = min(MOST_TURNED, max(least.error, (NOISES * share) ** 2 / 2))
            differences.append(Difference(step, "direction", name, 1 - cosine, allowed))
    return differences


def but_for_noise(
    ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], noise: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return `ours` with the reference's elements where the two are no further apart than `noise`."""
    return {
        name: torch.where((tensor - reference[name]).abs() <= noise[name], reference[name].detach(), tensor)
        if name in noise and tensor.shape == noise[name].shape
        else tensor
        for name, tensor in ours.items()
    }


def largest(tensors: Iterable[Tensor]) -> float:
    """Largest absolute value anywhere."""
    return max((float(tensor.detach().abs().max()) for tensor in tensors if tensor.numel()), default=0.0)


def _table(title: str, differences: list[Difference]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in ("step", "quantity", "compared", "max relative error", "tolerance", "verdict", "worst tensor"):
        table.add_column(column, overflow="fold")
    for key in dict.fromkeys((d.precision, d.step, d.quantity) for d in differences):
        group = [d for d in differences if (d.precision, d.step, d.quantity) == key]
        worst = max(group, key=lambda d: math.inf if math.isnan(d.error) else d.error)
        bad = sum(not d.agrees for d in group)
        verdict = Text("ok", style="green") if not bad else Text(f"{bad} disagree", style="bold red")
        precision, step, quantity = key
        columns = (f"{precision} {step}".strip(), quantity)
        numbers = (f"{worst.error:.2e}", f"{worst.tolerance:.0e}")
        table.add_row(*columns, str(len(group)), *numbers, verdict, worst.name)
    return table
