"""The other side of a comparison: the oracle, or the recorded numbers of another layout.

Both answer the same questions step by step. The oracle either trains freely (its own gradients make its updates) or is
led: it takes our gradients, once they have been compared, for its update. Led, gradients are compared at the same
weights in every step and the update is compared for the same gradients, so that an optimizer which magnifies rounding
(Adam divides a small gradient by its own size) does not hide behind a wide tolerance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardwise.data.batch import Batch, can_be_ignored
from shardwise.errors import ModelError
from shardwise.kernels.precision import torch_dtype
from shardwise.plan.plan import Plan
from shardwise.testing.batch_check import find_misread, find_misread_evaluation
from shardwise.testing.capture import Captured
from shardwise.testing.comparison import (
    NOISES,
    Difference,
    Tolerance,
    Tolerances,
    Update,
    VerifyReport,
    but_for_noise,
    compare_directions,
    compare_numbers,
    compare_tensors,
    compare_updates,
    in_double,
    is_differentiable,
    largest,
)
from shardwise.testing.diagnosis import diagnose
from shardwise.testing.dtype_check import compare_dtypes, compare_exactness
from shardwise.testing.evidence import Evidence, few
from shardwise.testing.module_trace import ModuleTrace
from shardwise.testing.oracle import Oracle, Snapshot
from shardwise.testing.oracle_data import Rows
from shardwise.testing.oracle_rounding import inner_rounding, loss_rounding, rounded_step
from shardwise.testing.update_mistakes import expected_factor

SIXTEEN = ("bf16", "fp16")
ROUNDED_LOSS = 5e-3  # of a loss in 16 bits, whose measured noise may be small by chance
ROUNDED_GRADIENT = Tolerance(4e-3)  # the same of a gradient in 16 bits
OUTPUTS_LOSS = {"fp64": 1e-9, "fp32": 1e-5}  # of a loss by its own outputs; in 16 bits the products before it round
IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}  # options that no number depends on
FREE = ("SGD", "Adam", "AdamW")  # in fp64 these keep rounding small; others (Rprop looks at signs) do not
OTHER_DATA = "the two runs read other samples: the corpus, or what its tokens are made with, changed between them"
FLOAT8 = (
    "The oracle does not round to float8, so gradients are held to a quarter of their size: a rank's part that is lost "
    "shows only where it is more than that. Prove the layout with --precision.fp8 none."
)
BF16_ITERATIONS = 0.05  # of a matrix's largest move: an element that is rounded otherwise moves all of them
BIAS_MOVES = 1e-3  # of a router's bias, which steps of the same size add up to
ROUNDINGS = 4  # of a gradient until weight decay is added to it: its sums, the clip factor
SUMS = 10  # roundings of a gradient as large as the largest, until it is compared
PARTS = (1 / 3, 2 / 3)  # of a loss, whose gradients have other roundings than the whole one's
FLOOR_EXPECTED = 1e-12  # an fp64 model whose own rounding is above this computes partly in a smaller dtype
ROUNDS_INSIDE = "The model itself computes in a smaller dtype than fp64, which moves gradients by its rounding"
NUMBERS_CANCEL = "Numbers nearly cancel, so that rounding in fp32 moves loss and gradients further than usual"
REPEATS = 3  # of a step, for modules that count what they do
REPEATED = Tolerance(1e-5)  # of gradients of the same step: nothing of it is rounded otherwise
FLOOR_MOST = 0.05  # of a gradient: no dtype's rounding is above this


@dataclass
class OracleReference:
    """Compares with the oracle, on rank 0.

    Attributes:
        keeps_statistics: modules keep statistics of rows, of which the oracle has seen other forwards.
        norms_see_parts: norms of key heads get a part of a gradient, and the parts are summed behind them.
    """

    plan: Plan
    oracle: Oracle
    report: VerifyReport
    norms_see_parts: bool = False
    keeps_statistics: bool = False
    led: bool = field(init=False)
    tolerances: Tolerances = field(init=False)
    loss_tolerance: Tolerance = field(init=False)  # of the last step; in 16 bits by the noise that was measured in it
    weights: Mapping[str, Tensor] = field(default_factory=dict, init=False)  # ours, before the next step
    stale: Snapshot | None = field(default=None, init=False)  # of the oracle before the last step
    earlier: Mapping[str, Tensor] = field(default_factory=dict, init=False)  # our gradients of the last step
    evidence: Evidence | None = field(default=None, init=False)  # of the step that disagreed
    loosened: float = field(default=FLOOR_EXPECTED, init=False)  # the most that fp32 inside has moved gradients by

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
        if self.keeps_statistics:
            self.report.notes.append("Losses of evaluations are not compared: they depend on running statistics.")
        if self.plan.float8:
            self.report.notes.append(FLOAT8)
        if compute in SIXTEEN:
            self.report.notes.append(f"The oracle computes in {oracle_dtype(self.plan)}, its weights are fp32 masters.")

    def judge(self, ours: Captured) -> bool:
        """Compare one step; True where everything agrees. Where it does not, `evidence` is what a diagnosis needs."""
        before = self.oracle.snapshot()
        differences, evidence = self._compare(ours, before)
        if evidence and self._loosen(ours.step, before):
            differences, evidence = self._compare(ours, before)
        self.report.differences += differences
        self.weights, self.earlier = ours.parameters, ours.gradients
        self.stale, self.evidence = before, evidence
        if evidence is None:
            self.report.add(self._compare_router_biases(ours))
        return evidence is None

    def _compare_router_biases(self, ours: Captured) -> list[Difference]:
        """Compare the biases of routers after a step that agreed; in 16 bits near scores may be routed otherwise."""
        rate = self.plan.job.router.bias_update_rate
        if not rate or self.plan.dtypes.compute in SIXTEEN:
            return []
        differences = []
        for rank, biases in enumerate(ours.router_biases):
            for name, bias in biases.items():
                error = float((bias - self.oracle.model.get_buffer(name)).abs().max()) / rate
                sentence = f"{name} of rank {rank} is {error:.3g} moves off where the tokens of all ranks put it"
                differences.append(Difference(ours.step, "router bias", sentence, error, BIAS_MOVES))
        return differences

    def compare_evaluation_loss(self, ours: Captured) -> list[Difference]:
        """Compare the rows and the loss of the evaluation after a step that agreed, if there was one."""
        if ours.validation_loss is None or not any(ours.evaluation_batches):
            return []
        misread = find_misread_evaluation(self.plan, self.oracle.source, ours)
        rows = Difference(ours.step, "evaluation data", misread, math.inf if misread else 0.0, 0.0)
        if self.keeps_statistics:
            return [rows]
        readers = dict(zip(reversed(ours.data_ranks), reversed(ours.evaluation_batches), strict=True))  # one each
        real = [batch for batches in readers.values() for batch in batches if batch.counted.any()]
        microbatches = [rows_of(batch, self.oracle.rows_together is not None) for batch in real]
        ours_and_right = "the evaluation's loss is {:.6g}, that of its rows {:.6g}"
        evaluated = self._compare_evaluated(
            ours.step, ours.validation_loss, partial(self.oracle.evaluate, microbatches), ours_and_right
        )
        return [rows, evaluated, *self._compare_ema_loss(ours, microbatches)]

    def _compare_evaluated(self, step: int, ours: float, evaluate: Callable[[], float], sentence: str) -> Difference:
        """Compare a loss of an evaluation; that of pairs with what rounding does to it on these rows, if need be."""
        right = evaluate()
        difference = compare_numbers(step, "evaluation loss", ours, right, self._evaluation_tolerance)
        if difference.agrees:
            return difference
        if self.oracle.reference is not None and self.plan.dtypes.compute not in SIXTEEN:
            allowed = max(difference.tolerance, 2 * loss_rounding(evaluate))
            difference = replace(difference, tolerance=allowed)
        return difference if difference.agrees else replace(difference, name=sentence.format(ours, right))

    @property
    def _evaluation_tolerance(self) -> Tolerance:
        """That of a step's loss; a user's function sums a loss in 16 bits, and no noise is measured on these rows."""
        sums_narrowly = self.oracle.has_own_loss and self.plan.dtypes.compute in SIXTEEN
        return Tolerance((1 + sums_narrowly) * self.loss_tolerance.error)

    def _compare_ema_loss(self, ours: Captured, microbatches: Sequence[Rows]) -> list[Difference]:
        """Compare the loss of the averaged weights on the same rows, where there are some."""
        if ours.ema_loss is None:
            return []
        sentence = "the evaluation's loss with averaged weights is {:.6g}, not {:.6g}"
        evaluate = partial(self.oracle.evaluate_averages, microbatches)
        return [self._compare_evaluated(ours.step, ours.ema_loss, evaluate, sentence)]

    def compare_averages(self, ours: Captured) -> list[Difference]:
        """Compare the averaged weights after a step that agreed, if the job keeps them."""
        if self.plan.job.training.ema_decay is None:
            return []
        self.oracle.average()
        return compare_tensors(ours.step, "average", ours.ema, self.oracle.averages, self.tolerances.parameter)

    def _compare(self, ours: Captured, before: Snapshot) -> tuple[list[Difference], Evidence | None]:
        """Return the differences of a step, and the evidence if some disagree; the oracle then stands before it."""
        oracle, tolerances, step = self.oracle, self.tolerances, ours.step
        misread = find_misread(self.plan, oracle.source, ours)
        differences = [Difference(step, "data", "", math.inf if misread else 0.0, 0.0)]
        loss, forward = self._compare_forward(ours)
        norm, right, update_with = oracle.norm(ours.gradients), dict(oracle.gradients), self._update_gradients(ours)
        noise = self._update_noise(step, update_with, before) if self.led or self._is_fp64 else {}
        oracle.update(step, update_with)
        update = Update(self.weights or before[0], ours.parameters)
        differences += compare_dtypes(self.plan, ours, oracle, not self.weights) + forward
        wide = "fp64" if self.plan.dtypes.parameters == "fp64" else "fp32"
        differences.append(compare_numbers(step, "norm", ours.norm, norm, Tolerances.of(wide).norm))
        differences += compare_clipping(self.plan, ours)
        differences += compare_options(ours, oracle.options())
        parameters = but_for_noise(ours.parameters, oracle.parameters, noise)
        differences += compare_tensors(step, "parameter", parameters, oracle.parameters, tolerances.parameter)
        differences += compare_updates(step, update, Update(before[0], oracle.parameters), tolerances.update, noise)
        differences += compare_all_copies(step, ours, tolerances.gradient)
        wrong = {difference.quantity: difference.name for difference in reversed(differences) if not difference.agrees}
        if not wrong:
            oracle.adopt(but_for_noise(oracle.parameters, ours.parameters, noise))
            return differences, None
        oracle.restore(before)
        bad = [d.name for d in differences if d.quantity in ("gradient", "direction") and not d.agrees]
        bad = list(dict.fromkeys(bad))
        return differences, Evidence(
            self.plan, step, oracle, ours, wrong, tolerances, loss, norm, right, update_with, update, bad, misread,
            self.stale, self.earlier,
        )  # fmt: skip

    def _loosen(self, step: int, before: Snapshot) -> bool:
        """Allow what fp32 inside an fp64 model does, if it does something; True where that changes the tolerances.

        And what it does to a model in fp32 whose numbers nearly cancel: margins of pairs, gradients of deep models.
        Norms that compute in fp32 round a sum to another neighbour where it differs by one unit of fp64. How far that
        moves gradients depends on the weights, and so on the step.
        """
        if self.plan.dtypes.compute not in ("fp64", "fp32") or self.plan.float8:
            return False
        rounding = inner_rounding(self.oracle, step)
        self.oracle.restore(before)
        if rounding <= (self.loosened if self._is_fp64 else self.tolerances.gradient.error / 2):
            return False
        self.loosened = rounding
        self._allow(2 * rounding)  # it is a sample of what two orders of sums do
        return True

    def diagnose(self, traces: Sequence[ModuleTrace], undropped: Mapping[str, Tensor]) -> None:
        """Name the mistake of the step that disagreed, with what its ranks have made when it was run once more."""
        if self.evidence is None:
            return
        diagnosis = diagnose(replace(self.evidence, traces=traces, undropped=undropped))
        if diagnosis and not self.report.fault:
            self.report.fault, self.report.diagnosis = diagnosis

    def _compare_forward(self, ours: Captured) -> tuple[float, list[Difference]]:
        """Return the oracle's loss, and the differences of loss and gradients; 16 bits are held to measured noise."""
        oracle, tolerances, step, compute = self.oracle, self.tolerances, ours.step, self.plan.dtypes.compute
        differences = compare_losses_of_outputs("fp32" if oracle.narrows_logits else compute, ours)
        if compute not in SIXTEEN or self.plan.float8:
            loss, self.loss_tolerance = oracle.backward(step), tolerances.loss
            differences.append(compare_numbers(step, "loss", ours.loss, loss, self.loss_tolerance))
            differences += compare_tensors(step, "gradient", ours.gradients, oracle.gradients, tolerances.gradient)
            return loss, differences
        rounded = rounded_step(oracle, step, torch_dtype(compute))
        oracle.gradients = dict(rounded.gradients)
        noise = NOISES * rounded.loss_noise / (abs(rounded.loss) or 1.0)
        self.loss_tolerance = Tolerance(max(ROUNDED_LOSS, noise))
        differences.append(compare_numbers(step, "loss", ours.loss, rounded.loss, self.loss_tolerance))
        differences += compare_directions(step, ours.gradients, rounded.gradients, rounded.noise, ROUNDED_GRADIENT)
        differences += compare_exactness(self.plan, ours, rounded)
        return rounded.loss, differences

    @property
    def _is_fp64(self) -> bool:
        """True where an optimizer that magnifies rounding may be judged by the oracle's own gradients."""
        return self.plan.dtypes.compute == "fp64"

    def _update_gradients(self, ours: Captured) -> dict[str, Tensor]:
        """The oracle's own gradients, but ours where led, and for tensors whose gradient is nothing but rounding."""
        own = self.oracle.gradients
        noise = 1e3 * torch.finfo(self.oracle.compute).eps * largest(own.values())
        return {
            name: ours.gradients[name]
            if name in ours.gradients and (self.led or largest([gradient]) <= noise)
            else gradient
            for name, gradient in own.items()
        }

    def _update_noise(self, step: int, gradients: Mapping[str, Tensor], before: Snapshot) -> dict[str, Tensor]:
        """Return by element how far an update moves where each gradient is off by its rounding.

        Where the oracle updates with our gradients, that is rounding of the element itself: weight decay that is added
        to a gradient may cancel it. Elsewhere it is what sums as large as the largest gradient round. An optimizer that
        divides by the size of a gradient (RMSprop, Adam) makes a whole step of what is left.
        """
        oracle, ends, eps = self.oracle, [], torch.finfo(self.oracle.master).eps
        largest_sum = 0.0 if self.led else largest(gradients.values())
        for sign in (1, -1):
            relative, absolute = sign * ROUNDINGS * eps, sign * SUMS * eps * largest_sum
            oracle.update(step, {name: _moved(gradient, relative, absolute) for name, gradient in gradients.items()})
            ends.append({name: parameter.detach().clone() for name, parameter in oracle.parameters.items()})
            oracle.restore(before)
        noise = {name: (in_double(ends[0][name]) - in_double(ends[1][name])).abs() for name in ends[0]}
        for name in oracle.orthogonalized if self.plan.dtypes.compute in SIXTEEN else ():
            most = (ends[0][name] - before[0][name]).abs().max()
            noise[name] = torch.full_like(noise[name], float(BF16_ITERATIONS * most))
        return noise

    def _measure_floor(self) -> None:
        """Let the oracle disagree with itself: other order of samples, weights off by a rounding unit.

        A norm that computes in fp32 (Qwen3's) rounds each part of a gradient by itself. So where tensor ranks sum such
        parts the oracle sums two as well.
        """
        oracle = self.oracle
        frozen = [live for live in oracle.live.values() if is_differentiable(live) and not live.requires_grad]
        for parameter in frozen:  # whose gradients may be the ones that a smaller dtype shows in
            parameter.requires_grad_(True)
        oracle.backward(0)
        right, before, differences = oracle.gradients, oracle.snapshot(), []
        if self.norms_see_parts:
            oracle.backward(0, shares=PARTS)
            differences += compare_tensors(0, "", oracle.gradients, right, self.tolerances.gradient)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in filter(is_differentiable, oracle.parameters.values()):
                noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) * 4e-16
                parameter.mul_(1 + noise)
        oracle.backward(0, reverse=True)
        differences += compare_tensors(0, "", oracle.gradients, right, self.tolerances.gradient)
        oracle.restore(before)
        for parameter in frozen:
            parameter.requires_grad_(False)
        floor = max(difference.error for difference in differences)
        if floor > FLOOR_MOST:
            self.report.notes.append(
                f"One process that takes a step's samples in other groups has gradients that are {floor:.1e} apart: "
                "rows of the model change each other's numbers, or its dropout does not follow them."
            )
        elif floor > FLOOR_EXPECTED:
            self._allow(10 * floor)

    def _allow(self, error: float) -> None:
        self.led, wide = True, max(self.tolerances.gradient.error, error)
        self.tolerances = replace(self.tolerances, loss=Tolerance(wide), gradient=Tolerance(wide))
        notes = self.report.notes
        reason = ROUNDS_INSIDE if self._is_fp64 else NUMBERS_CANCEL
        notes[:] = [note for note in notes if not note.startswith(reason)]
        notes.append(f"{reason}; they are held to {wide:.1e}.")


