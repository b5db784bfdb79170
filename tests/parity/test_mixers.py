"""Mixers of states shared by heads or channels against one process, on every axis beside."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import coverage
from shardwise.job.schema import Job
from shardwise.testing.capture import gather
from shardwise.testing.toy_configs import toy_config
from shardwise.testing.world import WorldPool
from shardwise.training.setup import set_up
from tests.checkpoint.stored import stored
from tests.checkpoint.test_layouts import assert_same, read_and_write, write
from tests.model.test_mixers import BY_OUTPUTS, NORM_OF_GROUPS
from tests.parity.jobs import check_agrees, facts_of

TWO = {"tensor_parallel_degree": 2}
FOUR = {"tensor_parallel_degree": 4}
SEQUENCE = {"sequence_parallel": True}
FULL: dict[str, Any] = {"memory": {"activation_checkpointing": "full"}}
LORA: dict[str, Any] = {"adapter": {"kind": "lora", "rank": 2, "dropout": 0.1}}  # of the step sizes too
GROUPS = {"n_groups": 2}
ONE_LAYER = {"num_hidden_layers": 1}
SHORT: dict[str, Any] = {"data": {"sequence_length": 7}}
QUICK: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [  # type, ranks, sections, values of the config
    ("mamba", 2, {"parallel": TWO, **SHORT}, ONE_LAYER),
    ("mamba2", 2, {"parallel": {**TWO, **SEQUENCE}, **SHORT}, ONE_LAYER),
]
SLOW: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    *((model_type, 2, {"parallel": TWO}, {}) for model_type in ("falcon_mamba", "zamba", "zamba2", "granitemoehybrid")),
    ("mamba", 4, {"parallel": {**FOUR, **SEQUENCE}}, {}),
    ("mamba", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}, **LORA, **FULL}, {}),
    ("mamba2", 4, {"parallel": FOUR, **FULL}, GROUPS),  # two ranks share each of two groups
    ("mamba2", 4, {"parallel": {**TWO, "sharded_data_parallel_degree": 2}}, {}),
    ("mamba2", 4, {"parallel": {**FOUR, **SEQUENCE}, **LORA}, GROUPS),
    ("mamba2", 2, {"parallel": TWO, "adapter": {"kind": "dora", "rank": 4}}, {}),
    ("mamba2", 3, {"parallel": {"tensor_parallel_degree": 3}}, {}),  # by outputs
    ("mamba2", 4, {"parallel": {**TWO, "context_parallel_degree": 2}}, {}),  # by outputs
    ("bamba", 4, {"parallel": {**TWO, "pipeline_parallel_degree": 2}, **FULL}, {}),
    ("falcon_h1", 4, {"parallel": FOUR, "memory": {"offload_activations": True, **FULL["memory"]}}, {}),
    ("falcon_h1", 2, {"parallel": TWO}, {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    ("jamba", 4, {"parallel": {**TWO, "expert_parallel_degree": 2}}, {}),
    ("nemotron_h", 4, {"parallel": {**TWO, "pipeline_parallel_degree": 2}}, {}),
    ("mamba2", 2, {"parallel": TWO, "precision": {"compute": "bf16"}, "optimizer": {"name": "SGD"}}, {}),
]


def mixer_job(directory: Path, model_type: str, sections: dict[str, Any], config: dict[str, Any]) -> Job:
    """The job of a sweep's toy."""
    coverage.write_corpora(directory)
    toy = coverage.toy_job(directory, "causal_lm", model_type, coverage.CONTROL)
    own = toy.model_dump(mode="json", exclude_unset=True)
    own["model"]["config"] |= toy_config(model_type, **config) if config else {}
    return Job.model_validate({**own, **{name: {**own.get(name, {}), **value} for name, value in sections.items()}})


@pytest.mark.parametrize(
    "model_type, ranks, sections, config",
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_mixers_agree_with_one_process(
    world_pool: WorldPool,
    tmp_path: Path,
    model_type: str,
    ranks: int,
    sections: dict[str, Any],
    config: dict[str, Any],
) -> None:
    if model_type == "mamba2" and not NORM_OF_GROUPS:
        pytest.skip(BY_OUTPUTS)
    job = mixer_job(tmp_path, model_type, sections, config)
    assert facts_of(job).mixers
    check_agrees(world_pool, ranks, job)


def initial(job: Job) -> dict[str, Tensor]:
    return gather(set_up(job, torch.device("cpu")))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["mamba", "mamba2", "falcon_h1", "zamba"])
def test_initial_weights_of_mixers_are_bit_equal(world_pool: WorldPool, tmp_path: Path, model_type: str) -> None:
    """Their initializers read the sizes of the whole."""
    alone = world_pool.run(1, initial, mixer_job(tmp_path, model_type, {}, {}))[0]
    found = world_pool.run(2, initial, mixer_job(tmp_path, model_type, {"parallel": TWO}, {}))[0]
    assert list(found) == list(alone)
    assert all(torch.equal(found[name], alone[name]) for name in alone)


@pytest.mark.slow
@pytest.mark.parametrize("model_type, config", [("mamba", {}), ("mamba2", GROUPS)])
def test_checkpoints_of_mixers_are_of_the_whole(
    world_pool: WorldPool, tmp_path: Path, model_type: str, config: dict[str, Any]
) -> None:
    """From four tensor ranks to one process, and from there to two."""
    paths = [tmp_path / name for name in ("four", "one", "two")]
    jobs = [mixer_job(tmp_path, model_type, {"parallel": parallel}, config) for parallel in (FOUR, {}, TWO)]
    world_pool.run(4, write, jobs[0], paths[0])
    for ranks, (source, target), job in zip((1, 2), pairwise(paths), jobs[1:], strict=True):
        world_pool.run(ranks, read_and_write, job, [source / "step-00000002"], [target])
        assert_same(paths[0] / "step-00000002", target / "step-00000002")
    shapes = {name: tuple(tensor.shape) for name, tensor in stored(target / "step-00000002").items()}
    assert all(shapes[f"model/{name}"] == shape for name, shape in facts_of(jobs[0]).parameter_shapes.items())
