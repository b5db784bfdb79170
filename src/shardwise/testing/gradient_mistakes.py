"""Signatures of mistakes in what a step reads and in its loss and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from shardwise.job.axes import Axis
from shardwise.testing.comparison import Tolerance, compare_tensors
from shardwise.testing.evidence import SAME_RATIO, Diagnosis, Evidence, Part, few
from shardwise.testing.oracle import Twist
from shardwise.testing.origin import find_origin
from shardwise.testing.update_mistakes import describe_copies

OUTPUTS_NEAR = 1e-4  # within which a loss is one that lacks a term
KEPT_NEAR = 0.02  # of what gradients are off by, within which it is those of the step before
NEAR = 0.05  # coefficients are told apart by more than this


def misread(evidence: Evidence) -> Diagnosis | None:
    """Name what is wrong with the samples."""
    return Diagnosis(*evidence.misread) if evidence.misread else None


def wrong_dtypes(evidence: Evidence) -> Diagnosis | None:
    """Name the role whose dtype is not the plan's."""
    return Diagnosis("wrong_dtype", evidence.wrong["dtype"])


def broken_ties(evidence: Evidence) -> Diagnosis | None:
    """Name tensors that only our side has."""
    extra = [name for name in evidence.ours.parameters if name not in evidence.oracle.parameters]
    if not extra:
        return None
    return Diagnosis("broken_tie", f"a tie is broken: {', '.join(extra)} should share storage with an earlier tensor")


def not_finite(evidence: Evidence) -> Diagnosis | None:
    """Say so where our gradients are not numbers."""
    if not evidence.ours.skipped:
        return None
    return Diagnosis("not_finite", "our gradients are not finite, so that nothing was updated")


def unreduced_replicas(evidence: Evidence) -> Diagnosis | None:
    """Look whether only the parts of our own replica are there, while replicas have come apart."""
    if not any(copies.error for copies in evidence.ours.copies.values()):
        return None
    shard = evidence.plan.degrees[Axis.SHARD]
    sentence = "gradients are not summed over the replicas, which come apart"
    if _is_first_replica(evidence.coefficients, shard):
        return Diagnosis("missing_replica_reduction", sentence)
    names = [name for name in evidence.wrong_tensors if evidence.ours.copies.get(name) is not None]
    if names and _is_first_replica(evidence.coefficients_of(names), shard):
        return Diagnosis("missing_unit_reduction", f"{sentence}, of {few(names)}")
    return None


def _is_first_replica(coefficients: Mapping[Part, float], shard: int) -> bool:
    has_others = any(rank >= shard for rank, _ in coefficients)
    return has_others and all((rank < shard) == (c > NEAR) for (rank, _), c in coefficients.items())


def local_means(evidence: Evidence) -> Diagnosis | None:
    """Look whether each part's coefficient is that of a mean over fewer labels than all."""
    coefficients, counts = evidence.coefficients, evidence.counts
    plan, total = evidence.plan, sum(evidence.counts.values())
    accumulation = plan.accumulation_of(evidence.step)
    of_rank = [sum(n for (rank, _), n in counts.items() if rank == own) for own in range(plan.data_ranks)]
    of_number = [sum(n for (_, number), n in counts.items() if number == own) for own in range(accumulation)]
    parts = plan.data_ranks * accumulation
    by_rank = {part: total / (of_rank[part[0]] or 1) for part in counts}
    by_part = {part: total / (count or 1) for part, count in counts.items()}
    by_number = {part: total / (of_number[part[1]] or 1) for part in counts}
    hypotheses = (
        ("mean_of_rank_means", "by the count of its own rank", by_rank, plan.data_ranks),
        ("mean_of_microbatch_means", "by its own count", by_part, parts),
        ("mean_of_microbatch_means", "by the count of its microbatch on all ranks", by_number, accumulation),
    )
    for fault, what, factors, size in hypotheses:
        expected = {part: factors[part] / size for part in coefficients}
        is_even = all(abs(value - 1) < SAME_RATIO for value in expected.values())
        if coefficients and not is_even and _are_near(coefficients, expected):
            sentence = f"the loss of each microbatch is divided {what}, not by that of all: a mean of means"
            return Diagnosis(fault, sentence)
    return None


