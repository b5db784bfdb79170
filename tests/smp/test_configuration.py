"""SMP's options in a script: each acts, or has a line that says why not, or is refused; none is dropped in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import shardwise.smp as smp
from shardwise.collectives import engine
from shardwise.commands import train as entry
from shardwise.errors import ConfigError, MachineError
from shardwise.job.schema import Job
from shardwise.job.smp_options import OPTIONS
from shardwise.kernels import precision
from shardwise.plan.plan import World, precheck
from shardwise.smp.backend import choose_backend
from shardwise.smp.options import OPTIONS_VARIABLE
from shardwise.smp.v1.config import ACT_IN_SCRIPTS, ModelParallelConfig, read_configuration
from shardwise.testing.world import WorldPool
from tests.smp.scripts import batches, make_model, replaced_loss

TWO: dict[str, Any] = {"partitions": 2, "microbatches": 4}
SHARDED: dict[str, Any] = {"sharded_data_parallel_degree": 2}
# A value that is not the default, and what it is given beside.
VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "pipeline_parallel_degree": (2, {}), "partitions": (2, {}), "microbatches": (4, {}),
    "active_microbatches": (2, TWO), "pipeline": ("simple", TWO), "optimize": ("memory", {"tensor_parallel_degree": 2}),
    "placement_strategy": ("spread", {}), "auto_partition": (False, TWO), "default_partition": (1, TWO),
    "memory_weight": (0.3, TWO), "ddp": (False, {}), "ddp_dist_backend": ("gloo", {}),
    "tensor_parallel_degree": (2, {}),
    "activation_loading_horizon": (2, {"offload_activations": True}), "sharded_data_parallel_degree": (2, {}),
    "sdp_reduce_bucket_size": (7, SHARDED), "sdp_param_persistence_threshold": (7, SHARDED),
    "sdp_max_live_parameters": (7, SHARDED), "sdp_hierarchical_allgather": (False, SHARDED),
    "sdp_gradient_clipping": (0.5, SHARDED), "flash_attention": (False, {}),
}  # fmt: skip
READ = {start.partition("=")[0] for start in ACT_IN_SCRIPTS} - {"ddp"}  # by smp itself, from state.cfg


@pytest.mark.parametrize("option", [each for each in OPTIONS if "v1" in each.versions], ids=lambda each: each.name)
def test_each_option_acts_or_is_named(option: Any) -> None:
    value, beside = VALUES.get(option.name, (True, {}))
    try:
        found, before = ModelParallelConfig({**beside, option.name: value}), ModelParallelConfig(beside)
        acts = found.job_keys != before.job_keys or option.name in READ
    except ConfigError as error:
        assert f"{option.name}={value!r} is refused" in str(error)
        return
    assert found.get(option.name) == value
    assert acts != any(f"{option.name}={value!r}" in note and "no effect here: " in note for note in found.notes)


@pytest.mark.parametrize(
    "given, named",
    [
        ({"activation_loading_horizon": 3}, "activation_loading_horizon=3 has no effect here: nothing is offloaded"),
        ({"sdp_gradient_clipping": 0.5}, "sdp_gradient_clipping=0.5 has no effect here: parameters are whole"),
        ({"sdp_hierarchical_allgather": False}, "sdp_hierarchical_allgather=False has no effect here: parameters are"),
        ({"ddp_dist_backend": "nccl"}, "ddp_dist_backend='nccl' has no effect here: NCCL is for CUDA"),
    ],
)
def test_what_is_idle_beside_the_others_is_named_once(
    given: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    smp.init(given)
    smp.state.reset()
    assert capsys.readouterr().err.count(named) == 1


@pytest.mark.parametrize(
    "given, said",
    [
        ({"partitions": "2"}, "partitions='2' must be of type int"),
        ({"pipeline_parallel_degree": []}, r"pipeline_parallel_degree=\[\] must be of type int"),
        ({**TWO, "active_microbatches": 0}, "smp.init: active_microbatches=0: must be greater than or equal to 1"),
        ({**TWO, "auto_partition": False, "default_partition": 5}, "default_partition=5 is no stage of .*; use 0 to 1"),
        ({"_match_weights": "yes"}, "_match_weights='yes' must be one of True, False"),
        ({"smdistributed": {"dataparallel": {"enabled": True}}}, "unknown key 'dataparallel' in smdistributed"),
    ],
)
def test_wrong_values_are_refused_from_the_launcher_too(
    given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OPTIONS_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=said):
        read_configuration(given, "cpu").base_job()
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps(given))
    with pytest.raises(ConfigError, match=said):
        read_configuration(None, "cpu").base_job()


def test_what_the_ranks_do_not_allow_begins_with_the_option() -> None:
    with pytest.raises(ConfigError, match=r"smp\.init: tensor_parallel_degree=2, (?!.*parallel\.)"):
        smp.init({"tensor_parallel_degree": 2, "microbatches": None})
    smp.state.reset()


@pytest.mark.parametrize("there", [True, False])
def test_a_processor_without_instructions_for_16_bits_is_named(
    there: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "multiplies", lambda dtype: there)
    smp.init({"fp16": True})
    smp.state.reset()
    assert ("no instructions for products of fp16" in capsys.readouterr().err) != there
    with_fp32 = entry.plan_job(Job.model_validate({"parallel": {"workers": 1}}))
    with_bf16 = entry.plan_job(Job.model_validate({"parallel": {"workers": 1}, "precision": {"compute": "bf16"}}))
    said = [any("no instructions for products of bf16" in note for note in p.notes) for p in (with_fp32, with_bf16)]
    assert said == [False, not there]


def test_an_estimators_forms_are_bare_parameters_to_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """`state.cfg` and the launcher's precedence know the parameters, whatever stands around them."""
    wrapped = {"smdistributed": {"modelparallel": {"enabled": True, "parameters": TWO}}, "mpi": {"enabled": True}}
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps(wrapped))
    cfg = read_configuration({"enabled": True, "parameters": {"pipeline_parallel_degree": 4, "fp16": True}}, "cpu")
    assert (cfg.pipeline_parallel_degree, cfg.partitions, cfg.microbatches, cfg.fp16) == (2, 2, 4, True)
    assert cfg.base_job().parallel.pipeline_parallel_degree == 2
    assert any("mpi.enabled=True has no effect here" in note for note in cfg.notes)
    monkeypatch.setenv(OPTIONS_VARIABLE, json.dumps({"enabled": False, "parameters": TWO}))
    cfg = read_configuration({"microbatches": 2}, "cpu")
    assert (cfg.base_job().parallel.pipeline_parallel_degree, cfg.microbatches) == (1, 2)
    assert any("enabled=False" in note for note in cfg.notes)


