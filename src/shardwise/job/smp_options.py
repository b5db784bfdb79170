"""SMP's `smp_options` (v1) and SMP v2 parameters, translated into keys of a Job.

One table says for every documented key, and for those that published scripts send, whether it becomes a key of ours,
has no effect here (and why: the user gets a note), or is refused. Nothing is dropped in silence; an unknown key is an
error that names the nearest one. The reference page is generated from the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shardwise.errors import ConfigError
from shardwise.words import nearest

WHERE = "smp_options"


@dataclass(frozen=True)
class Option:
    """One key of SMP: `keys` gives our keys for a value; where that is empty, `because` says why it has no effect.

    `accepts` is a type or the allowed words. A value for which `refused` holds is an error, for the reason `because`.
    """

    name: str
    versions: str  # "v1", "v2", or "v1 v2"
    accepts: type | tuple[str | bool, ...]
    because: str
    keys: Callable[[Any], Mapping[str, Any]] = lambda value: {}
    refused: Callable[[Any], bool] = lambda value: False


@dataclass
class Translation:
    """Keys of ours with their values, defaults for keys that nobody else sets, and what the user should know."""

    values: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, tuple[Any, str]] = field(default_factory=dict)  # with the note for the case that it is used
    notes: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)  # our key -> the `key=value` of SMP that gave it


def _to(key: str) -> Callable[[Any], Mapping[str, Any]]:
    return lambda value: {key: value}


def _when(key: str, given: Any) -> Callable[[Any], Mapping[str, Any]]:
    """`key` takes the value `given` where SMP's switch is on."""
    return lambda on: {key: given} if on else {}


SHARDS = "parallel.sharded_data_parallel_degree"
TENSOR, PIPELINE = "parallel.tensor_parallel_degree", "parallel.pipeline_parallel_degree"
ALGORITHM = "parallel.collective_algorithm"
SEQUENCE = "parallel.sequence_parallel"
OFFLOAD, HORIZON = "memory.offload_activations", "memory.activation_loading_horizon"
CHECKPOINTING, COMPUTE, CLIP = "memory.activation_checkpointing", "precision.compute", "optimizer.clip_norm"
FOR_MEMORY = 0.8  # SMP's weight of memory in cutting stages, where memory is what is optimized
ANY = object
FLAG = (True, False)  # or 1 and 0, as arguments of scripts
MAPPED = "means the same here"
STAGES = {
    f"parallel.{name}"
    for name in ("active_microbatches", "pipeline", "auto_partition", "default_partition", "memory_weight")
}  # keys that only mean something with more than one stage; scripts send them all the same
BLOCKWISE = "parameters are gathered and gradients reduced block by block; parallel.prefetch_depth says how far ahead"
TENSORFLOW = "it belongs to SMP for TensorFlow; leave it out"