def _moved(gradient: Tensor, relative: float, absolute: float) -> Tensor:
    """Return a gradient off by its rounding, every other element the other way: clipping undoes a move of all alike."""
    signs = torch.ones_like(gradient, memory_format=torch.contiguous_format)
    signs.view(-1)[1::2] = -1
    return gradient * (1 + signs * relative) + signs * absolute


def refuse_changing_forwards(oracle: Oracle, definition: str) -> None:
    """Refuse a user's module whose forward changes what later ones compute: the oracle runs others than the job.

    Raises:
        ModelError: a step is another when it is repeated from the same weights and rows.
    """
    before = oracle.snapshot()
    first: tuple[dict[str, Tensor], set[str]] | None = None
    for _ in range(REPEATS):
        oracle.backward(0)
        written = [name for name, start in before[0].items() if not torch.equal(oracle.parameters[name], start)]
        oracle.restore(before)
        gradients, used = first = first or (oracle.gradients, oracle.used)
        error = max((d.error for d in compare_tensors(0, "", oracle.gradients, gradients, REPEATED)), default=0.0)
        if written:
            what = f"writes the parameter {written[0]}"
        elif used != oracle.used:
            what = f"trains {min(used ^ oracle.used)} in some forwards only"
        elif error > REPEATED.error:
            what = f"keeps something that a later forward reads: repeated, a step has gradients {error:.1e} apart"
        else:
            continue
        raise ModelError(
            f"{definition} {what}. One process runs more forwards than the job, and so it cannot be held to it: verify "
            "the model without that, or compare two layouts with --against"
        )


