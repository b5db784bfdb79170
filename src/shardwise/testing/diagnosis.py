"""Names the mistake behind a disagreement: a table of signatures, each a question put to the oracle.

A wrong gradient is written as a combination of what every microbatch of every rank should have brought: coefficients
of 0, 2 or 1/n then say what was lost, doubled or averaged. Where no combination fits, the oracle is asked to make the
suspected mistake itself (labels shifted, documents leaked, another step's dropout; no clipping, decay everywhere) and
the mistake that reproduces our numbers is the diagnosis. The oracle stands before the update of the step in question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.job.axes import Axis
from shardwise.plan.plan import Plan
from shardwise.testing.capture import Captured
from shardwise.testing.comparison import Tolerances, Update, compare_tensors, compare_updates
from shardwise.testing.copies import CopyError
from shardwise.testing.oracle import Oracle, Twist, UpdateTwist

MOST_PARTS = 128  # microbatches of all ranks in one step; each costs a backward of the oracle
ELEMENTS = 2000  # of each tensor that the fit looks at
NEAR = 0.05  # coefficients are told apart by more than this
SAME_RATIO = 1e-3  # updates of all tensors are one multiple of the right ones within this
EPSILONS = [10.0**-exponent for exponent in range(3, 13)]  # tried for an optimizer's eps


class Diagnosis(NamedTuple):
    """`fault` as in `testing.faults.FAULTS` (or a name of its own), and a sentence."""

    fault: str
    sentence: str


@dataclass
class Evidence:
    """One disagreeing step. `update_with` are the gradients that the oracle's update used, `update` is ours."""

    plan: Plan
    step: int
    oracle: Oracle
    ours: Captured
    wrong: set[str]  # quantities that disagree
    tolerances: Tolerances
    loss: float  # the oracle's
    norm: float
    update_with: Mapping[str, Tensor]
    update: Update

    @cached_property
    def parts(self) -> list[tuple[int, int, list[int]]]:
        """(data rank, microbatch, sample counters) of every microbatch that holds samples."""
        plan, first = self.plan, self.step * self.plan.sequences_per_step
        found = []
        for rank in range(plan.data_ranks):
            for number in range(plan.accumulation):
                start = (number * plan.data_ranks + rank) * plan.microbatch
                stop = min(start + plan.microbatch, plan.sequences_per_step)
                if start < stop:
                    found.append((rank, number, list(range(first + start, first + stop))))
        return found

    @cached_property
    def coefficients(self) -> dict[tuple[int, int], float] | None:
        """Return how often our gradient holds each part; None where it is no combination of them."""
        if len(self.parts) > MOST_PARTS:
            return None
        target, columns, keys = _sample(self.ours.gradients), [], []
        for rank, number, counters in self.parts:
            self.oracle.backward(self.step, counters)
            columns.append(_sample({name: self.oracle.gradients[name] for name in self.ours.gradients}))
            keys.append((rank, number))
        present = [i for i, column in enumerate(columns) if column.abs().max() > 0]
        if not present:
            return None
        matrix = torch.stack([columns[i] for i in present], dim=1)
        solution = torch.linalg.lstsq(matrix, target.unsqueeze(1)).solution.squeeze(1)
        miss = (matrix @ solution - target).abs().max() / matrix.abs().max()
        if float(miss) > 10 * self.tolerances.gradient.error:
            return None
        return {keys[i]: float(value) for i, value in zip(present, solution.tolist(), strict=True)}

    def reproduces(self, twist: Twist) -> bool:
        """Return True if the oracle with this mistake brings our gradients."""
        self.oracle.backward(self.step, twist=twist)
        found = compare_tensors(self.step, "", self.ours.gradients, self.oracle.gradients, self.tolerances.gradient)
        return all(difference.agrees for difference in found)

    def wrong_updates(self, twist: UpdateTwist) -> list[str]:
        """Return the tensors whose update is not that of the oracle with this mistake."""
        found = compare_updates(self.step, self.update, self._updated(twist), self.tolerances.update)
        return [difference.name for difference in found if not difference.agrees]

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


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """The first signature that fits."""
    for quantities, signature in SIGNATURES:
        if quantities & evidence.wrong and (found := signature(evidence)):
            return found
    return None