# fmt: off
OPTIONS = (
    # v1, documented
    Option("pipeline_parallel_degree", "v1", int, MAPPED, _to(PIPELINE)),
    Option("partitions", "v1", int, "an older name of pipeline_parallel_degree", _to(PIPELINE)),
    Option("microbatches", "v1", int, "the pieces of a batch: accumulation", _to("training.gradient_accumulation")),
    Option("active_microbatches", "v1", int, MAPPED, _to("parallel.active_microbatches")),
    Option("pipeline", "v1", ("interleaved", "simple"), MAPPED, _to("parallel.pipeline")),
    Option("optimize", "v1", ("memory", "speed"), "memory keeps activations between tensor-parallel layers in parts",
           lambda word: {SEQUENCE: word == "memory"}),
    Option("placement_strategy", "v1", str, MAPPED, _to("parallel.placement_strategy")),
    Option("auto_partition", "v1", bool, MAPPED, _to("parallel.auto_partition")),
    Option("default_partition", "v1", int, "without auto_partition it means the same here",
           _to("parallel.default_partition")),
    Option("memory_weight", "v1", float, MAPPED, _to("parallel.memory_weight")),
    Option("ddp", "v1", bool, "gradients are always reduced over the data ranks"),
    Option("ddp_dist_backend", "v1", ("auto", "nccl", "gloo", "shardwise"), MAPPED, _to("parallel.ddp_dist_backend")),
    Option("deterministic_server", "v1", bool, "schedules are fixed, and there is no server"),
    Option("tensor_parallel_degree", "v1 v2", int, MAPPED, _to(TENSOR)),
    Option("prescaled_batch", "v1", bool, "tensor ranks always read the same samples; sequences of a step are counted "
           "over the data ranks"),
    Option("shard_optimizer_state", "v1", bool, MAPPED, _to("parallel.shard_optimizer_state")),
    Option("fp16", "v1", bool, "the compute dtype stays that of precision.compute", _when(COMPUTE, "fp16")),
    Option("fp16_params", "v1", bool, "the compute dtype stays that of precision.compute", _when(COMPUTE, "fp16")),
    Option("bf16", "v1", bool, "the compute dtype stays that of precision.compute", _when(COMPUTE, "bf16")),
    Option("offload_activations", "v1", bool, MAPPED, _to(OFFLOAD)),
    Option("activation_loading_horizon", "v1 v2", int, MAPPED, _to(HORIZON)),
    Option("skip_tracing", "v1", bool, "no model is traced: its structure is read from the meta device"),
    Option("sharded_data_parallel_degree", "v1", int, MAPPED, _to(SHARDS)),
    Option("sdp_reduce_bucket_size", "v1", float, BLOCKWISE),
    Option("sdp_param_persistence_threshold", "v1", float, "small parameters are sharded like all others"),
    Option("sdp_max_live_parameters", "v1", float, BLOCKWISE),
    Option("sdp_hierarchical_allgather", "v1", bool, "measured: each size takes what is fastest; off is flat",
           lambda on: {ALGORITHM: "measured" if on else "flat"}),
    Option("sdp_gradient_clipping", "v1", float, "clips by the global norm; 0 switches it off",
           lambda norm: {CLIP: norm or None}),
    # v1, TensorFlow only
    Option("contiguous", "v1", ANY, TENSORFLOW, refused=lambda value: True),
    Option("horovod", "v1", bool, TENSORFLOW, refused=bool),
    # v1, undocumented, sent by published scripts
    Option("static_mode", "v1", FLAG, "there is no request server whose order could be recorded"),
    Option("fast_mode", "v1", FLAG, "there is no request server whose messages could be skipped"),
    Option("delayed_parameter_initialization", "v1", FLAG, "models are always built on the meta device"),
    Option("checkpoint_attentions", "v1", FLAG, f"{CHECKPOINTING} says what is recomputed"),
    Option("_match_weights", "v1", FLAG, "weights never depend on the layout"),
    Option("_fp32_grad_accumulation", "v1", FLAG, "gradients are always summed in fp32 or wider"),
    # v1, of distributed transformers, sent by published scripts
    Option("flash_attention", "v1", bool, "model.attention auto takes a fused kernel where one can do what is asked",
           lambda on: {} if on else {"model.attention": "eager"}),
    Option("attention_in_fp32", "v1", bool, "kernels multiply in the compute dtype, with sums and softmax in fp32; use "
           "precision.compute fp32, or smp.nn's layers, which take it", refused=bool),
    Option("query_key_layer_scaling", "v1", bool, "kernels keep scores in fp32, where none overflows"),
    Option("fused_softmax", "v1", bool, "attention kernels hold the softmax; model.attention says which"),
    Option("fused_bias_gelu", "v1", bool, "model.compile fuses bias and activation"),
    # v2
    Option("fp8", "v2", bool, "nothing is in float8", _when("precision.fp8", "torchao")),
    Option("fp8_amax_history_len", "v2", int, "scales are taken from the numbers of each call, without a history"),
    Option("fp8_amax_compute_algo", "v2", ("max", "most_recent"), "scales are taken from the numbers of each call"),
    Option("hybrid_shard_degree", "v2", int, "0 is as many ranks as possible", lambda n: {SHARDS: n or None}),
    Option("sm_activation_offloading", "v2", bool, MAPPED, _to(OFFLOAD)),
    Option("fsdp_cache_flush_warnings", "v2", bool, "the run's records show memory instead"),
    Option("allow_empty_shards", "v2", bool, "uneven and empty shards always work"),
    Option("context_parallel_degree", "v2", int, MAPPED, _to("parallel.context_parallel_degree")),
    Option("expert_parallel_degree", "v2", int, MAPPED, _to("parallel.expert_parallel_degree")),
    Option("random_seed", "v2", int, MAPPED, _to("training.seed")),
)
# fmt: on
BY_NAME = {option.name: option for option in OPTIONS}
SAMPLES: dict[type, Any] = {int: 1, float: 1.0, str: "", bool: True, ANY: True}  # a value of each type
MPI_NOTES = {"enabled": "workers are started by torch's elastic launcher", "custom_mpi_options": "mpirun is not called"}