@dataclass
class RecordedReference:
    """Compares with what another layout left in `directory`."""

    plan: Plan
    directory: Path
    report: VerifyReport

    def judge(self, ours: Captured) -> bool:
        """Compare one step; True where everything agrees."""
        step, tolerances = ours.step, Tolerances.of(self.plan.dtypes.compute, bool(self.plan.float8))
        if self.plan.float8 or self.plan.dtypes.compute in SIXTEEN:  # weights differ from the second step on
            tolerances = replace(tolerances, parameter=tolerances.gradient)
        numbers = json.loads((self.directory / f"{step}.json").read_text())
        differences = [compare_data(step, ours.data_hash, numbers["data_hash"])]
        if not differences[0].agrees:
            self.report.fault, self.report.diagnosis = "other data", OTHER_DATA
        differences.append(compare_numbers(step, "loss", ours.loss, numbers["loss"], tolerances.loss))
        differences += compare_tensors(
            step, "gradient", ours.gradients, self._read(step, "gradients"), tolerances.gradient
        )
        differences.append(compare_numbers(step, "norm", ours.norm, numbers["norm"], tolerances.norm))
        differences += compare_tensors(
            step, "parameter", ours.parameters, self._read(step, "parameters"), tolerances.parameter
        )
        differences += compare_all_copies(step, ours, tolerances.gradient)
        self.report.differences += differences
        return all(difference.agrees for difference in differences)

    def _read(self, step: int, kind: str) -> dict[str, Tensor]:
        stored = load_file(self.directory / f"{step}.{kind}.safetensors")
        order: list[str] = json.loads((self.directory / f"{step}.json").read_text())["order"]
        return {name: stored[name] for name in order}

    def compare_evaluation_loss(self, ours: Captured) -> list[Difference]:
        """Another layout's evaluation is not recorded."""
        return []

    def compare_averages(self, ours: Captured) -> list[Difference]:
        """Nothing is recorded of another layout's averages, which follow from its parameters."""
        return []

    def diagnose(self, traces: Sequence[ModuleTrace], undropped: Mapping[str, Tensor]) -> None:
        """Nothing is known of another layout beside its numbers."""