def _ties(evidence: Evidence) -> Diagnosis | None:
    extra = [name for name in evidence.ours.parameters if name not in evidence.oracle.parameters]
    if not extra:
        return None
    return Diagnosis("broken_tie", f"a tie is broken: {', '.join(extra)} should share storage with an earlier tensor")


def _not_finite(evidence: Evidence) -> Diagnosis | None:
    if not evidence.ours.skipped:
        return None
    return Diagnosis("not_finite", "our gradients are not finite, so that nothing was updated")


def _whole_scale(evidence: Evidence) -> Diagnosis | None:
    """All parts with one coefficient."""
    coefficients = evidence.coefficients or {}
    mean = sum(coefficients.values()) / max(len(coefficients), 1)
    if not coefficients or abs(mean - 1) < NEAR or any(abs(c - mean) > NEAR * mean for c in coefficients.values()):
        return None
    plan = evidence.plan
    sizes: dict[str, int] = {"data ranks": plan.data_ranks, "microbatches": plan.accumulation}
    sizes |= {str(axis): degree for axis, degree in plan.degrees.items()}
    for name, size in sizes.items():
        if size > 1 and abs(mean * size - 1) < NEAR:
            return Diagnosis("mean_for_sum", f"gradients are divided by {size} ({name}): a mean where a sum belongs")
    return Diagnosis("scaled_gradient", f"every gradient is {mean:.4g} times what it should be")


def _replicas(evidence: Evidence) -> Diagnosis | None:
    """Only the parts of our own replica are there, and replicas have come apart."""
    if not any(copies.error for copies in evidence.ours.copies.values()):
        return None
    shard = evidence.plan.degrees[Axis.SHARD]
    coefficients = evidence.coefficients or {}
    if coefficients and all((rank < shard) == (c > NEAR) for (rank, _), c in coefficients.items()):
        return Diagnosis("missing_replica_reduction", "gradients are not summed over the replicas, which come apart")
    return None


def _odd_parts(evidence: Evidence) -> Diagnosis | None:
    """Some parts are lost or doubled while the others count once."""
    coefficients = evidence.coefficients or {}
    odd = {key: c for key, c in coefficients.items() if abs(c - 1) > NEAR}
    if not odd or len(odd) == len(coefficients):
        return None
    value = next(iter(odd.values()))
    if any(abs(c - value) > NEAR for c in odd.values()):
        return Diagnosis("uneven_gradient", f"gradient coefficients by (rank, microbatch): {_rounded(odd)}")
    what, fault = {0: ("is lost", "lost"), 2: ("counts twice", "doubled")}.get(
        round(value), (f"counts {value:.3g} times", "uneven")
    )
    ranks, numbers = {rank for rank, _ in odd}, {number for _, number in odd}
    if len(ranks) == 1 and all(key in odd for key in coefficients if key[0] in ranks):
        return Diagnosis(f"{fault}_rank", f"the gradient of data rank {ranks.pop()} {what}")
    if len(numbers) == 1:
        who = "every rank" if len(ranks) == evidence.plan.data_ranks > 1 else f"data ranks {sorted(ranks)}"
        return Diagnosis(f"{fault}_microbatch", f"the gradient of microbatch {numbers.pop()} of {who} {what}")
    return Diagnosis(f"{fault}_gradient", f"the gradient of (data rank, microbatch) {sorted(odd)} {what}")


def _batch_mistake(evidence: Evidence) -> Diagnosis | None:
    """The oracle makes the mistake itself."""
    job, step = evidence.plan.job, evidence.step
    hypotheses = [
        (Twist(shift_labels=1), "shifted_label", "labels stand one position too late"),
        (Twist(shift_labels=-1), "shifted_label", "labels stand one position too early"),
    ]
    if job.data.isolates_documents:
        hypotheses.append((Twist(leak_documents=True), "leaked_document", "attention crosses documents"))
    hypotheses += [
        (Twist(dropout_step=other), "stale_dropout", f"dropout has the masks of step {other}")
        for other in sorted({0, step - 1, step + 1} - {step, -1})
    ]
    hypotheses.append((Twist(no_dropout=True), "missing_dropout", "dropout is not applied"))
    for twist, fault, sentence in hypotheses:
        if evidence.reproduces(twist):
            return Diagnosis(fault, sentence)
    return None