@pytest.mark.parametrize("more, weight", [({}, 0.8), ({"optimize": "speed"}, 0.2), ({"memory_weight": 0.5}, 0.5)])
def test_stages_are_cut_with_the_weight_that_the_configuration_shows(more: dict[str, Any], weight: float) -> None:
    cfg = ModelParallelConfig({**TWO, **more})
    assert cfg.memory_weight == cfg.base_job().parallel.memory_weight == weight
    assert "parallel.memory_weight" not in ModelParallelConfig({**more, "partitions": 1}).job_keys
    assert "parallel.memory_weight" not in ModelParallelConfig({**TWO, "auto_partition": False}).job_keys


def test_backend_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(asked: str, size: int = 2, device: str = "cpu") -> tuple[str, list[str]]:
        notes: list[str] = []
        parallel = ModelParallelConfig({"ddp_dist_backend": asked}, device).base_job().parallel
        return choose_backend(parallel, World(size, device, size), notes), notes

    monkeypatch.setattr(engine, "obstacle", lambda: "")
    monkeypatch.setattr(engine, "build", lambda say: None)
    assert (
        chosen("gloo") == ("gloo", []) and chosen("auto", 1) == ("gloo", []) and chosen("auto", 2, "cuda")[0] == "nccl"
    )
    assert chosen("auto") == chosen("shardwise") == chosen("nccl") == ("shardwise", [])
    monkeypatch.setattr(engine, "obstacle", lambda: "no compiler")
    assert chosen("auto")[0] == "gloo" and "not usable: no compiler" in chosen("auto")[1][0]
    with pytest.raises(MachineError, match="ddp_dist_backend='shardwise': no compiler"):
        chosen("shardwise")


def test_delayed_parameters_are_drawn_without_shards_too() -> None:
    settings = {"delayed_parameter_initialization": True}
    smp.init(settings)
    try:
        with smp.model_creation():
            module = make_model("gpt2")
        assert all(parameter.is_meta for parameter in module.parameters())
        model: Any = smp.DistributedModel(module)
        ids, plain = batches()[0], make_model("gpt2")
        model.load_state_dict(plain.state_dict())  # which waits for the places of what has none yet
        found, expected = model(input_ids=ids, labels=ids)["loss"], plain(input_ids=ids, labels=ids)["loss"]
        assert torch.equal(found.detach(), expected.detach())
        smp.init(settings)
        with smp.model_creation():
            drawn = smp.DistributedModel(make_model("gpt2"))
        assert torch.isfinite(drawn(input_ids=ids, labels=ids)["loss"])
    finally:
        smp.state.reset()


def test_the_size_of_a_batch_is_no_reason_to_refuse_ranks() -> None:
    """More data ranks than a job's step has sequences by default: a script has a batch of its own."""
    job = read_configuration({"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": True}, "cuda").base_job()
    precheck(job, World(512, "cuda", 8, hosts=64))


def test_replaced_models_take_smps_own_default(world_pool: WorldPool) -> None:
    """`optimize` is memory unless it is said: layers of smp.nn, whose activations are whole, do not refuse it."""
    config = {"tensor_parallel_degree": 2, "prescaled_batch": True, "optimize": "memory"}
    first, second = world_pool.run(2, replaced_loss, config)
    assert first == second > 0