@dataclass
class Recording:
    """Leaves the numbers of a run in `directory`, for `RecordedReference`."""

    directory: Path

    def compare_evaluation_loss(self, ours: Captured) -> list[Difference]:
        """Nothing is compared."""
        return []

    def compare_averages(self, ours: Captured) -> list[Difference]:
        """Nothing is compared."""
        return []

    def judge(self, ours: Captured) -> bool:
        """Write one step."""
        step = ours.step
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


def rows_of(batch: Batch, with_padding: bool = False) -> Rows:
    """Return the rows of a microbatch as the oracle reads them, without padding unless its labels leave it out."""
    has_classes = batch.labels is not None and can_be_ignored(batch.labels)
    real = torch.ones_like(batch.counted) if with_padding and has_classes else batch.counted
    inputs = batch.arguments(real.nonzero().flatten().tolist())
    labels = None if batch.labels is None else batch.labels[real]
    documents = None if batch.document_ids is None else batch.document_ids[real]
    completions = None if batch.completions is None else batch.completions[real]
    filled = None if batch.is_token is None else ~batch.is_token[real]
    return Rows(inputs, labels, batch.rows[real].tolist(), documents, completions, filled)


def compare_clipping(plan: Plan, ours: Captured) -> list[Difference]:
    """Compare what gradients are multiplied by before the update with the clipping of the norm and the loss scale."""
    expected = expected_clipping(plan, ours)
    allowed = Tolerances.of("fp64" if plan.dtypes.parameters == "fp64" else "fp32").norm.error
    differences = []
    for rank, clipping in enumerate(ours.clipping):
        if clipping is not None:
            error = max(abs(clipping.factor / expected - 1), clipping.misfit)
            differences.append(Difference(ours.step, "clipping", f"of rank {rank}", error, allowed))
    return differences