def _are_near(some: Mapping[Part, float], others: Mapping[Part, float]) -> bool:
    return all(abs(value - others[part]) < 2 * SAME_RATIO * max(others[part], 1.0) for part, value in some.items())


def one_scale(evidence: Evidence, names: Sequence[str] = ()) -> Diagnosis | None:
    """Look whether all parts have one coefficient; of the tensors `names`, if there are some."""
    coefficients = evidence.coefficients_of(names) if names else evidence.coefficients
    mean = sum(coefficients.values()) / max(len(coefficients), 1)
    spread = max((abs(c - mean) for c in coefficients.values()), default=0.0)
    is_off = abs(mean - 1) > (10 * SAME_RATIO if spread < SAME_RATIO else NEAR)
    if not is_off or not coefficients or spread > NEAR * abs(mean):
        return None
    if not names and abs(mean * evidence.tokens / (sum(evidence.counts.values()) or 1) - 1) < SAME_RATIO:
        sentence = "the loss is divided by all tokens of the step, those without a label too"
        return Diagnosis("divided_by_all_tokens", sentence)
    of = f" of {few(names)}" if names else ""
    if abs(mean) < NEAR:
        return Diagnosis("zero_gradient", f"the gradient{of} is zero")
    plan = evidence.plan
    sizes: dict[str, int] = {"data ranks": plan.data_ranks, "microbatches": plan.accumulation_of(evidence.step)}
    sizes |= {str(axis): degree for axis, degree in plan.degrees.items()}
    divisors = [name for name, size in sizes.items() if size > 1 and abs(mean * size - 1) < SAME_RATIO * 10]
    times = [name for name, size in sizes.items() if size > 1 and abs(mean / size - 1) < SAME_RATIO * 10]
    if divisors:
        sentence = (
            f"gradients{of} are divided by {round(1 / mean)} ({' or '.join(divisors)}): a mean where a sum belongs"
        )
        return Diagnosis("mean_for_sum", sentence)
    why = f", the number of ranks or parts ({' or '.join(times)}): a sum where one belongs" if times else ""
    return Diagnosis("scaled_gradient", f"every gradient{of} is {mean:.4g} times what it should be{why}")


def odd_parts(evidence: Evidence, names: Sequence[str] = ()) -> Diagnosis | None:
    """Look whether some parts are lost or doubled while the others count once; of the tensors `names`."""
    coefficients = evidence.coefficients_of(names) if names else evidence.coefficients
    odd = {key: c for key, c in coefficients.items() if abs(c - 1) > NEAR}
    if not odd or len(odd) == len(coefficients):
        return None
    of = f" of {few(names)}" if names else ""
    value = next(iter(odd.values()))
    if any(abs(c - value) > NEAR for c in odd.values()):
        return Diagnosis("uneven_gradient", f"gradient coefficients{of} by (data rank, microbatch): {_rounded(odd)}")
    what, fault = {0: ("is lost", "lost"), 2: ("counts twice", "doubled")}.get(
        round(value) if abs(value - round(value)) < NEAR else -1, (f"counts {value:.3g} times", "uneven")
    )
    ranks, numbers = sorted({rank for rank, _ in odd}), sorted({number for _, number in odd})
    who = "every rank" if len(ranks) == evidence.plan.data_ranks > 1 else f"data rank {_listed(ranks)}"
    every = {key for key in coefficients if key[0] in ranks and key[1] in numbers}
    if every != odd.keys():
        return Diagnosis(f"{fault}_gradient", f"the gradient{of} of (data rank, microbatch) {sorted(odd)} {what}")
    if len(ranks) == 1 and all(key in odd for key in coefficients if key[0] in ranks):
        return Diagnosis(f"{fault}_rank", f"the gradient{of} of data rank {ranks[0]} {what}")
    return Diagnosis(f"{fault}_microbatch", f"the gradient{of} of microbatch {_listed(numbers)} of {who} {what}")


