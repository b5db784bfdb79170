"""Cases of the rules in `plan/rules/sequence_lengths.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.plan.draft import World
from tests.plan.rules.jobs import CONTEXT, CPU4, FACTS, case, staged


def longer(*stages: tuple[int, int], **keys: Any) -> dict[str, Any]:
    """A job of samples of 256 tokens, 16 a step, behind stages of (tokens, samples with which they are over)."""
    schedule = [{"sequence_length": length, "until_samples": end} for length, end in stages]
    return {"training": {"sequence_length_schedule": schedule, **keys}}


SHORT, WHOLE = longer((64, 32)), {"training": {"sequences_per_step": 16}}
TOKENS = {"training": {"sequence_length_schedule": [{"sequence_length": 64, "until_tokens": 4096}]}}
GRAPHS = {"model": {"compile": True, "cuda_graphs": True}, "precision": {"compute": "fp32"}}
CUDA1 = World(1, "cuda", 1)
CASES = {
    "sequence-length-end": case(
        {"training": {"sequence_length_schedule": [{"sequence_length": 64}]}}, TOKENS, "one of until_samples and"
    ),
    "sequence-length-factory": case(
        {**SHORT, "data": {"factory": "a:b"}}, {**WHOLE, "data": {"factory": "a:b"}}, "let the factory return shorter"
    ),
    "sequence-length-rows": case(
        {**SHORT, "data": {"path": "a", "format": "chat"}}, {**WHOLE, "data": {"path": "a", "format": "chat"}}, "whole"
    ),
    "sequence-length-spans": case(
        {**SHORT, "model": {"task": "seq2seq_lm"}}, {**SHORT, "model": {"task": "masked_lm"}}, "with spans left out"
    ),
    "sequence-length-divides": case(
        longer((96, 32)), longer((128, 32)), "96 does not divide 256; use 1, 2, 4, 8, 16, 32, 64 or 128"
    ),
    "sequence-length-grows": case(
        longer((64, 32), (32, 64)), longer((32, 32), (64, 64)), "sequences of 64 tokens are followed by 32"
    ),
    "sequence-length-order": case(
        longer((32, 33), (64, 48)), longer((32, 33), (64, 49)), "with sample 48; use until_samples of at least 49"
    ),
    "sequence-length-run": case(
        longer((64, 65), steps=5), longer((64, 64), steps=5), "has 5 steps, and whole samples begin with step 5"
    ),
    "sequence-length-context": case(
        {**longer((2, 32)), "parallel": CONTEXT},
        {**longer((4, 32)), "parallel": CONTEXT},
        "2 is no multiple of 4, two chunks for each of 2 context ranks; use 4, 8, 16, 32, 64 or 128",
    ),
    "sequence-length-pipeline": case(
        {**SHORT, **staged()},
        {**SHORT, **staged()},
        "the positions of a sequence",
        CPU4,
        replace(FACTS, stages=replace(FACTS.stages, hidden=(128, 2))),
        replace(FACTS, stages=replace(FACTS.stages, hidden=(256, 2))),
    ),
    "sequence-length-graphs": case(
        {**SHORT, **GRAPHS}, {**WHOLE, **GRAPHS}, "a graph is captured for sequences of one length", CUDA1
    ),
}
