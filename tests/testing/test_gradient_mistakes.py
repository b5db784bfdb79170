"""Mistakes in gradients, read off coefficients and answers that are made up: which is named, and how."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.testing import gradient_mistakes as mistakes
from shardwise.testing.batch_check import Misread
from shardwise.testing.copies import CopyError
from shardwise.testing.diagnosis import diagnose
from shardwise.testing.evidence import Part
from shardwise.testing.oracle import Twist
from shardwise.testing.origin import Deviation, Origin
from shardwise.testing.precision_record import PrecisionRecord
from tests.testing.made_evidence import NAMES, captured, made_evidence, made_plan, tensors

ALL = {(rank, number): 1.0 for rank in range(2) for number in range(2)}
EVEN = dict.fromkeys(ALL, 5)
APART = {"block.bias": CopyError(0.1, (1,))}


def with_parts(value: float, *parts: Part) -> dict[Part, float]:
    """Return coefficients of 1, and of `value` for some parts."""
    return ALL | dict.fromkeys(parts, value)


@pytest.mark.parametrize(
    ("coefficients", "fault", "words"),
    [
        (with_parts(0.0, (0, 1)), "lost_microbatch", "the gradient of microbatch 1 of data rank 0 is lost"),
        (with_parts(0.0, (0, 1), (1, 1)), "lost_microbatch", "the gradient of microbatch 1 of every rank is lost"),
        (with_parts(2.0, (1, 0), (1, 1)), "doubled_rank", "the gradient of data rank 1 counts twice"),
        (with_parts(0.5, (1, 0), (1, 1)), "uneven_rank", "the gradient of data rank 1 counts 0.5 times"),
        (with_parts(0.0, (0, 0), (1, 1)), "lost_gradient", r"\(data rank, microbatch\) \[\(0, 0\), \(1, 1\)\] is lost"),
        (with_parts(0.0, (0, 0)) | {(1, 1): 3.0}, "uneven_gradient", r"\{\(0, 0\): 0.0, \(1, 1\): 3.0\}"),
        (dict.fromkeys(ALL, 0.0), "zero_gradient", "the gradient is zero"),
        (dict.fromkeys(ALL, 0.5), "mean_for_sum", r"divided by 2 \(data ranks or microbatches\): a mean"),
        (dict.fromkeys(ALL, 2.0), "scaled_gradient", r"2 times what it should be, .* \(data ranks or microbatches\)"),
        (dict.fromkeys(ALL, 1.3), "scaled_gradient", r"every gradient is 1\.3 times what it should be$"),
    ],
)
def test_coefficients_say_what_was_lost_doubled_or_averaged(
    coefficients: dict[Part, float], fault: str, words: str
) -> None:
    diagnosis = diagnose(made_evidence(fits={(): coefficients}, label_counts=EVEN))
    assert diagnosis is not None and diagnosis.fault == fault
    assert re.search(words, diagnosis.sentence), diagnosis.sentence


@pytest.mark.parametrize(
    ("counts", "coefficients", "fault", "words"),
    [
        ((3, 1, 3, 1), (2 / 3, 2, 2 / 3, 2), "mean_of_microbatch_means", "by its own count"),
        ((1, 1, 3, 3), (2, 2, 2 / 3, 2 / 3), "mean_of_rank_means", "by the count of its own rank"),
        ((3, 1, 5, 1), (0.625, 2.5, 0.625, 2.5), "mean_of_microbatch_means", "its microbatch on all ranks"),
    ],
)
def test_a_mean_of_means_is_told_by_the_counts(
    counts: tuple[int, ...], coefficients: tuple[float, ...], fault: str, words: str
) -> None:
    evidence = made_evidence(
        fits={(): dict(zip(ALL, coefficients, strict=True))}, label_counts=dict(zip(ALL, counts, strict=True))
    )
    diagnosis = mistakes.local_means(evidence)
    assert diagnosis is not None and diagnosis.fault == fault and words in diagnosis.sentence
    assert mistakes.local_means(made_evidence(fits={(): ALL}, label_counts=EVEN)) is None


def test_replicas_that_are_not_summed_hold_their_own_parts() -> None:
    own = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 0.0}
    apart = captured(copies=APART)
    assert mistakes.unreduced_replicas(made_evidence(fits={(): own})) is None  # the replicas are alike
    whole = mistakes.unreduced_replicas(made_evidence(ours=apart, fits={(): own}))
    assert whole is not None and whole.fault == "missing_replica_reduction"
    one_unit = made_evidence(ours=apart, fits={(): {}, ("block.bias",): own})
    unit = mistakes.unreduced_replicas(one_unit)
    assert unit is not None and unit.fault == "missing_unit_reduction" and unit.sentence.endswith("of block.bias")
    assert mistakes.unreduced_replicas(made_evidence(ours=apart, fits={(): ALL})) is None


def test_what_is_seen_without_the_oracle() -> None:
    misread = Misread("equal_rows", "rank 1 reads the rows of data rank 0")
    assert diagnose(made_evidence(["data"], misread=misread)) == misread
    assert diagnose(made_evidence(["dtype"])) == ("wrong_dtype", "block.weight")
    parameters = tensors() | {"head.weight": torch.ones(1)}
    tie = diagnose(made_evidence(ours=captured(parameters=parameters)))
    assert tie is not None and tie.fault == "broken_tie" and "head.weight should share storage" in tie.sentence
    skipped = diagnose(made_evidence(ours=captured(skipped=True)))
    assert skipped is not None and skipped.fault == "not_finite"


def asking_job() -> Any:
    """Return a job with every term in its loss that a step may lack."""
    plan = made_plan()
    plan.job.training = SimpleNamespace(z_loss=1e-4, label_smoothing=0.1)
    plan.job.isolates_documents = True
    plan.job.adapter.kind = "lora"
    plan.reference = True
    return plan


@pytest.mark.parametrize(
    ("twist", "fault"),
    [
        (Twist(scales_adapters_twice=True), "adapter_scaled_twice"),
        (Twist(reference_moves=True), "reference_not_frozen"),
        (Twist(shift_labels=1), "shifted_label"),
        (Twist(shift_labels=-1), "shifted_label"),
        (Twist(no_z_loss=True), "missing_z_loss"),
        (Twist(no_smoothing=True), "missing_smoothing"),
        (Twist(leak_documents=True), "leaked_document"),
        (Twist(dropout_step=0), "stale_dropout"),
        (Twist(dropout_step=2), "stale_dropout"),
        (Twist(no_dropout=True), "missing_dropout"),
        (Twist(local_rows=1), "dropout_by_local_row"),
        (Twist(balancing=0.0), "missing_balancing_loss"),
        (Twist(balanced_apart=((0, 2), (1, 3))), "local_balancing_loss"),
        (Twist(balancing=2), "scaled_balancing_loss"),
        (Twist(balancing=1 / 3), "scaled_balancing_loss"),
    ],
)
def test_the_mistake_that_brings_our_gradients_is_named(twist: Twist, fault: str) -> None:
    plan = asking_job()
    plan.degrees = made_plan(expert=3).degrees
    evidence = made_evidence(plan=plan, mistakes=[twist], label_counts=EVEN)
    evidence.oracle.routers.coefficient = 0.01
    diagnosis = diagnose(evidence)
    assert diagnosis is not None and diagnosis.fault == fault


def test_a_job_without_these_terms_is_not_suspected_of_them() -> None:
    twists = [Twist(no_z_loss=True), Twist(no_smoothing=True), Twist(leak_documents=True), Twist(balancing=0.0)]
    assert mistakes.batch_mistake(made_evidence(mistakes=twists, label_counts=EVEN)) is None


def test_one_coefficient_may_be_the_share_of_labels_that_count() -> None:
    evidence = made_evidence(fits={(): dict.fromkeys(ALL, 0.8)}, label_counts=EVEN)
    vars(evidence)["tokens"] = 25
    diagnosis = diagnose(evidence)
    assert diagnosis is not None and diagnosis.fault == "divided_by_all_tokens"


@pytest.mark.parametrize(("times", "is_kept"), [(0.5, True), (-0.5, False)])
def test_gradients_of_the_step_before_may_be_in_ours(times: float, is_kept: bool) -> None:
    earlier = {name: value.flip(0).cos() for name, value in tensors().items()}
    ours = captured(gradients={name: value + times * earlier[name] for name, value in tensors().items()})
    diagnosis = mistakes.kept_gradients(made_evidence(ours=ours, earlier=earlier))
    assert (diagnosis is not None and diagnosis.fault == "kept_gradients") is is_kept
    assert mistakes.kept_gradients(made_evidence(ours=ours)) is None


@pytest.mark.parametrize("is_stale", [True, False])
def test_weights_of_the_step_before_are_tried_and_taken_back(is_stale: bool) -> None:
    restored: list[str] = []
    evidence = made_evidence(stale="before", mistakes=[Twist()] if is_stale else [])
    evidence.oracle.snapshot, evidence.oracle.restore = lambda: "now", restored.append
    diagnosis = mistakes.stale_weights(evidence)
    assert (diagnosis is not None) is is_stale and restored == ["before", "now"]
    assert diagnosis is None or diagnosis.fault == "stale_weights"


def test_copies_of_a_gradient_that_add_up_were_not_summed() -> None:
    box = (slice(0, 2),)
    error = CopyError(0.5, (1,), ((box, (0, 1), torch.ones(2, dtype=torch.float64)),))
    ours = captured(gradient_copies={"block.bias": error, "gone.bias": error})
    diagnosis = mistakes.unsummed_copies(made_evidence(["gradient copies"], ours, wrong_tensors=["block.bias"]))
    assert diagnosis is None  # those of a tensor that the oracle does not have cannot be judged
    ours = captured(gradient_copies={"block.bias": error})
    diagnosis = mistakes.unsummed_copies(made_evidence(["gradient copies"], ours, wrong_tensors=["block.bias"]))
    assert diagnosis is not None and diagnosis.fault == "unsummed_copies"
    assert "block.bias is not summed over the ranks that hold it, 0, 1" in diagnosis.sentence
    assert mistakes.unsummed_copies(made_evidence(["gradient copies"], ours, wrong_tensors=NAMES)) is None
    other = captured(gradient_copies={"block.bias": CopyError(0.5, (1,), ((box, (0, 1), torch.full((2,), 3.0)),))})
    assert mistakes.unsummed_copies(made_evidence(["gradient copies"], other)) is None


def test_some_tensors_alone_may_have_lost_a_part() -> None:
    lost = {("block.bias",): with_parts(0.0, (0, 1)), (): {}}
    diagnosis = mistakes.some_tensors(made_evidence(fits=lost, wrong_tensors=["block.bias"]))
    assert diagnosis is not None and diagnosis.fault == "lost_microbatch" and "of block.bias" in diagnosis.sentence
    assert mistakes.some_tensors(made_evidence(["gradient", "loss"], fits=lost, wrong_tensors=["block.bias"])) is None
    assert mistakes.some_tensors(made_evidence(fits=lost)) is None  # all are wrong


def test_where_two_runs_part_is_said_where_no_mistake_fits() -> None:
    origin = Origin("block", "outputs", [Deviation(1, 0, 2.0)], (2, 2))
    diagnosis = diagnose(made_evidence(traced_origin=[origin]))
    assert diagnosis is not None and diagnosis.fault == "unknown_gradient"
    assert "block on rank 1, microbatch 0: its output is the first that differs, 2 times" in diagnosis.sentence
    every = Origin("block", "gradients", [Deviation(rank, n, None) for rank in (0, 1) for n in (0, 1)], (2, 2))
    diagnosis = diagnose(made_evidence(["gradient", "loss"], traced_origin=[every]))
    assert diagnosis is not None and diagnosis.fault == "unknown_loss"
    assert "the loss that is made of them on every rank, every microbatch does not" in diagnosis.sentence
    assert mistakes.where_it_begins(made_evidence(["gradient", "loss"], traced_origin=[None])) is None


def test_a_parameter_s_own_gradient_may_be_where_they_part() -> None:
    boxes = [{"block.weight": [(slice(0, 1), slice(0, 2))]}, {"block.weight": [(slice(1, 2), slice(0, 2))]}]
    doubled = tensors()
    doubled["block.weight"][1] *= 3
    ours = captured(gradients=doubled, slices=boxes)
    diagnosis = mistakes.where_it_begins(made_evidence(ours=ours, traced_origin=[None]))
    assert diagnosis is not None and "it begins at block on rank 1: what modules make agrees" in diagnosis.sentence
    assert "of its parameters differs" in diagnosis.sentence
    ours = captured(gradients=tensors(3.0), slices=boxes)
    diagnosis = mistakes.where_it_begins(made_evidence(ours=ours, traced_origin=[None]))
    assert diagnosis is not None and "block on rank 0, 1:" in diagnosis.sentence
    assert "of its parameters, 3 times the right one, differs" in diagnosis.sentence
    ours = captured(gradients={})
    diagnosis = mistakes.where_it_begins(made_evidence(ours=ours, traced_origin=[None]))
    assert diagnosis is not None and "begins at block: what modules make agrees" in diagnosis.sentence
    evidence = made_evidence(traced_origin=[None], wrong_tensors=["other.weight"])
    assert mistakes.where_it_begins(evidence) is None  # no module that is called owns it


def test_gradients_may_be_right_where_the_first_holder_has_them() -> None:
    ours = captured(gradient_copies=APART)
    diagnosis = diagnose(made_evidence(["gradient copies"], ours))
    assert diagnosis is not None and diagnosis.fault == "gradient_copies_apart"
    assert "the gradient of block.bias: the copy of rank 1 differs" in diagnosis.sentence
    assert mistakes.gradients_apart(made_evidence(["gradient copies", "loss"], ours)) is None
    assert mistakes.gradients_apart(made_evidence(["gradient copies"])) is None


def test_a_loss_alone_may_be_wrong() -> None:
    diagnosis = mistakes.wrong_loss(made_evidence(["loss"], captured(loss=3.0)))
    assert diagnosis is not None and diagnosis.sentence.endswith("1.5 times what it should be")
    assert mistakes.wrong_loss(made_evidence(["loss", "gradient"])) is None


@pytest.mark.parametrize(
    ("without", "fault"),
    [
        ({"training.z_loss": 2.0}, "missing_z_loss"),
        ({"training.z_loss": 1.5, "training.label_smoothing": 2.0}, "missing_smoothing"),
        ({"training.z_loss": 1.5}, "unknown_loss"),
    ],
)
def test_a_loss_that_lacks_a_term_of_its_outputs(without: dict[str, float], fault: str) -> None:
    record = PrecisionRecord(losses=[2.0], expected_loss=2.5, expected_without=without)
    diagnosis = diagnose(made_evidence(["loss of outputs"], captured(precision=[record, PrecisionRecord()])))
    assert diagnosis is not None and diagnosis.fault == fault


def without_dropout(**changes: Any) -> Any:
    """Return evidence of a step of which all agrees once both sides drop nothing; it has four labels."""
    evidence = made_evidence(label_counts={(0, 0): 4}, traced_origin=[None], right=tensors(2.0), **changes)
    evidence.undropped = tensors(4.0)

    def backward(step: int, twist: Twist) -> None:
        evidence.oracle.gradients = tensors(1.0 if twist == Twist(no_dropout=True) else 2.0)

    evidence.oracle.backward = backward
    return evidence


def test_masks_are_to_blame_where_all_agrees_without_them() -> None:
    diagnosis = mistakes.dropout_alone(without_dropout())
    assert diagnosis is not None and diagnosis.fault == "wrong_dropout"
    assert diagnosis.sentence == "without dropout all agrees: its masks are not those of the job"
    evidence = without_dropout()
    evidence.traced_origin = [Origin("block", "outputs", [Deviation(1, 0, None)], (2, 2))]
    assert (traced := mistakes.dropout_alone(evidence)) is not None
    assert traced.sentence.endswith("those of the job, from block on rank 1, microbatch 0")


def test_recomputed_masks_are_to_blame_where_the_loss_agrees() -> None:
    evidence = without_dropout()
    evidence.plan.job.memory.activation_checkpointing = "full"
    assert (diagnosis := mistakes.dropout_alone(evidence)) is not None
    assert diagnosis.fault == "other_recomputed_mask"
    evidence.wrong = {"gradient": "block.weight", "loss": "loss"}
    assert (diagnosis := mistakes.dropout_alone(evidence)) is not None and diagnosis.fault == "wrong_dropout"


def test_masks_are_not_to_blame_where_something_else_is_wrong() -> None:
    evidence = without_dropout()
    evidence.undropped = tensors(3.0)  # wrong without dropout too
    assert mistakes.dropout_alone(evidence) is None
    evidence = without_dropout()
    evidence.right = tensors()  # the job drops nothing
    assert mistakes.dropout_alone(evidence) is None
    evidence.undropped = {}
    assert mistakes.dropout_alone(evidence) is None
