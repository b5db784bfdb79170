"""Signatures of mistakes between right gradients and the next weights: norm, clipping, options, update, copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwise.plan.plan import Plan
from shardwise.testing.copies import CopyError
from shardwise.testing.evidence import SAME_RATIO, Diagnosis, Evidence, few
from shardwise.testing.oracle import UpdateTwist

SQUARES_NEAR = 1e-4  # of the squared norm, within which a mistake explains it
SMALL_NEAR = 0.05  # of what a mistake would add to it, within which it explains a small difference
EPSILONS = [10.0**-exponent for exponent in range(3, 13)]  # tried for an optimizer's eps
COUPLED = "weight decay is added to the gradient, where it should shrink the weight beside it"
WRONG_OPTIONS = {"lr": "wrong_learning_rate", "eps": "wrong_eps", "decoupled_weight_decay": "coupled_decay"}
GRADIENT = {"gradient", "direction"}


def wrong_norm(evidence: Evidence) -> Diagnosis | None:
    """Gradients are right, their norm is not."""
    if evidence.wrong.keys() & GRADIENT:
        return None
    ratio = evidence.ours.norm / evidence.norm if evidence.norm else float("inf")
    extra, scale = evidence.ours.norm**2 - evidence.norm**2, evidence.norm**2
    # Gradients of experts may be so small that a norm without them looks rounded.
    reasons = [reason for reason, squares in _of_experts(evidence) if abs(squares - extra) < SMALL_NEAR * abs(squares)]
    if abs(ratio - 1) < SAME_RATIO and not reasons:
        sentence = f"the gradient norm is off by {abs(ratio - 1):.1e} of itself while gradients agree: it is rounded"
        return Diagnosis("rounded_norm", sentence)
    reasons += [reason for reason, squares in _norm_hypotheses(evidence) if abs(squares - extra) < SQUARES_NEAR * scale]
    reason = reasons[0] if reasons else "it is not the norm of the gradients"
    return Diagnosis("wrong_norm", f"the gradient norm is {ratio:.6g} times what it should be: {reason}")


def _norm_hypotheses(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yield (what would be wrong, what it would add to the square of the norm)."""
    whole = evidence.norm**2
    squares = {name: float(value.double().square().sum()) for name, value in evidence.ours.gradients.items()}
    for name, size in evidence.plan.degrees.items():
        if size > 1:
            yield f"its square counts elements {size} times ({name}): replication is ignored", (size - 1) * whole
            yield f"its square holds 1/{size} of the elements ({name})", (1 / size - 1) * whole
    copied = [name for name in squares if name in evidence.ours.copies]
    for name, size in evidence.plan.degrees.items():
        if size > 1:
            added = (size - 1) * sum(squares[name] for name in copied)
            yield f"it counts tensors that several ranks hold once a rank ({name})", added
    for rank in range(len(evidence.ours.slices)):
        yield f"it leaves out the elements of rank {rank}", -_share(evidence, rank)
    for tensor, square in squares.items():
        yield f"it counts {tensor} twice", square
        yield f"it leaves out {tensor}", -square