def expected_clipping(plan: Plan, ours: Captured) -> float:
    """Return the factor of clipping, with the loss scale taken out."""
    return expected_factor(plan.job.optimizer.clip_norm, ours.norm) / ours.loss_scale


def compare_options(ours: Captured, oracle: Mapping[str, Mapping[str, Any]]) -> list[Difference]:
    """Compare each tensor's options of the optimizer, those that both sides have and that change numbers."""
    wrong: dict[str, list[str]] = {}  # sentence -> tensors
    for options in ours.options:
        for name, own in (options or {}).items():
            right = oracle.get(name, {})
            for key in (own.keys() & right.keys()) - IMPLEMENTATIONS:
                if not _equal_options(own[key], right[key]):
                    names = wrong.setdefault(f"{key} is {own[key]}, not {right[key]}", [])
                    names += [] if name in names else [name]
    sentences = [f"{what}, for {few(names)}" for what, names in wrong.items()]
    return [Difference(ours.step, "options", sentence, math.inf, 0.0) for sentence in sentences] or [
        Difference(ours.step, "options", "", 0.0, 0.0)
    ]


def _equal_options(own: Any, right: Any) -> bool:
    """Return whether two options are equal, numbers but for rounding."""
    if isinstance(own, float) and isinstance(right, float):
        return math.isclose(own, right, rel_tol=1e-12)
    return bool(own == right)


def compare_losses_of_outputs(compute: str, ours: Captured) -> list[Difference]:
    """Compare each rank's first loss with plain cross-entropy of the same outputs, which were made in `compute`."""
    allowed = Tolerance(OUTPUTS_LOSS.get(compute, 1e-4))
    return [
        compare_numbers(ours.step, "loss of outputs", record.losses[0], record.expected_loss, allowed)
        for record in ours.precision
        if record.expected_loss is not None
    ]


def compare_data(step: int, ours: int, reference: int) -> Difference:
    """Both have to have read the same samples; how far apart two hashes are says nothing."""
    return Difference(step, "data", "", 0.0 if ours == reference else math.inf, 0.0)


def compare_all_copies(step: int, ours: Captured, gradient: Tolerance) -> list[Difference]:
    """Copies of a parameter have to be equal bit by bit, those of a gradient within the tolerance of gradients."""
    differences = []
    for quantity, copies, allowed in (
        ("gradient copies", ours.gradient_copies, gradient.error),
        ("replicas", ours.copies, 0.0),
    ):
        differences += [Difference(step, quantity, name, copy.error, allowed) for name, copy in copies.items()]
    return differences
