"""Mistakes between right gradients and the next weights, read off made-up norms, factors and answers of the oracle."""

from __future__ import annotations

import math
import re

import pytest
import torch

from shardwise.testing import update_mistakes as mistakes
from shardwise.testing.capture import Captured, ClipFactor
from shardwise.testing.comparison import Update
from shardwise.testing.copies import CopyError
from shardwise.testing.diagnosis import diagnose
from shardwise.testing.oracle import UpdateTwist
from tests.testing.made_evidence import NAMES, captured, made_evidence, made_plan, tensors

WEIGHT, BIAS = 30.0, 2.0  # squared norms of the two gradients
WHOLE = WEIGHT + BIAS
BOXES = [
    {"block.weight": [(slice(0, 1), slice(0, 2))], "block.bias": [(slice(0, 2),)]},
    {"block.weight": [(slice(1, 2), slice(0, 2))], "block.bias": [(slice(0, 2),)]},
]


def of_norm(squares: float, **changes: object) -> Captured:
    return captured(norm=math.sqrt(squares), slices=BOXES, copies={"block.bias": CopyError()}, **changes)


@pytest.mark.parametrize(
    ("squares", "fault", "words"),
    [
        (WHOLE * (1 + 1e-3), "rounded_norm", "is off by 5.0e-04 of itself while gradients agree: it is rounded"),
        (2 * WHOLE, "wrong_norm", r"its square counts elements 2 times \(tensor\): replication is ignored"),
        (WHOLE / 2, "wrong_norm", r"its square holds 1/2 of the elements \(tensor\)"),
        (WHOLE + BIAS, "wrong_norm", r"it counts tensors that several ranks hold once a rank \(tensor\)"),
        (WHOLE - 5 - BIAS / 2, "wrong_norm", "it leaves out the elements of rank 0"),
        (WHOLE - 25 - BIAS / 2, "wrong_norm", "it leaves out the elements of rank 1"),
        (WHOLE + WEIGHT, "wrong_norm", "it counts block.weight twice"),
        (BIAS, "wrong_norm", "it leaves out block.weight"),
        (9 * WHOLE, "wrong_norm", r"norm is 3 times what it should be: it is not the norm of the gradients"),
    ],
)
def test_what_a_norm_counts_wrongly_is_found_by_its_square(squares: float, fault: str, words: str) -> None:
    evidence = made_evidence(["norm"], of_norm(squares), norm=math.sqrt(WHOLE), plan=made_plan(tensor=2))
    diagnosis = diagnose(evidence)
    assert diagnosis is not None and diagnosis.fault == fault
    assert re.search(words, diagnosis.sentence), diagnosis.sentence


@pytest.mark.parametrize(("times", "words"), [(0, "it leaves out the experts"), (2, "it counts the experts twice")])
def test_small_gradients_of_experts_are_missed_too(times: int, words: str) -> None:
    gradients = tensors() | {"experts.weight": torch.full((1,), 0.1)}
    evidence = made_evidence(["norm"], of_norm(WHOLE + times * 0.01, gradients=gradients), norm=math.sqrt(WHOLE + 0.01))
    vars(evidence)["expert_tensors"] = ["experts.weight"]
    diagnosis = mistakes.wrong_norm(evidence)
    assert diagnosis is not None and diagnosis.fault == "wrong_norm" and words in diagnosis.sentence
    assert mistakes.wrong_norm(made_evidence(["norm", "gradient"])) is None


@pytest.mark.parametrize(
    ("factors", "fault", "words"),
    [
        ((0.25, 0.25), "clip_skipped", "gradients are not clipped"),
        ((1 / 16, 1 / 16), "clip_twice", "gradients are clipped twice"),
        ((1 / 32, 1 / 32), "clip_scaled", "before the loss scale is taken out"),
        ((0.5, 0.5), "scale_left_in", "the loss scale is not taken out"),
        ((0.125, 0.25), "local_clip", r"ranks clip by factors of their own, 0\.5, 1: by parts"),
        ((0.2, 0.2), "wrong_clip", r"multiplied by 0\.8 for the update, not 0\.5"),
    ],
)
def test_what_clipping_did_is_found_by_its_factor(factors: tuple[float, float], fault: str, words: str) -> None:
    """A norm of 2, clipped to 1, under a loss scale of 4."""
    plan = made_plan()
    plan.job.optimizer.clip_norm = 1.0
    clipping = [*(ClipFactor(factor, 0.0) for factor in factors), None]
    evidence = made_evidence(["clipping"], captured(norm=2.0, loss_scale=4.0, clipping=clipping), plan=plan)
    diagnosis = diagnose(evidence)
    assert diagnosis is not None and diagnosis.fault == fault
    assert re.search(words, diagnosis.sentence), diagnosis.sentence


