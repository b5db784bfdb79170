"""The other side of a comparison: the oracle, or the recorded numbers of another layout.

Both answer the same questions step by step. The oracle either trains freely (its own gradients make its updates) or is
led: it takes our gradients, once they have been compared, for its update. Led, gradients are compared at the same
weights in every step and the update is compared for the same gradients, so that an optimizer which magnifies rounding
(Adam divides a small gradient by its own size) does not hide behind a wide tolerance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.kernels.precision import torch_dtype
from shardwise.plan.plan import Plan
from shardwise.testing.capture import Captured
from shardwise.testing.comparison import (
    Difference,
    Tolerance,
    Tolerances,
    Update,
    VerifyReport,
    compare_numbers,
    compare_tensors,
    compare_updates,
    largest,
)
from shardwise.testing.diagnosis import Evidence, diagnose
from shardwise.testing.oracle import Oracle

FREE = ("SGD", "Adam", "AdamW")  # in fp64 these keep rounding small; others (Rprop looks at signs) do not
OTHER_DATA = "the two runs read other samples: the corpus, or what its tokens are made with, changed between them"
FLOAT8 = (
    "The oracle does not round to float8, so gradients are held to a quarter of their size: a rank's part that is lost "
    "shows only where it is more than that. Prove the layout with --precision.fp8 none."
)
FLOOR_EXPECTED = 1e-12  # an fp64 model whose own rounding is above this computes partly in a smaller dtype


@dataclass
class OracleReference:
    """Compares with the oracle, on rank 0."""

    plan: Plan
    oracle: Oracle
    report: VerifyReport
    led: bool = field(init=False)
    tolerances: Tolerances = field(init=False)
    weights: Mapping[str, Tensor] = field(default_factory=dict, init=False)  # ours, before the next step

    def __post_init__(self) -> None:
        compute, name = self.plan.dtypes.compute, self.plan.job.optimizer.name
        self.tolerances = Tolerances.of(compute, bool(self.plan.float8))
        self.led = bool(self.plan.float8) or not (
            (compute == "fp64" and name in FREE) or (compute == "fp32" and name == "SGD")
        )
        if compute == "fp64":
            self._measure_floor()
        if self.led:
            self.report.notes.append(
                f"{name} in {compute}: the oracle updates with our gradients once they are compared, so parameters "
                f"are held to {self.tolerances.parameter.error:g} although the optimizer magnifies rounding."
            )
        if self.plan.float8:
            self.report.notes.append(FLOAT8)
        if compute in ("bf16", "fp16"):
            self.report.notes.append(f"The oracle computes in {oracle_dtype(self.plan)}, its weights are fp32 masters.")

    def judge(self, step: int, ours: Captured) -> bool:
        """Compare one step; True where everything agrees. A disagreement is diagnosed."""
        oracle, tolerances = self.oracle, self.tolerances
        loss = oracle.backward(step)
        norm, before = oracle.norm(), oracle.snapshot()
        found = [compare_numbers(step, "loss", ours.loss, loss, tolerances.loss)]
        found += compare_tensors(step, "gradient", ours.gradients, oracle.gradients, tolerances.gradient)
        found.append(compare_numbers(step, "norm", ours.norm, norm, tolerances.norm))
        update_with = self._update_gradients(ours)
        oracle.update(step, update_with)
        found += compare_tensors(step, "parameter", ours.parameters, oracle.parameters, tolerances.parameter)
        update = Update(self.weights or before[0], ours.parameters)
        found += compare_updates(step, update, Update(before[0], oracle.parameters), tolerances.update)
        self.weights = ours.parameters
        found += compare_all_copies(step, ours, tolerances.gradient)
        self.report.differences += found
        wrong = {difference.quantity for difference in found if not difference.agrees}
        if wrong:
            oracle.restore(before)
            evidence = Evidence(self.plan, step, oracle, ours, wrong, tolerances, loss, norm, update_with, update)
            self._diagnose(evidence)
        return not wrong

    def _update_gradients(self, ours: Captured) -> dict[str, Tensor]:
        """The oracle's own gradients, but ours where led, and for tensors whose gradient is nothing but rounding."""
        own = self.oracle.gradients
        noise = 1e3 * torch.finfo(self.oracle.compute).eps * largest(own.values())
        return {
            name: ours.gradients[name]
            if name in ours.gradients and (self.led or float(gradient.abs().max()) <= noise)
            else gradient
            for name, gradient in own.items()
        }

    def _measure_floor(self) -> None:
        """Let the oracle disagree with itself: other order of samples, weights off by a rounding unit."""
        oracle = self.oracle
        oracle.backward(0)
        right, before = oracle.gradients, oracle.snapshot()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in oracle.parameters.values():
                noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) * 4e-16
                parameter.mul_(1 + noise)
        oracle.backward(0, reverse=True)
        found = compare_tensors(0, "", oracle.gradients, right, self.tolerances.gradient)
        oracle.restore(before)
        floor = max(difference.error for difference in found)
        if floor <= FLOOR_EXPECTED:
            return
        self.led, wide = True, max(self.tolerances.gradient.error, 10 * floor)
        self.tolerances = replace(self.tolerances, loss=Tolerance(wide), gradient=Tolerance(wide), norm=Tolerance(wide))
        self.report.notes.append(
            f"The model itself computes in a smaller dtype than fp64: the oracle reproduces its own gradients to "
            f"{floor:.1e} only; gradients are held to {wide:.1e}."
        )

    def _diagnose(self, evidence: Evidence) -> None:
        found = diagnose(evidence)
        if found and not self.report.fault:
            self.report.fault, self.report.diagnosis = found