def _some_tensors(evidence: Evidence) -> Diagnosis | None:
    """Only certain tensors have a wrong gradient."""
    found = compare_tensors(evidence.step, "", evidence.ours.gradients, _right(evidence), evidence.tolerances.gradient)
    bad = [difference.name for difference in found if not difference.agrees]
    if len(bad) > max(1, len(found) // 4):
        return None
    ties = {name for group in (evidence.oracle.ties or ()) for name in group}
    what = "tied tensors" if ties and set(bad) <= ties else "tensors"
    return Diagnosis("some_gradients", f"only these {what} have a wrong gradient: {', '.join(bad)}")


def _right(evidence: Evidence) -> dict[str, Tensor]:
    evidence.oracle.backward(evidence.step)
    return evidence.oracle.gradients


def _where_it_begins(evidence: Evidence) -> Diagnosis | None:
    """No known mistake fits: name the module at which wrong gradients begin, and the ranks that hold them."""
    right = _right(evidence)
    found = compare_tensors(evidence.step, "", evidence.ours.gradients, right, evidence.tolerances.gradient)
    owners: dict[str, list[str]] = {}
    for difference in found:
        if not difference.agrees:
            owners.setdefault(difference.name.rpartition(".")[0], []).append(difference.name)
    called = [name for name in evidence.oracle.modules_in_order(evidence.step) if name in owners]
    if not called:
        return None
    if "loss" in evidence.wrong:
        name, why = called[0], "the first module in the order of computation whose gradient differs"
    else:
        name, why = called[-1], "the loss agrees, and backward reaches no wrong gradient before that of this module"
    ranks = _ranks_of(evidence, owners[name][0], right)
    where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
    return Diagnosis("unknown_gradient", f"none of the known mistakes; it begins at {name}{where}: {why}")


def _ranks_of(evidence: Evidence, name: str, right: Mapping[str, Tensor]) -> list[int]:
    """Return the ranks whose slices of a gradient are wrong."""
    if name not in right or name not in evidence.ours.gradients:
        return []
    error = (evidence.ours.gradients[name].double() - right[name].double()).abs()
    allowed = evidence.tolerances.gradient.error * float(right[name].abs().max())
    return [
        rank
        for rank, held in enumerate(evidence.ours.slices)
        if any(error[box].numel() and not float(error[box].max()) <= allowed for box in held.get(name, ()))
    ]


def _loss(evidence: Evidence) -> Diagnosis | None:
    if "gradient" in evidence.wrong:
        return None
    ratio = evidence.ours.loss / evidence.loss
    return Diagnosis("wrong_loss", f"gradients are right but the reported loss is {ratio:.4g} times what it should be")


def _norm(evidence: Evidence) -> Diagnosis | None:
    """Gradients are right, their norm is not."""
    if "gradient" in evidence.wrong:
        return None
    ratio = evidence.ours.norm / evidence.norm if evidence.norm else float("inf")
    if abs(ratio - 1) < SAME_RATIO:
        sentence = f"the gradient norm is off by {abs(ratio - 1):.1e} of itself while gradients agree: it is rounded"
        return Diagnosis("rounded_norm", sentence)
    reason = "it is not the norm of the gradients"
    for name, size in evidence.plan.degrees.items():
        if size > 1 and abs(ratio**2 / size - 1) < NEAR:
            reason = f"its square counts elements {size} times ({name}): replication is ignored"
        elif size > 1 and abs(ratio**2 * size - 1) < NEAR:
            reason = f"its square holds 1/{size} of the elements ({name})"
    return Diagnosis("wrong_norm", f"the gradient norm is {ratio:.6g} times what it should be: {reason}")


def _stale(evidence: Evidence) -> Diagnosis | None:
    still = [rank for rank, moved in enumerate(evidence.ours.moved) if not moved]
    if not still:
        return None
    if len(still) == len(evidence.ours.moved):
        return Diagnosis("no_update", "nothing was updated")
    return Diagnosis("stale_shard", f"the slices of rank {', '.join(map(str, still))} were not updated")


def _update_mistake(evidence: Evidence) -> Diagnosis | None:
    """Gradients and norm are right; the oracle's optimizer makes the mistake itself."""
    if evidence.wrong & {"gradient", "norm"}:
        return None
    for twist, fault, sentence in _update_hypotheses(evidence.plan):
        if not evidence.wrong_updates(twist):
            return Diagnosis(fault, sentence)
    wrong = evidence.wrong_updates(UpdateTwist())
    if set(wrong).isdisjoint(evidence.wrong_updates(UpdateTwist(decay_none=True))) and wrong:
        return Diagnosis("no_decay", f"weight decay is not applied to {_few(wrong)}")
    ratio = evidence.update_ratio
    if ratio is not None:
        sentence = f"updates are {ratio:.4g} times what they should be: the learning rate"
        return Diagnosis("wrong_learning_rate", sentence)
    if wrong:
        return Diagnosis("wrong_update", f"gradients and norm are right, the update is not, of {_few(wrong)}")
    return None


def _update_hypotheses(plan: Plan) -> Iterator[tuple[UpdateTwist, str, str]]:
    settings = plan.job.optimizer
    if settings.clip_norm is not None:
        yield UpdateTwist(clips=0), "clip_skipped", "gradients are not clipped"
        yield UpdateTwist(clips=2), "clip_twice", "gradients are clipped twice"
    if settings.weight_decay:
        yield UpdateTwist(decay_all=True), "decay_on_bias", "weight decay is applied to biases and norms"
        yield UpdateTwist(decay_none=True), "no_decay", "weight decay is not applied"
    if settings.name in ("Adam", "AdamW"):
        yield UpdateTwist(counted=1), "late_correction", "the optimizer's step counter is one ahead"
        yield UpdateTwist(counted=10**9), "no_bias_correction", "the optimizer's moments are not corrected for bias"
        for eps in EPSILONS:
            yield UpdateTwist(eps=eps), "wrong_eps", f"the optimizer's eps is {eps:g}, not the job's"


def _few(names: Sequence[str]) -> str:
    """Return at most four names, and how many there are where there are more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _gradients_apart(evidence: Evidence) -> Diagnosis | None:
    """Gradients as the first holder has them are right, a copy is not."""
    if evidence.wrong & {"gradient", "loss"}:
        return None
    tolerance = evidence.tolerances.gradient.error
    return _copies_apart("gradient_copies_apart", "the gradient of", evidence.ours.gradient_copies, tolerance)


def _apart(evidence: Evidence) -> Diagnosis | None:
    return _copies_apart("replicas_apart", "after the update", evidence.ours.copies, 0.0)


def _copies_apart(fault: str, what: str, copies: Mapping[str, CopyError], tolerance: float) -> Diagnosis | None:
    """Name the tensor whose copies differ most, and the ranks whose copy is not the first holder's."""
    worst = max(copies, key=lambda name: copies[name].error, default="")
    if not worst or copies[worst].error <= tolerance:
        return None
    ranks = ", ".join(map(str, copies[worst].ranks))
    return Diagnosis(fault, f"{what} {worst}: the copy of rank {ranks} differs from the first holder's")


# Judged in order; a signature is asked only where one of its quantities disagrees.
SIGNATURES: tuple[tuple[set[str], Callable[[Evidence], Diagnosis | None]], ...] = (
    ({"gradient", "parameter"}, _ties),
    ({"gradient", "loss", "norm"}, _not_finite),
    ({"gradient"}, _replicas),
    ({"gradient"}, _whole_scale),
    ({"gradient"}, _odd_parts),
    ({"gradient"}, _batch_mistake),
    ({"gradient"}, _some_tensors),
    ({"gradient"}, _where_it_begins),
    ({"gradient copies"}, _gradients_apart),
    ({"loss"}, _loss),
    ({"norm"}, _norm),
    ({"parameter", "update", "replicas"}, _stale),
    ({"parameter", "update"}, _update_mistake),
    ({"replicas"}, _apart),
)


def _sample(tensors: Mapping[str, Tensor]) -> Tensor:
    """Evenly spaced elements of every tensor, fp64."""
    pieces = []
    for tensor in tensors.values():
        flat = tensor.reshape(-1).to(torch.float64)
        pieces.append(flat[:: max(1, -(-flat.numel() // ELEMENTS))])
    return torch.cat(pieces)


def _rounded(values: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    return {key: round(value, 3) for key, value in values.items()}
