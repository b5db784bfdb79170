"""Refusals of the engine that a script meets: in the names of SMP's options, of both versions."""

from __future__ import annotations

import pytest

from shardwise.errors import LegalityError
from shardwise.plan.rules import rules
from shardwise.smp.refusals import in_smp_words, smp_words


@pytest.mark.parametrize(
    "version, message, said",
    [
        (
            "v1",
            "training.gradient_accumulation=4, precision.compute=fp16: the hook; use one microbatch, or bf16",
            "microbatches=4, fp16=True: the hook; use one microbatch, or bf16",
        ),
        (
            "v1",
            "parallel.pipeline_parallel_degree=4, parallel.virtual_pipeline_degree=1: 4 stages; use at most 3",
            "pipeline_parallel_degree=4: 4 stages; use at most 3",
        ),
        (
            "v1",
            "parallel.sequence_parallel=True: the model mixes positions; use sequence_parallel false",
            "optimize='memory': the model mixes positions; use optimize 'speed'",
        ),
        (
            "v1",
            "parallel.partition={'a': 1, 'b': 0}, parallel.default_partition=0: a is ahead of b; use another",
            "smp.set_partition={'a': 1, 'b': 0}, default_partition=0: a is ahead of b; use another",
        ),
        (
            "v2",
            "parallel.sharded_data_parallel_degree=3: odd; use a sharded_data_parallel_degree of 4",
            "hybrid_shard_degree=3: odd; use a hybrid_shard_degree of 4",
        ),
        ("v2", "data.packing=True, model.task=None: rows are packed; use none", "rows are packed; use none"),
        ("v2", "the model has no plan: use parallel.tensor_parallel_degree 1",
         "the model has no plan: use tensor_parallel_degree 1"),
    ],
)  # fmt: skip
def test_a_refusal_names_smps_options(version: str, message: str, said: str) -> None:
    origins = {
        "training.gradient_accumulation": "microbatches=4",
        "precision.compute": "fp16=True",
        "parallel.sequence_parallel": "optimize='memory'",
    }
    with pytest.raises(LegalityError) as caught, smp_words(version, origins if version == "v1" else {}):
        raise LegalityError(message, "a-rule")
    assert (str(caught.value), caught.value.rule) == (said, "a-rule")


def test_no_rule_puts_keys_of_a_job_ahead() -> None:
    """Whatever keys a rule has, only options of SMP and words of scripts stand ahead of its sentence."""
    for rule in rules():
        message = ", ".join(f"{key}=1" for key in rule.keys) + ": broken; mend it"
        for version in ("v1", "v2"):
            assert not any(key in in_smp_words(message, version, {}) for key in rule.keys), rule.id