@dataclass
class RecordedReference:
    """Compares with what another layout left in `directory`."""

    plan: Plan
    directory: Path
    report: VerifyReport

    def judge(self, step: int, ours: Captured) -> bool:
        """Compare one step; True where everything agrees."""
        tolerances = Tolerances.of(self.plan.dtypes.compute, bool(self.plan.float8))
        if self.plan.float8 or self.plan.dtypes.compute in ("bf16", "fp16"):  # weights differ from the second step on
            tolerances = replace(tolerances, parameter=tolerances.gradient)
        numbers = json.loads((self.directory / f"{step}.json").read_text())
        found = [compare_data(step, ours.data_hash, numbers["data_hash"])]
        if not found[0].agrees:
            self.report.fault, self.report.diagnosis = "other data", OTHER_DATA
        found.append(compare_numbers(step, "loss", ours.loss, numbers["loss"], tolerances.loss))
        found += compare_tensors(step, "gradient", ours.gradients, self._read(step, "gradients"), tolerances.gradient)
        found.append(compare_numbers(step, "norm", ours.norm, numbers["norm"], tolerances.norm))
        found += compare_tensors(
            step, "parameter", ours.parameters, self._read(step, "parameters"), tolerances.parameter
        )
        found += compare_all_copies(step, ours, tolerances.gradient)
        self.report.differences += found
        return all(difference.agrees for difference in found)

    def _read(self, step: int, kind: str) -> dict[str, Tensor]:
        stored = load_file(self.directory / f"{step}.{kind}.safetensors")
        order: list[str] = json.loads((self.directory / f"{step}.json").read_text())["order"]
        return {name: stored[name] for name in order}


@dataclass
class Recording:
    """Leaves the numbers of a run in `directory`, for `RecordedReference`."""

    directory: Path

    def judge(self, step: int, ours: Captured) -> bool:
        """Write one step."""
        numbers: dict[str, Any] = {"loss": ours.loss, "norm": ours.norm, "data_hash": ours.data_hash}
        numbers["order"] = list(ours.parameters)
        (self.directory / f"{step}.json").write_text(json.dumps(numbers))
        for kind, tensors in (("gradients", ours.gradients), ("parameters", ours.parameters)):
            contiguous: Mapping[str, Tensor] = {name: tensor.contiguous() for name, tensor in tensors.items()}
            save_file(dict(contiguous), self.directory / f"{step}.{kind}.safetensors")
        return True


def oracle_dtype(plan: Plan) -> str:
    """Return the dtype of the oracle: the job's own where one plain process can.

    fp32 for fp16, so that it needs no loss scale, and for a user's module in bf16, whose fp32 buffers nothing casts.
    """
    own = plan.dtypes.compute
    return "fp32" if own == "fp16" or (own == "bf16" and plan.job.model.factory is not None) else own


def oracle_dtypes(plan: Plan) -> dict[str, torch.dtype]:
    """Arguments of Oracle."""
    return {"master": torch_dtype(plan.dtypes.parameters), "compute": torch_dtype(oracle_dtype(plan))}


def compare_data(step: int, ours: int, reference: int) -> Difference:
    """Both have to have read the same samples; how far apart two hashes are says nothing."""
    return Difference(step, "data", "", 0.0 if ours == reference else math.inf, 0.0)


def compare_all_copies(step: int, ours: Captured, gradient: Tolerance) -> list[Difference]:
    """Copies of a parameter have to be equal bit by bit, those of a gradient within the tolerance of gradients."""
    found = []
    for quantity, copies, allowed in (
        ("gradient copies", ours.gradient_copies, gradient.error),
        ("replicas", ours.copies, 0.0),
    ):
        found += [Difference(step, quantity, name, copy.error, allowed) for name, copy in copies.items()]
    return found
