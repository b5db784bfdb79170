"""SMP's options: each documented key becomes a key of ours, a note, or an error; none is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.job.smp_options import BY_NAME, OPTIONS, translate
from shardwise.job.sources import read_job, validate

SHARDS = "parallel.sharded_data_parallel_degree"
COMPUTE = "precision.compute"

# The tables of SMP's documentation, and the keys that published scripts send.
DOCUMENTED = """
pipeline_parallel_degree partitions microbatches active_microbatches pipeline optimize placement_strategy auto_partition
default_partition memory_weight ddp ddp_dist_backend deterministic_server tensor_parallel_degree prescaled_batch
shard_optimizer_state fp16 fp16_params bf16 offload_activations activation_loading_horizon skip_tracing
sharded_data_parallel_degree sdp_reduce_bucket_size sdp_param_persistence_threshold sdp_max_live_parameters
sdp_hierarchical_allgather sdp_gradient_clipping contiguous horovod static_mode fast_mode
delayed_parameter_initialization checkpoint_attentions _match_weights _fp32_grad_accumulation hybrid_shard_degree
sm_activation_offloading fsdp_cache_flush_warnings allow_empty_shards context_parallel_degree expert_parallel_degree
random_seed flash_attention attention_in_fp32 query_key_layer_scaling fused_softmax fused_bias_gelu fp8
fp8_amax_history_len fp8_amax_compute_algo
"""

MAPPED = [
    ("pipeline_parallel_degree", 2, "parallel.pipeline_parallel_degree", 2),
    ("partitions", 2, "parallel.pipeline_parallel_degree", 2),
    ("microbatches", 4, "training.gradient_accumulation", 4),
    ("placement_strategy", "spread", "parallel.placement_strategy", "spread"),
    ("ddp_dist_backend", "nccl", "parallel.ddp_dist_backend", "nccl"),
    ("tensor_parallel_degree", 4, "parallel.tensor_parallel_degree", 4),
    ("optimize", "memory", "parallel.sequence_parallel", True),
    ("optimize", "speed", "parallel.sequence_parallel", False),
    ("shard_optimizer_state", True, "parallel.shard_optimizer_state", True),
    ("fp16", True, COMPUTE, "fp16"),
    ("fp16_params", True, COMPUTE, "fp16"),
    ("bf16", True, COMPUTE, "bf16"),
    ("offload_activations", True, "memory.offload_activations", True),
    ("activation_loading_horizon", 2, "memory.activation_loading_horizon", 2),
    ("sharded_data_parallel_degree", 8, SHARDS, 8),
    ("sdp_gradient_clipping", 0.5, "optimizer.clip_norm", 0.5),
    ("sdp_gradient_clipping", 0, "optimizer.clip_norm", None),
    ("sdp_hierarchical_allgather", True, "parallel.collective_algorithm", "measured"),
    ("sdp_hierarchical_allgather", False, "parallel.collective_algorithm", "flat"),
    ("hybrid_shard_degree", 4, SHARDS, 4),
    ("hybrid_shard_degree", 0, SHARDS, None),
    ("sm_activation_offloading", False, "memory.offload_activations", False),
    ("context_parallel_degree", 2, "parallel.context_parallel_degree", 2),
    ("expert_parallel_degree", 2, "parallel.expert_parallel_degree", 2),
    ("flash_attention", False, "model.attention", "eager"),
    ("fp8", True, "precision.fp8", "torchao"),
    ("random_seed", 7, "training.seed", 7),
]
STAGED = [  # mean something with more than one stage
    ("active_microbatches", 4, "parallel.active_microbatches", 4),
    ("pipeline", "simple", "parallel.pipeline", "simple"),
    ("auto_partition", False, "parallel.auto_partition", False),
    ("default_partition", 0, "parallel.default_partition", 0),
    ("memory_weight", 0.5, "parallel.memory_weight", 0.5),
]
IGNORED = [
    ("flash_attention", True),
    ("attention_in_fp32", False),
    ("query_key_layer_scaling", True),
    ("fused_softmax", True),
    ("fused_bias_gelu", True),
    ("fp8", False),
    ("fp8_amax_history_len", 1024),
    ("fp8_amax_compute_algo", "max"),
    ("ddp", True),
    ("deterministic_server", True),
    ("prescaled_batch", True),
    ("fp16", False),
    ("skip_tracing", True),
    ("sdp_reduce_bucket_size", 5e8),
    ("sdp_param_persistence_threshold", 1_000_000),
    ("sdp_max_live_parameters", 1e9),
    ("static_mode", True),
    ("fast_mode", True),
    ("delayed_parameter_initialization", True),
    ("checkpoint_attentions", False),
    ("_match_weights", True),
    ("_fp32_grad_accumulation", 1),
    ("fsdp_cache_flush_warnings", True),
    ("allow_empty_shards", False),
]
REFUSED = [("contiguous", True), ("horovod", True), ("attention_in_fp32", True)]


def test_the_table_holds_every_documented_key_and_this_file_tries_each() -> None:
    assert sorted(option.name for option in OPTIONS) == sorted(DOCUMENTED.split())
    assert {name for name, *_ in (*MAPPED, *STAGED, *IGNORED, *REFUSED)} == set(BY_NAME)


@pytest.mark.parametrize(("name", "value", "key", "ours"), MAPPED)
def test_mapped(name: str, value: Any, key: str, ours: Any) -> None:
    result = translate({name: value})
    assert result.values == {key: ours}
    section, field = key.split(".")
    validate({section: {field: ours}})  # the key exists and takes the value


@pytest.mark.parametrize(("name", "value", "key", "ours"), STAGED)
def test_keys_of_stages_are_mapped_where_there_are_stages(name: str, value: Any, key: str, ours: Any) -> None:
    parameters = {"auto_partition": False, "pipeline_parallel_degree": 2, name: value}
    assert translate(parameters).values[key] == ours
    alone = translate({name: value})
    assert alone.values == {}
    assert any(f"{name}={value!r} has no effect here: there is one pipeline stage" in note for note in alone.notes)


def test_the_default_partition_of_automatic_stages_is_ignored_as_in_smp() -> None:
    result = translate({"pipeline_parallel_degree": 2, "auto_partition": True, "default_partition": 0})
    assert "parallel.default_partition" not in result.values
    assert any("default_partition=0 has no effect here: stages are cut automatically" in note for note in result.notes)


def test_optimizing_memory_weighs_it_as_smp_does() -> None:
    asked: dict[str, Any] = {"optimize": "memory", "pipeline_parallel_degree": 2}
    assert translate(asked).defaults["parallel.memory_weight"][0] == 0.8
    for change in ({"optimize": "speed"}, {"pipeline_parallel_degree": 1}, {"auto_partition": False}):
        assert "parallel.memory_weight" not in translate({**asked, **change}).defaults


@pytest.mark.parametrize(("name", "value"), IGNORED)
def test_no_effect_is_said(name: str, value: Any) -> None:
    result = translate({name: value})
    assert result.values == {}
    note = next(note for note in result.notes if f"{name}={value!r}" in note)
    assert f"no effect here: {BY_NAME[name].because}" in note


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r} is refused: "):
        translate({name: value})


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ({"sharded_data_parallel_degree": 2}, {SHARDS: 2}),
        ({"enabled": True, "parameters": {"sharded_data_parallel_degree": 2}}, {SHARDS: 2}),
        ({"modelparallel": {"enabled": True, "parameters": {"sharded_data_parallel_degree": 2}}}, {SHARDS: 2}),
        (
            {
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"hybrid_shard_degree": 2}}},
                "torch_distributed": {"enabled": True},
            },
            {SHARDS: 2},
        ),
        (
            {
                "smdistributed": {"modelparallel": {"enabled": True, "parameters": {"bf16": True}}},
                "mpi": {"enabled": True, "processes_per_host": 8, "custom_mpi_options": "-x A"},
            },
            {COMPUTE: "bf16", "parallel.workers": 8},
        ),
        ({"enabled": False, "parameters": {"fp16": True}}, {}),
        ({}, {}),
    ],
)
def test_forms(source: dict[str, Any], values: dict[str, Any]) -> None:
    assert translate(source).values == values


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"tensor_paralel_degree": 2}, "Did you mean 'tensor_parallel_degree'"),
        ({"enabled": True, "paramters": {}}, "unknown key"),
        ({"modelparallel": {"enabled": True, "parametrs": {}}}, "Did you mean 'parameters'"),
        ({"modelparallel": 3}, "must be a mapping"),
        ({"smdistributed": {"modelparallel": {}, "dataparallel": {}}}, "unknown key 'dataparallel'"),
        ({"smdistributed": {}, "mpi": {"process_per_host": 2}}, "Did you mean 'processes_per_host'"),
        ({"microbatches": "4"}, "must be of type int"),
        ({"microbatches": True}, "must be of type int"),
        ({"fp16": 1}, "must be of type bool"),
        ({"pipeline": "fast"}, "must be one of interleaved, simple"),
        ({"partitions": 2, "pipeline_parallel_degree": 4}, "partitions=2 and pipeline_parallel_degree=4 disagree"),
        ({"fp16": True, "bf16": True}, "fp16=True and bf16=True disagree about precision.compute"),
    ],
)
def test_wrong_options(source: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as raised:
        translate(source)
    assert says in str(raised.value)


def test_aliases_that_agree_are_fine() -> None:
    assert translate({"partitions": 1, "pipeline_parallel_degree": 1}).values["parallel.pipeline_parallel_degree"] == 1


@pytest.mark.parametrize(
    ("options", "degree", "said"),
    [
        ({"ddp": True}, 1, True),
        ({"tensor_parallel_degree": 1}, None, False),  # a key of both versions
        ({"hybrid_shard_degree": 0, "ddp": True}, None, False),
        ({"ddp": True, "sharded_data_parallel_degree": 4}, 4, False),
    ],
)
def test_v1_leaves_parameters_whole_where_its_degree_is_left_out(options: dict, degree: int | None, said: bool) -> None:
    loaded = read_job(options, environ={})
    assert loaded.job.parallel.sharded_data_parallel_degree == degree
    assert any("SMP's default 1 holds" in note for note in loaded.notes) is said


def test_offload_brings_the_checkpointing_that_it_offloads() -> None:
    loaded = read_job({"hybrid_shard_degree": 0, "sm_activation_offloading": True}, environ={})
    assert loaded.job.memory.activation_checkpointing == "full"
    assert any("is set to full" in note for note in loaded.notes)
    own = {"smp_options": {"sm_activation_offloading": True}, "memory": {"activation_checkpointing": "selective"}}
    loaded = read_job(own, environ={})
    assert loaded.job.memory.activation_checkpointing == "selective"
    assert loaded.notes == ()