def _of_experts(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yield the same for experts that ranks may share."""
    gradients = evidence.ours.gradients
    names = [name for name in evidence.expert_tensors if name in gradients]
    squares = sum(float(gradients[name].double().square().sum()) for name in names)
    if squares:
        yield "it leaves out the experts", -squares
        yield "it counts the experts twice", squares


def _share(evidence: Evidence, rank: int) -> float:
    """Return a rank's share of the squared norm; what several ranks hold is shared among them."""
    share = 0.0
    for name, boxes in evidence.ours.slices[rank].items():
        gradient = evidence.ours.gradients.get(name)
        holders = sum(slices.get(name) == boxes for slices in evidence.ours.slices)
        if gradient is not None:
            share += sum(float(gradient[box].double().square().sum()) for box in boxes) / holders
    return share


def wrong_clipping(evidence: Evidence) -> Diagnosis | None:
    """Gradients are right, what the optimizer gets is not the clipped gradient."""
    if evidence.wrong.keys() & (GRADIENT | {"norm"}):
        return None
    clip, norm, scale = evidence.plan.job.optimizer.clip_norm, evidence.ours.norm, evidence.ours.loss_scale
    clippings = [clipping for clipping in evidence.ours.clipping if clipping is not None]
    factors = [clipping.factor * scale for clipping in clippings]
    if any(clipping.misfit > SAME_RATIO for clipping in clippings):
        return Diagnosis("changed_gradient", "gradients change between their reduction and the update")
    if max(factors) - min(factors) > SAME_RATIO * max(factors):
        return Diagnosis("local_clip", f"ranks clip by factors of their own, {_listed(factors)}: by parts of the norm")
    expected = expected_factor(clip, norm)
    if scale != 1 and abs(factors[0] - expected * scale) <= SAME_RATIO * expected * scale:
        return Diagnosis("scale_left_in", "the loss scale is not taken out of the gradients")
    if clip is not None:
        right = min(1.0, clip / (norm + 1e-6))
        known = {
            1.0: ("clip_skipped", "gradients are not clipped"),
            right**2: ("clip_twice", "gradients are clipped twice"),
            min(1.0, clip / (norm * scale)): (
                "clip_scaled",
                "gradients are clipped before the loss scale is taken out",
            ),
        }
        for factor, (fault, sentence) in known.items():
            if abs(factors[0] - factor) <= SAME_RATIO * factor:
                return Diagnosis(fault, sentence)
    return Diagnosis("wrong_clip", f"gradients are multiplied by {factors[0]:.4g} for the update, not {expected:.4g}")


def expected_factor(clip: float | None, norm: float) -> float:
    """Return the factor of clipping."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def wrong_options(evidence: Evidence) -> Diagnosis | None:
    """The optimizer was told something else."""
    sentence = evidence.wrong["options"]
    key = sentence.partition(" ")[0]
    if key != "weight_decay":
        return Diagnosis(WRONG_OPTIONS.get(key, "wrong_option"), sentence)
    if " not 0.0," in sentence and not evidence.plan.job.optimizer.groups:  # else matrices too may have none
        return Diagnosis("decay_on_bias", sentence)
    if not sentence.startswith("weight_decay is 0.0,"):
        return Diagnosis("wrong_decay", sentence)
    if not evidence.wrong_updates(UpdateTwist(couples_decay=True)) and evidence.wrong_updates(UpdateTwist()):
        return Diagnosis("coupled_decay", COUPLED)
    return Diagnosis("no_decay", sentence)


def stale_slices(evidence: Evidence) -> Diagnosis | None:
    still = [rank for rank, moved in enumerate(evidence.ours.moved) if not moved]
    if not still:
        return None
    if len(still) == len(evidence.ours.moved):
        return Diagnosis("no_update", "nothing was updated")
    return Diagnosis("stale_shard", f"the slices of rank {', '.join(map(str, still))} were not updated")


def wrong_update(evidence: Evidence) -> Diagnosis | None:
    """Gradients and norm are right; the oracle's optimizer makes the mistake itself."""
    if evidence.wrong.keys() & (GRADIENT | {"norm", "clipping"}):
        return None
    for twist, fault, sentence in _update_hypotheses(evidence.plan):
        if not evidence.wrong_updates(twist):
            return Diagnosis(fault, sentence)
    wrong = evidence.wrong_updates(UpdateTwist())
    if set(wrong).isdisjoint(evidence.wrong_updates(UpdateTwist(decay_none=True))) and wrong:
        return Diagnosis("no_decay", f"weight decay is not applied to {few(wrong)}")
    still = [name for name in wrong if not evidence.update.of(name).any()]
    if still and still == wrong:
        return Diagnosis("frozen_tensor", f"{few(still)} {'is' if len(still) == 1 else 'are'} not updated")
    ratio = evidence.update_ratio
    if ratio is not None:
        sentence = f"updates are {ratio:.4g} times what they should be, with the learning rate of the job"
        return Diagnosis("scaled_update", sentence)
    if wrong:
        return Diagnosis("wrong_update", f"gradients and norm are right, the update is not, of {few(wrong)}")
    return None


def _update_hypotheses(plan: Plan) -> Iterator[tuple[UpdateTwist, str, str]]:
    settings = plan.job.optimizer
    yield UpdateTwist(repeats=2), "updated_twice", "the optimizer steps twice"
    yield UpdateTwist(forgets=True), "lost_state", "the optimizer has lost its state of the steps before"
    if settings.weight_decay:
        yield UpdateTwist(decay_all=True), "decay_on_bias", "weight decay is applied to biases and norms"
        yield UpdateTwist(decay_none=True), "no_decay", "weight decay is not applied"
    if settings.name in ("Adam", "AdamW"):
        yield UpdateTwist(couples_decay=True), "coupled_decay", COUPLED
        yield UpdateTwist(counted=1), "late_correction", "the optimizer's step counter is one ahead"
        yield UpdateTwist(counted=10**9), "no_bias_correction", "the optimizer's moments are not corrected for bias"
        for eps in EPSILONS:
            yield UpdateTwist(eps=eps), "wrong_eps", f"the optimizer's eps is {eps:g}, not the job's"


def copies_apart(evidence: Evidence) -> Diagnosis | None:
    return describe_copies("replicas_apart", "after the update", evidence.ours.copies, 0.0)


def describe_copies(fault: str, what: str, copies: Mapping[str, CopyError], tolerance: float) -> Diagnosis | None:
    """Name the tensor whose copies differ most, and the ranks whose copy is not the first holder's."""
    worst = max(copies, key=lambda name: copies[name].error, default="")
    if not worst or copies[worst].error <= tolerance:
        return None
    ranks = ", ".join(map(str, copies[worst].ranks))
    return Diagnosis(fault, f"{what} {worst}: the copy of rank {ranks} differs from the first holder's")
