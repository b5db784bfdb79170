"""`smp.init`'s configuration: a script's dict, overridden by the launcher's, as keys of a Job and as `state.cfg`.

One table, `shardwise.job.smp_options`, says what each key becomes. Here stands only what differs for a script: the
batch is the script's own, so that its size is known at the first step and not before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.job.smp_options import BY_NAME, bare_parameters, translate
from shardwise.smp.options import launched_options, make_job
from shardwise.smp.refusals import smp_words

# SMP's own defaults, which `state.cfg` shows for keys that nobody gave.
DEFAULTS: dict[str, Any] = {
    "pipeline_parallel_degree": 1, "microbatches": 1, "pipeline": "interleaved", "optimize": "memory",
    "placement_strategy": "cluster", "auto_partition": True, "default_partition": 0, "ddp": False,
    "ddp_dist_backend": "auto", "deterministic_server": False, "tensor_parallel_degree": 1, "prescaled_batch": False,
    "shard_optimizer_state": False, "fp16": False, "fp16_params": False, "bf16": False, "offload_activations": False,
    "activation_loading_horizon": 4, "skip_tracing": False, "sharded_data_parallel_degree": 1,
    "sdp_reduce_bucket_size": 5e8, "sdp_param_persistence_threshold": 1e6, "sdp_max_live_parameters": 1e9,
    "sdp_hierarchical_allgather": True, "sdp_gradient_clipping": 1.0, "static_mode": False, "fast_mode": False,
    "delayed_parameter_initialization": False, "checkpoint_attentions": False, "_match_weights": False,
    "_fp32_grad_accumulation": False,
}  # fmt: skip
ACT_IN_SCRIPTS = ("prescaled_batch=", "delayed_parameter_initialization=", "_match_weights=", "ddp=True")
# What means something beside another option alone: option -> (that option, from which value on, why it is idle).
BESIDE: dict[str, tuple[str, int, str]] = {
    "activation_loading_horizon": ("offload_activations", 1, "nothing is offloaded"),
    "sdp_gradient_clipping": ("sharded_data_parallel_degree", 2, "parameters are whole; the script clips itself"),
    "sdp_hierarchical_allgather": ("sharded_data_parallel_degree", 2, "parameters are whole"),
}
BACKEND = "parallel.ddp_dist_backend"
# What only the first step can tell, once it knows which modules are checkpointed.
OFFLOAD = ("memory.offload_activations", "memory.activation_loading_horizon", "memory.activation_checkpointing")
# Stands for a batch that the script alone knows, so that its size is no reason to refuse a layout.
OPEN_BATCH = {"training.microbatch_size": 1, "training.gradient_accumulation": 1}


class ModelParallelConfig:
    """The script's options by SMP's names: `cfg.microbatches`, `cfg["microbatches"]`. Attributes can be set.

    `given` are the keys that script or launcher gave, `notes` what has no effect here and why.
    """

    def __init__(self, given: Mapping[str, Any], device_type: str = "cpu", wrapper_notes: Sequence[str] = ()) -> None:
        given = {key: value for key, value in given.items() if value is not None}
        degree = given.get("pipeline_parallel_degree", given.get("partitions", 1))
        stages = degree if isinstance(degree, int) else 1  # what is no number is refused with the other wrong values
        derived = {"pipeline_parallel_degree": degree, "partitions": degree, "active_microbatches": stages + 2}
        derived |= {"memory_weight": 0.2 if given.get("optimize") == "speed" else 0.8}
        vars(self).update(DEFAULTS | derived | given)
        self.given = dict(given)
        self.device_type = device_type
        self.wrapper_notes = tuple(wrapper_notes)  # on the forms in which the options were given
        self.notes: list[str] = []

    if TYPE_CHECKING:  # every option is an attribute

        def __getattr__(self, key: str) -> Any: ...

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __contains__(self, key: str) -> bool:
        return key in vars(self)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return vars(self).get(key, default)

    @property
    def job_keys(self) -> dict[str, Any]:
        """The keys of a Job that these options mean. Raises ConfigError for what is unknown, wrong or refused."""
        self._refuse()
        given = {key: value for key, value in self.given.items() if key != "partitions"}
        if "partitions" in self.given:
            translate(self.given)  # which complains if the two names of one key disagree
            given["pipeline_parallel_degree"] = self.given["partitions"]
        translated = translate(given)
        values = {key: value for key, (value, _) in translated.defaults.items()} | translated.values
        self.notes = [*self.wrapper_notes, *(note for note in translated.notes if not note.startswith(_SILENT))]
        values.setdefault("parallel.sharded_data_parallel_degree", 1)
        if values.pop("parallel.shard_optimizer_state", False):
            values["parallel.shard_optimizer_state"] = True
            del values["parallel.sharded_data_parallel_degree"]
        if self.given.get("sharded_data_parallel_degree", 1) > 1:
            values.setdefault("optimizer.clip_norm", float(self["sdp_gradient_clipping"]))
        self._settle_schedule(values)
        self._settle_idle(values)
        return values

    def _refuse(self) -> None:
        """Options of version 2, stages that are not there, and two that SMP's documents say exclude each other."""
        for key, value in self.given.items():
            if key in BY_NAME and "v1" not in BY_NAME[key].versions:
                raise ConfigError(
                    f"smp.init: {key}={value!r} is of SMP version 2; give it to torch.sagemaker.init, or leave it out"
                )
        rest, stages = self.default_partition, self.pipeline_parallel_degree
        if not self.auto_partition and isinstance(rest, int) and isinstance(stages, int) and rest >= max(stages, 1):
            raise ConfigError(
                f"smp.init: default_partition={rest} is no stage of pipeline_parallel_degree={stages}; use 0 to "
                f"{stages - 1}"
            )
        degree = self.given.get("sharded_data_parallel_degree", 1)
        if self.given.get("shard_optimizer_state") and isinstance(degree, int) and degree > 1:
            raise ConfigError(
                f"smp.init: sharded_data_parallel_degree={degree} shards the optimizer's state too, and "
                "shard_optimizer_state=True the state alone; keep one"
            )

    def _settle_idle(self, values: dict[str, Any]) -> None:
        """A line for each option that has no effect beside the others, or on this device."""
        for key, (other, least, why) in BESIDE.items():
            if key in self.given and self[other] < least:
                self.notes.append(f"smp_options: {key}={self.given[key]!r} has no effect here: {why}.")
        if values.get(BACKEND) == "nccl" and self.device_type == "cpu":
            values[BACKEND] = "auto"
            self.notes.append(
                "smp_options: ddp_dist_backend='nccl' has no effect here: NCCL is for CUDA, and this is a CPU."
            )

    def _settle_schedule(self, values: dict[str, Any]) -> None:
        """Change what SMP's server of requests allows and fixed schedules do not."""
        degree = values.get("parallel.pipeline_parallel_degree", 1)
        microbatches = values.get("training.gradient_accumulation", 1)
        if degree > 1 and self.auto_partition:
            values["parallel.memory_weight"] = self.memory_weight
        if degree > 1 and microbatches < degree and values.get("parallel.pipeline", "interleaved") == "interleaved":
            values["parallel.pipeline"] = "simple"
            self.notes.append(
                f"smp_options: {microbatches} microbatches cannot fill {degree} stages in turn: pipeline is simple."
            )
        needed = microbatches if values.get("parallel.pipeline") == "simple" else min(microbatches, degree)
        if 1 <= values.get("parallel.active_microbatches", needed) < needed:
            del values["parallel.active_microbatches"]
            self.notes.append(
                f"smp_options: active_microbatches={self.active_microbatches} has no effect here: the schedule keeps "
                f"{needed} forwards in flight."
            )

    def base_job(self) -> Job:
        """A Job of the layout alone, without what depends on model and batch. Raises ConfigError for a wrong value."""
        values = self.job_keys
        with self.own_words("smp.init: "):
            make_job(values)
        return make_job(OPEN_BATCH | {key: value for key, value in values.items() if key not in OFFLOAD})

    @contextmanager
    def own_words(self, where: str = "") -> Iterator[None]:
        """Errors about keys of a Job name the options that gave them."""
        with smp_words("v1", translate(self.given).origins, where):
            yield


_SILENT = tuple(f"smp_options: {start}" for start in ACT_IN_SCRIPTS)


def read_configuration(config: Mapping[str, Any] | None, device_type: str) -> ModelParallelConfig:
    """The script's `config`, the launcher's `SM_HP_MP_PARAMETERS` taking precedence; both in any of SMP's forms.

    Raises:
        ConfigError: the variable holds no JSON object, or a key is unknown, wrong or refused.
    """
    wrapper_notes: list[str] = []
    launched = bare_parameters(launched_options(), wrapper_notes)
    given = bare_parameters(config or {}, wrapper_notes)
    for one, other in (("partitions", "pipeline_parallel_degree"), ("pipeline_parallel_degree", "partitions")):
        if one in launched and other not in launched:
            given.pop(other, None)
    return ModelParallelConfig(given | launched, device_type, wrapper_notes)