def stale_weights(evidence: Evidence) -> Diagnosis | None:
    """Look whether the weights of the step before bring our gradients."""
    if evidence.stale is None:
        return None
    now = evidence.oracle.snapshot()
    evidence.oracle.restore(evidence.stale)
    is_stale = evidence.reproduces(Twist())
    evidence.oracle.restore(now)
    sentence = f"step {evidence.step} computes with the weights from before the last update"
    return Diagnosis("stale_weights", sentence) if is_stale else None


def kept_gradients(evidence: Evidence) -> Diagnosis | None:
    """Look whether our gradients are the right ones and a multiple of those of the step before."""
    names = [name for name in evidence.right if name in evidence.ours.gradients and name in evidence.earlier]
    pairs = [(evidence.ours.gradients[n].double() - evidence.right[n].double(), evidence.earlier[n]) for n in names]
    squares = sum(float(earlier.double().square().sum()) for _, earlier in pairs)
    if not squares:
        return None
    factor = sum(float((apart * earlier.double()).sum()) for apart, earlier in pairs) / squares
    size = math.hypot(*(float(apart.norm()) for apart, _ in pairs))
    left = math.hypot(*(float((apart - factor * earlier.double()).norm()) for apart, earlier in pairs))
    if factor <= 0 or not size or left > KEPT_NEAR * size:
        return None
    return Diagnosis("kept_gradients", f"gradients of step {evidence.step} are added to those of the step before")


def adapter_scaled_twice(evidence: Evidence) -> Diagnosis | None:
    """Let the oracle multiply by alpha / rank twice."""
    if evidence.plan.job.adapter.kind == "none" or not evidence.reproduces(Twist(scales_adapters_twice=True)):
        return None
    return Diagnosis("adapter_scaled_twice", "the adapters' product is multiplied by alpha / rank twice")


def reference_not_frozen(evidence: Evidence) -> Diagnosis | None:
    """Let the oracle compare the model with itself as it is now."""
    if not evidence.plan.reference or not evidence.reproduces(Twist(reference_moves=True)):
        return None
    sentence = "the reference of the preference loss is the model as it is now, not as training began"
    return Diagnosis("reference_not_frozen", sentence)


def batch_mistake(evidence: Evidence) -> Diagnosis | None:
    """Let the oracle make the mistake itself."""
    job, step = evidence.plan.job, evidence.step
    hypotheses = [
        (Twist(shift_labels=1), "shifted_label", "labels stand one position too late"),
        (Twist(shift_labels=-1), "shifted_label", "labels stand one position too early"),
    ]
    if job.training.z_loss:
        hypotheses.append((Twist(no_z_loss=True), "missing_z_loss", "training.z_loss is not in the loss"))
    if job.training.label_smoothing:
        sentence = "training.label_smoothing is not in the loss"
        hypotheses.append((Twist(no_smoothing=True), "missing_smoothing", sentence))
    if job.isolates_documents:
        hypotheses.append((Twist(leak_documents=True), "leaked_document", "attention crosses documents"))
    hypotheses += [
        (Twist(dropout_step=other), "stale_dropout", f"dropout has the masks of step {other}")
        for other in sorted({0, step - 1, step + 1} - {step, -1})
    ]
    hypotheses += _balancing_mistakes(evidence)
    size = evidence.plan.microbatch
    hypotheses.append((Twist(no_dropout=True), "missing_dropout", "dropout is not applied"))
    sentence = "dropout's masks depend on a row's place in its microbatch, not on its sample"
    hypotheses.append((Twist(local_rows=size), "dropout_by_local_row", sentence))
    for twist, fault, sentence in hypotheses:
        if evidence.reproduces(twist):
            return Diagnosis(fault, sentence)
    return None


