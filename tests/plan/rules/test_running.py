"""Rows about how it runs: precision, optimizer, batch, checkpoints and what is shown; what optimizers can do."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import LegalityError
from shardwise.job.optimizers import ELEMENTWISE, UNUSABLE, classes
from shardwise.model.facts import ModelFacts
from shardwise.plan.draft import World
from tests.plan.rules.jobs import CPU4, FACTS, case, check_case, check_row, resolve_case

CASES = {
    "loss-scale": case(
        {"precision": {"loss_scale": {"scale_window": 10}}},
        {"precision": {"compute": "fp16", "loss_scale": {"scale_window": 10}}},
        "precision.loss_scale={'scale_window': 10}: only fp16 scales its loss, and this job computes in fp32",
    ),
    "static-loss-scale": case(
        {"precision": {"compute": "fp16", "loss_scale": {"static": 8, "scale_window": 10}}},
        {"precision": {"compute": "fp16", "loss_scale": {"static": 8}}},
        "leave static out",
    ),
    "loss-scale-range": case(
        {"precision": {"compute": "fp16", "loss_scale": {"init_scale": 2, "min_scale": 4}}},
        {"precision": {"compute": "fp16", "loss_scale": {"init_scale": 4, "min_scale": 4}}},
        "at most 2",
    ),
    "optimizer-name": case({"optimizer": {"name": "AdamX"}}, {"optimizer": {"name": "Adam"}}, "did you mean 'Adam"),
    "optimizer-usable": case({"optimizer": {"name": "LBFGS"}}, {"optimizer": {"name": "SGD"}}, "closure"),
    "optimizer-elementwise": case(
        {"optimizer": {"name": "Adafactor"}},
        {"optimizer": {"name": "Adafactor"}, "parallel": {"sharded_data_parallel_degree": 1}},
        "cut over 4 ranks",
    ),
    "optimizer-options": case(
        {"optimizer": {"options": {"beta": [0.9, 0.95]}}},
        {"optimizer": {"options": {"betas": [0.9, 0.95]}}},
        "no option 'beta'; did you mean 'betas'?",
    ),
    "optimizer-values": case(
        {"optimizer": {"options": {"betas": [2.0, 0.95]}}},
        {"optimizer": {"options": {"betas": [0.9, 0.95]}}},
        "Invalid beta",
    ),
    "weight-decay": case(
        {"optimizer": {"name": "Rprop", "weight_decay": 0.2}}, {"optimizer": {"name": "Rprop"}}, "no weight decay"
    ),
    "sample-prompt": case(
        {"observe": {"sample": False, "sample_prompt": "def "}}, {"observe": {"sample_prompt": "def "}}, "no sample"
    ),
    "sample-tokens": case(
        {"model": {"task": "masked_lm"}, "observe": {"sample_tokens": 9}},
        {"observe": {"sample_tokens": 9}},
        "no sample",
    ),
    "warmup": case(
        {"optimizer": {"warmup_steps": 10}, "training": {"steps": 10}},
        {"optimizer": {"warmup_steps": 9}, "training": {"steps": 10}},
        "use at most 9 warmup_steps",
    ),
    "final-learning-rate": case(
        {"optimizer": {"schedule": "constant", "final_learning_rate_ratio": 0.5}},
        {"optimizer": {"schedule": "linear", "final_learning_rate_ratio": 0.5}},
        "linear or cosine",
    ),
    "profile": case(
        {"observe": {"profile": [90, 101]}, "training": {"steps": 100}},
        {"observe": {"profile": [99, 100]}, "training": {"steps": 100}},
        "[99, 100]",
    ),
    "tokens-per-step": case(
        {"training": {"tokens_per_step": 1000}}, {"training": {"tokens_per_step": 1024}}, "use 768 or 1024"
    ),
    "step-size": case(
        {"training": {"tokens_per_step": 4096, "sequences_per_step": 8}},
        {"training": {"tokens_per_step": 4096, "sequences_per_step": 16}},
        "sequences_per_step=8",
    ),
    "idle-ranks": case(
        {"training": {"sequences_per_step": 3}}, {"training": {"sequences_per_step": 4}}, "at least 4 sequences"
    ),
    "microbatch": case(
        {"training": {"microbatch_size": 5}},
        {"training": {"microbatch_size": 4}},
        "gives each data rank 4; use at most 4",
    ),
    "accumulation": case(
        {"training": {"microbatch_size": 2, "gradient_accumulation": 3, "sequences_per_step": 16}},
        {"training": {"microbatch_size": 2, "gradient_accumulation": 2, "sequences_per_step": 16}},
        "use gradient_accumulation 2",
    ),
    "checkpoint-keep-last": case(
        {"checkpoint": {"keep_last": 3}}, {"checkpoint": {"keep_last": 3, "every": 5}}, "set checkpoint.every"
    ),
    "checkpoint-keep-every": case(
        {"checkpoint": {"keep_every": 10}}, {"checkpoint": {"keep_every": 10, "every": 5}}, "keep_every=10"
    ),
    "checkpoint-asynchronous": case(
        {"checkpoint": {"asynchronous": False}}, {"checkpoint": {"asynchronous": False, "every": 5}}, "at intervals"
    ),
    "checkpoint-keep-best": case(
        {"checkpoint": {"keep_best": True, "every": 5}, "training": {"evaluate_every": 2}},
        {"checkpoint": {"keep_best": True, "every": 4}, "training": {"evaluate_every": 2}},
        "training.evaluate_every to a divisor of checkpoint.every",
    ),
    "checkpoint-staging": case(
        {"checkpoint": {"staging_bytes": 1 << 24, "asynchronous": False, "every": 5}},
        {"checkpoint": {"staging_bytes": 1 << 24, "every": 5}},
        "staging_bytes=16777216",
    ),
}

MORE = [
    ("optimizer-options", {"optimizer": {"options": {"lr": 1.0}}}, CPU4, FACTS),
    (
        "optimizer-elementwise",
        {"optimizer": {"name": "Adafactor"}, "parallel": {"shard_optimizer_state": True}},
        CPU4,
        FACTS,
    ),
    ("profile", {"observe": {"profile": [1]}}, CPU4, FACTS),
    ("profile", {"observe": {"profile": [0, 1]}}, CPU4, FACTS),
    ("profile", {"observe": {"profile": [3, 2]}}, CPU4, FACTS),
    ("accumulation", {"training": {"gradient_accumulation": 3}}, CPU4, FACTS),  # 4 a rank in 3: 2 + 2 + nothing
    ("idle-ranks", {}, World(32, "cpu", 32), FACTS),
]


@pytest.mark.parametrize("id", CASES)
def test_row_fires_and_its_neighbour_passes(id: str) -> None:
    check_case(id, CASES[id])


@pytest.mark.parametrize(("id", "job", "world", "facts"), MORE)
def test_other_ways_to_break_a_row(id: str, job: dict[str, Any], world: World, facts: ModelFacts) -> None:
    check_row(id, job, world, facts)


def test_a_name_in_other_letters_is_found() -> None:
    with pytest.raises(LegalityError, match="did you mean 'AdamW'"):
        resolve_case({"optimizer": {"name": "adamw"}})


def test_gradient_accumulation_names_the_counts_around() -> None:
    job = {"training": {"gradient_accumulation": 4, "sequences_per_step": 20}}  # 5 sequences a rank
    with pytest.raises(LegalityError, match="use gradient_accumulation 3 or 5"):
        resolve_case(job)


def test_every_optimizer_of_torch_is_sorted() -> None:
    known = {*ELEMENTWISE, *UNUSABLE, "Adafactor"}
    assert set(ELEMENTWISE) <= set(classes())
    assert set(classes()) <= known, "a new optimizer in torch.optim: is it elementwise?"


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_update_a_shard_as_the_whole(name: str) -> None:
    import torch

    torch.manual_seed(0)
    start, gradients = torch.randn(4, 4, dtype=torch.float64), torch.randn(3, 4, 4, dtype=torch.float64)

    def trained(rows: slice) -> torch.Tensor:
        tensor = torch.nn.Parameter(start[rows].clone())
        optimizer = classes()[name]([tensor], lr=0.1)
        for gradient in gradients:
            tensor.grad = gradient[rows].clone()
            optimizer.step()
        return tensor.detach()

    torch.testing.assert_close(trained(slice(0, 2)), trained(slice(0, 4))[:2], rtol=0, atol=0)