def test_gradients_may_change_on_their_way_to_the_optimizer() -> None:
    changed = made_evidence(["clipping"], captured(clipping=[ClipFactor(1.0, 0.1)]))
    diagnosis = mistakes.wrong_clipping(changed)
    assert diagnosis is not None and diagnosis.fault == "changed_gradient"
    without_clip = mistakes.wrong_clipping(made_evidence(["clipping"], captured(clipping=[ClipFactor(0.5, 0.0)])))
    assert without_clip is not None and without_clip.sentence.endswith("multiplied by 0.5 for the update, not 1")
    assert mistakes.wrong_clipping(made_evidence(["clipping", "norm"])) is None


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("weight_decay is 0.0, not 0.1, of block.weight", "no_decay"),
        ("weight_decay is 0.1, not 0.0, of block.bias", "decay_on_bias"),
        ("weight_decay is 0.2, not 0.1, of block.weight", "wrong_decay"),
        ("decoupled_weight_decay is False, not True", "coupled_decay"),
        ("lr is 0.2, not 0.1", "wrong_learning_rate"),
        ("eps is 1e-06, not 1e-08", "wrong_eps"),
        ("momentum is 0.8, not 0.9", "wrong_option"),
    ],
)
def test_options_of_the_optimizer_are_named(sentence: str, fault: str) -> None:
    assert diagnose(made_evidence({"options": sentence})) == (fault, sentence)


def test_decay_that_the_options_lack_may_be_in_the_gradient() -> None:
    sentence = {"options": "weight_decay is 0.0, not 0.1, for block.weight"}
    diagnosis = diagnose(made_evidence(sentence, update_mistakes=[UpdateTwist(couples_decay=True)]))
    assert diagnosis is not None and diagnosis.fault == "coupled_decay"


@pytest.mark.parametrize(
    ("moved", "fault"), [([True, False], "stale_shard"), ([False, False], "no_update"), ([True, True], None)]
)
def test_slices_that_stay_are_named(moved: list[bool], fault: str | None) -> None:
    diagnosis = mistakes.stale_slices(made_evidence(["update"], captured(moved=moved)))
    assert (diagnosis.fault if diagnosis else None) == fault
    assert diagnosis is None or fault != "stale_shard" or "of rank 1 were not updated" in diagnosis.sentence


@pytest.mark.parametrize(
    ("twist", "fault"),
    [
        (UpdateTwist(decay_all=True), "decay_on_bias"),
        (UpdateTwist(decay_none=True), "no_decay"),
        (UpdateTwist(couples_decay=True), "coupled_decay"),
        (UpdateTwist(repeats=2), "updated_twice"),
        (UpdateTwist(forgets=True), "lost_state"),
        (UpdateTwist(counted=1), "late_correction"),
        (UpdateTwist(counted=10**9), "no_bias_correction"),
        (UpdateTwist(eps=1e-6), "wrong_eps"),
    ],
)
def test_the_mistake_that_brings_our_update_is_named(twist: UpdateTwist, fault: str) -> None:
    plan = made_plan()
    plan.job.optimizer.weight_decay, plan.job.optimizer.name = 0.1, "AdamW"
    diagnosis = diagnose(made_evidence(["update"], plan=plan, update_mistakes=[twist]))
    assert diagnosis is not None and diagnosis.fault == fault


def test_options_that_an_optimizer_does_not_have_are_not_suspected() -> None:
    twists = [UpdateTwist(counted=1), UpdateTwist(eps=1e-6), UpdateTwist(decay_all=True)]
    diagnosis = mistakes.wrong_update(made_evidence(["update"], update_mistakes=twists))
    assert diagnosis is not None and diagnosis.fault == "wrong_update"  # SGD without decay cannot make them


def test_an_update_that_nothing_explains_names_its_tensors() -> None:
    diagnosis = mistakes.wrong_update(made_evidence(["update"]))
    assert diagnosis is not None and diagnosis.fault == "wrong_update" and ", ".join(NAMES) in diagnosis.sentence
    scaled = made_evidence(["update"])
    vars(scaled)["update_ratio"] = 2.0
    diagnosis = mistakes.wrong_update(scaled)
    assert diagnosis is not None and diagnosis.fault == "scaled_update" and "are 2 times" in diagnosis.sentence
    still = mistakes.wrong_update(made_evidence(["update"], update=Update(tensors(), tensors())))
    assert still == ("frozen_tensor", "block.weight, block.bias are not updated")
    assert mistakes.wrong_update(made_evidence(["update"], update_mistakes=[UpdateTwist()])) is None
    assert mistakes.wrong_update(made_evidence(["update", "clipping"])) is None


def test_decay_may_be_missing_of_some_tensors_alone() -> None:
    evidence = made_evidence(["update"])
    answers = {UpdateTwist(): ["block.weight"], UpdateTwist(decay_none=True): ["block.bias"]}
    evidence.wrong_updates = lambda twist: answers.get(twist, ["block.weight"])
    diagnosis = mistakes.wrong_update(evidence)
    assert diagnosis is not None and diagnosis.sentence == "weight decay is not applied to block.weight"


def test_copies_that_come_apart_after_the_update_are_named() -> None:
    ours = captured(copies={"block.bias": CopyError(0.1, (1, 3)), "block.weight": CopyError()})
    diagnosis = diagnose(made_evidence(["replicas"], ours))
    assert diagnosis is not None and diagnosis.fault == "replicas_apart"
    assert diagnosis.sentence == "after the update block.bias: the copy of rank 1, 3 differs from the first holder's"
    assert mistakes.copies_apart(made_evidence(["replicas"])) is None