def _balancing_mistakes(evidence: Evidence) -> Iterator[tuple[Twist, str, str]]:
    """Yield what may be wrong with the loss that balances experts."""
    if not evidence.oracle.routers.coefficient:
        return
    plan = evidence.plan
    yield Twist(balancing=0.0), "missing_balancing_loss", "the routers' balancing loss has no gradient"
    by_rank = [[own for rank, _, own in evidence.parts if rank == other] for other in range(plan.data_ranks)]
    groups = tuple(tuple(chain(*parts)) for parts in by_rank if parts)
    sentence = "the balancing loss is that of each rank's own tokens, not of all"
    yield Twist(balanced_apart=groups), "local_balancing_loss", sentence
    sizes = {"data ranks": plan.data_ranks, "microbatches": plan.accumulation_of(evidence.step)}
    sizes |= {str(axis): degree for axis, degree in plan.degrees.items()}
    for name, size in sizes.items():
        if size > 1:
            sentence = f"the balancing loss counts {{}} times: by {name}"
            yield Twist(balancing=size), "scaled_balancing_loss", sentence.format(size)
            yield Twist(balancing=1 / size), "scaled_balancing_loss", sentence.format(f"1/{size}")


def dropout_alone(evidence: Evidence) -> Diagnosis | None:
    """Look whether all agrees once both sides drop nothing."""
    if not evidence.undropped:
        return None
    total = sum(evidence.counts.values()) or 1
    ours = {name: gradient / total for name, gradient in evidence.undropped.items()}
    evidence.oracle.backward(evidence.step, twist=Twist(no_dropout=True))
    plain, allowed = evidence.oracle.gradients, Tolerance(10 * evidence.tolerances.gradient.error)
    drops = [d for d in compare_tensors(0, "", plain, evidence.right, allowed) if not d.agrees]
    if not drops or not all(d.agrees for d in compare_tensors(0, "", ours, plain, allowed)):
        return None
    plan = evidence.plan
    recomputes = plan.job.memory.activation_checkpointing != "none" and plan.dtypes.compute in ("fp64", "fp32")
    if recomputes and not evidence.wrong.keys() & {"loss", "loss of outputs"}:
        sentence = "without dropout all agrees, and the loss does with it: recomputation draws other masks than forward"
        return Diagnosis("other_recomputed_mask", sentence)
    origin = find_origin(evidence)
    where = f", from {origin.module} on{origin.where}" if origin else ""
    return Diagnosis("wrong_dropout", f"without dropout all agrees: its masks are not those of the job{where}")


def unsummed_copies(evidence: Evidence) -> Diagnosis | None:
    """Look whether the copies that ranks hold of a gradient add up to the right one."""
    scale = evidence.ours.loss_scale
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, copy_error in evidence.ours.gradient_copies.items():
        for box, holders, total in copy_error.totals:
            right = evidence.right[name][box].double() if name in evidence.right else None
            if right is None or right.shape != total.shape:
                continue
            allowed = 10 * evidence.tolerances.gradient.error * float(right.abs().max())
            if float((total / scale - right).abs().max()) <= allowed:
                groups.setdefault(holders, []).append(name)
    if not groups:
        return None
    ranks, names = next(iter(groups.items()))
    wrong = set(evidence.wrong_tensors) | {name for name, e in evidence.ours.gradient_copies.items() if e.totals}
    if not wrong <= {name for group in groups.values() for name in group}:
        return None
    sentence = f"the gradient of {few(list(dict.fromkeys(names)))} is not summed over the ranks that hold it"
    return Diagnosis("unsummed_copies", f"{sentence}, {_listed(ranks)}: each has a part of its own")


def some_tensors(evidence: Evidence) -> Diagnosis | None:
    """Look whether the gradients of certain tensors lost, doubled or divided something, while all others are right."""
    names = evidence.wrong_tensors
    if not names or len(names) == len(evidence.right) or "loss" in evidence.wrong:
        return None
    return one_scale(evidence, names) or odd_parts(evidence, names)