@cache
def option_names(version: str) -> dict[str, str]:
    """Return SMP's names for our keys, of those that take the values of an option of this version as they are."""
    names: dict[str, str] = {}
    for option in OPTIONS:
        accepts = option.accepts
        sample = accepts[0] if isinstance(accepts, tuple) else SAMPLES[accepts]
        for key, value in option.keys(sample).items() if version in option.versions else ():
            if value == sample:
                names.setdefault(key, option.name)
    return names


def is_smp(source: Mapping[str, Any]) -> bool:
    """Return whether a dict is SMP's, wrapped as an estimator's `distribution` or bare, rather than a Job's."""
    wrappers = {"smdistributed", "modelparallel", "enabled", "parameters"}
    return bool(wrappers & set(source)) or (bool(source) and any(key in BY_NAME for key in source))


def translate(source: Mapping[str, Any]) -> Translation:
    """Return SMP's options in any of their forms as keys of a Job. Raises ConfigError on what cannot be translated."""
    result = Translation()
    parameters = _unwrap(dict(source), result)
    options = {name: _known(name) for name in parameters}
    parameters = {name: value for name, value in parameters.items() if value is not None}  # as if not given
    for name, value in parameters.items():
        _add(result, options[name], value)
    _settle_stages(result)
    _add_defaults(result, parameters)
    return result


def bare_parameters(source: Mapping[str, Any], notes: list[str] | None = None) -> dict[str, Any]:
    """Return the parameters inside of whatever form of options `source` is; they are not looked at.

    What stands around them and has no effect is said in `notes`, where they are given.
    """
    result = Translation()
    parameters = _unwrap(dict(source), result)
    if notes is not None:
        notes += result.notes
    return parameters


def _unwrap(source: dict[str, Any], result: Translation) -> dict[str, Any]:
    """Return the bare parameters inside a `distribution` dict; what stands around them becomes keys or notes."""
    if "smdistributed" in source or "mpi" in source or "torch_distributed" in source:
        _around(source, result)
        source = _mapping(source.get("smdistributed", {}), "smdistributed")
        _only(source, {"modelparallel"}, "smdistributed")
    wrapped = "modelparallel" in source
    if wrapped:
        _only(source, {"modelparallel"}, "smdistributed")
        source = _mapping(source["modelparallel"], "modelparallel")
    if wrapped or {"enabled", "parameters"} & set(source):
        _only(source, {"enabled", "parameters"}, "modelparallel")
        parameters = _mapping(source.get("parameters", {}), "parameters")
        if not source.get("enabled", True):
            result.notes.append(f"{WHERE}: enabled=False, so its parameters are not used.")
            return {}
        source = parameters
    return source