def where_it_begins(evidence: Evidence) -> Diagnosis | None:
    """Name the module at which the two runs part, where no known mistake fits: ranks, microbatches and factor too."""
    origin = find_origin(evidence)
    is_loss_wrong = bool(evidence.wrong.keys() & {"loss", "loss of outputs"})
    if origin is not None and origin.kind == "gradients" and is_loss_wrong:
        sentence = f"the outputs of all modules agree, the loss that is made of them on{origin.where} does not"
        return Diagnosis("unknown_loss", f"{sentence}: its labels, its terms or its sum")
    if origin is not None:
        return Diagnosis("unknown_gradient", f"none of the known mistakes; it begins at {origin.sentence}")
    if is_loss_wrong:
        return None
    names = evidence.wrong_tensors
    owners: dict[str, list[str]] = {}
    for name in names:
        owners.setdefault(name.rpartition(".")[0], []).append(name)
    called = [name for name in evidence.oracle.modules_in_order(evidence.step) if name in owners]
    if not called:
        return None
    ranks = _ranks_of(evidence, owners[called[-1]][0])
    where = f" on rank {_listed(ranks)}" if ranks else ""
    factor = _factor(evidence, owners[called[-1]][0])
    sentence = (
        f"it begins at {called[-1]}{where}: what modules make agrees, the gradient of its parameters{factor} differs"
    )
    return Diagnosis("unknown_gradient", f"none of the known mistakes; {sentence}")


def _factor(evidence: Evidence, name: str) -> str:
    """Return by how much a gradient is multiplied, if it is."""
    if name not in evidence.ours.gradients or name not in evidence.right:
        return ""
    ours, right = evidence.ours.gradients[name].double(), evidence.right[name].double()
    squares = float(right.square().sum())
    ratio = float((ours * right).sum()) / squares if squares else 0.0
    is_multiple = float((ours - ratio * right).norm()) <= SAME_RATIO * float(right.norm())
    return f", {ratio:.4g} times the right one," if is_multiple and squares else ""


def _ranks_of(evidence: Evidence, name: str) -> list[int]:
    """Return the ranks whose slices of a gradient are wrong."""
    if name not in evidence.right or name not in evidence.ours.gradients:
        return []
    right = evidence.right[name]
    error = (evidence.ours.gradients[name].double() - right.double()).abs()
    allowed = evidence.tolerances.gradient.error * float(right.abs().max())
    return [
        rank
        for rank, slices in enumerate(evidence.ours.slices)
        if any(error[box].numel() and not float(error[box].max()) <= allowed for box in slices.get(name, ()))
    ]


def gradients_apart(evidence: Evidence) -> Diagnosis | None:
    """Look whether gradients are right as the first holder has them, and a copy is not."""
    if evidence.wrong.keys() & {"gradient", "direction", "loss"}:
        return None
    tolerance = evidence.tolerances.gradient.error
    return describe_copies("gradient_copies_apart", "the gradient of", evidence.ours.gradient_copies, tolerance)


def wrong_loss(evidence: Evidence) -> Diagnosis | None:
    """Look whether the loss alone is wrong, or what is made of right outputs."""
    if evidence.wrong.keys() & {"gradient", "direction"}:
        return None
    if "loss of outputs" in evidence.wrong:
        return _wrong_terms(evidence)
    ratio = evidence.ours.loss / evidence.loss
    return Diagnosis("wrong_loss", f"gradients are right but the reported loss is {ratio:.4g} times what it should be")


def _wrong_terms(evidence: Evidence) -> Diagnosis:
    """Name the term that the losses lack by their own outputs, if it is one."""
    records = [record for record in evidence.ours.precision if record.expected_loss is not None]
    for key, fault in (("training.z_loss", "missing_z_loss"), ("training.label_smoothing", "missing_smoothing")):
        apart = [
            abs(record.losses[0] - record.expected_without[key]) / abs(record.expected_without[key] or 1.0)
            for record in records
            if key in record.expected_without
        ]
        if apart and max(apart) < OUTPUTS_NEAR:
            return Diagnosis(fault, f"{key} is not in the loss")
    sentence = "the losses are not those of the outputs that they are made of: their labels, terms, sum or dtype"
    return Diagnosis("unknown_loss", sentence)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _rounded(values: Mapping[Part, float]) -> dict[Part, float]:
    return {key: round(value, 3) for key, value in values.items()}