def _around(source: dict[str, Any], result: Translation) -> None:
    """`mpi` and `torch_distributed` beside `smdistributed`."""
    _only(source, {"smdistributed", "mpi", "torch_distributed"}, "distribution")
    for name, value in _mapping(source.get("mpi", {}), "mpi").items():
        if name == "processes_per_host":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{WHERE}: mpi.{name}={value!r} must be a whole number of at least 1; use 1 or more")
            result.values["parallel.workers"] = value
            result.origins["parallel.workers"] = f"mpi.{name}={value!r}"
        elif name in MPI_NOTES:
            result.notes.append(f"{WHERE}: mpi.{name}={value!r} has no effect here: {MPI_NOTES[name]}.")
        else:
            raise ConfigError(
                f"{WHERE}: unknown key mpi.{name}={value!r}.{nearest(name, ['processes_per_host', *MPI_NOTES])}"
            )
    if "torch_distributed" in source:
        result.notes.append(f"{WHERE}: torch_distributed has no effect here: torch.distributed is always used.")


def _only(source: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in source:
        if key not in known:
            raise ConfigError(f"{WHERE}: unknown key {key!r} in {where}.{nearest(str(key), known)}")


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{WHERE}: {name}={value!r} must be a mapping of keys to values")
    return dict(value)


def _known(name: str) -> Option:
    if name not in BY_NAME:
        raise ConfigError(f"{WHERE}: unknown key {name!r}.{nearest(str(name), BY_NAME)}")
    return BY_NAME[name]


def _add(result: Translation, option: Option, value: Any) -> None:
    given = f"{option.name}={value!r}"
    _check_type(option, value)
    if option.refused(value):
        raise ConfigError(f"{WHERE}: {given} is refused: {option.because}")
    ours = option.keys(value)
    if not ours:
        result.notes.append(f"{WHERE}: {given} has no effect here: {option.because}.")
    for key, converted in ours.items():
        if key in result.values and result.values[key] != converted:
            raise ConfigError(f"{WHERE}: {result.origins[key]} and {given} disagree about {key}; keep one")
        result.values[key], result.origins[key] = converted, given


def _settle_stages(result: Translation) -> None:
    """Drop, with a note, what SMP ignores: keys of stages where there is one, `default_partition` of automatic ones."""
    unused = STAGES if result.values.get(PIPELINE, 1) == 1 else set()
    reasons = dict.fromkeys(unused, "there is one pipeline stage")
    if result.values.get("parallel.auto_partition", True):
        reasons.setdefault("parallel.default_partition", "stages are cut automatically")
    for key in sorted(reasons.keys() & result.values.keys()):
        del result.values[key]
        result.notes.append(f"{WHERE}: {result.origins.pop(key)} has no effect here: {reasons[key]}.")


def _check_type(option: Option, value: Any) -> None:
    if isinstance(option.accepts, tuple):
        if value not in option.accepts:
            words = ", ".join(map(str, option.accepts))
            raise ConfigError(f"{WHERE}: {option.name}={value!r} must be one of {words}")
        return
    kinds = (int, float) if option.accepts is float else option.accepts
    is_flag = isinstance(value, bool) and option.accepts in (int, float)  # a bool is an int to isinstance
    if is_flag or not isinstance(value, kinds):
        raise ConfigError(f"{WHERE}: {option.name}={value!r} must be of type {option.accepts.__name__}")


def _add_defaults(result: Translation, parameters: Mapping[str, Any]) -> None:
    """Add what SMP itself does where a key is left out, as far as a Job's own default differs."""
    versions = {BY_NAME[name].versions for name in parameters}
    if "v1" in versions and "v2" not in versions:
        note = (
            "sharded_data_parallel_degree is not given, so SMP's default 1 holds: parameters stay whole on every rank"
        )
        result.defaults[SHARDS] = (1, f"{WHERE}: {note}.")
    cut = result.values.get(PIPELINE, 1) > 1 and parameters.get("auto_partition", True)
    if cut and parameters.get("optimize") == "memory":
        note = f"memory_weight is not given, and with optimize='memory' SMP weighs memory by {FOR_MEMORY}"
        result.defaults["parallel.memory_weight"] = (FOR_MEMORY, f"{WHERE}: {note}.")
    if result.values.get(OFFLOAD):
        note = "offloads checkpointed activations, and no SMP option says which"
        note = f"{WHERE}: {result.origins[OFFLOAD]} {note}; {CHECKPOINTING} is set to full."
        result.defaults[CHECKPOINTING] = ("full", note)
