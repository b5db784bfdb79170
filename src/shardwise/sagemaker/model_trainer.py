"""`shardwise.sagemaker.ModelTrainer`: the trainer of version 3 of SageMaker's SDK, with the import changed.

    from shardwise.sagemaker import Compute, InputData, ModelTrainer, SMP, SourceCode, Torchrun

    trainer = ModelTrainer(training_image=image, role=role,
                           source_code=SourceCode(source_dir="src", entry_script="train.py"),
                           compute=Compute(instance_type="ml.p5.48xlarge", instance_count=2),
                           distributed=Torchrun(smp=SMP(tensor_parallel_degree=2)))
    trainer.train([InputData(channel_name="train", data_source="s3://bucket/train")])

Every argument acts or is refused by name. The job is checked before anything is uploaded. An entry script that is a
YAML file is a job of shardwise; its hyperparameters are keys (`training.steps`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, Self

import yaml
from pydantic import Field

from shardwise.errors import ConfigError
from shardwise.observe.log_patterns import METRIC_PATTERNS
from shardwise.sagemaker.client import ServiceClient
from shardwise.sagemaker.container import ARGUMENT_FORM, COMMAND, OPTIONS, REQUIREMENTS
from shardwise.sagemaker.distribution import EstimatorDistribution, read_mpi_options
from shardwise.sagemaker.draft import TrainingDraft, image_name, timed_name
from shardwise.sagemaker.handle import start
from shardwise.sagemaker.inputs import InputData, NamedInputs, named_inputs
from shardwise.sagemaker.request import TrainingJob
from shardwise.sagemaker.shapes import (
    Channel,
    CheckpointConfig,
    InfraCheckConfig,
    InstanceGroup,
    MetricDefinition,
    OutputDataConfig,
    RemoteDebugConfig,
    RetryStrategy,
    SessionChainingConfig,
    Shape,
    StoppingCondition,
    Tag,
    TensorBoardOutputConfig,
    TrainingImageConfig,
    given,
)
from shardwise.sagemaker.source import IGNORED, SourceFiles

DEFAULT_INSTANCE = "ml.m5.xlarge"
DEFAULT_SECONDS = 3600
REQUIRED = {
    "role": "give the name or ARN of the IAM role of the containers",
    "training_image": "Amazon's images do not hold shardwise; build one with the Dockerfile and give its URI in ECR",
}


class Mode(Enum):
    """The place where a job runs: the service, or this machine."""

    SAGEMAKER_TRAINING_JOB = "SAGEMAKER_TRAINING_JOB"
    LOCAL_CONTAINER = "LOCAL_CONTAINER"


class SourceCode(Shape):
    """The user's files, and what of them is started; `command` wins over `entry_script` and over `distributed`."""

    source_dir: str | None = None
    requirements: str | None = None
    entry_script: str | None = None
    command: str | None = None
    ignore_patterns: list[str] = Field(default_factory=lambda: list(IGNORED))


class Compute(Shape):
    """The instances of a job."""

    instance_type: str | None = None
    instance_count: int | None = None
    volume_size_in_gb: int = 30
    volume_kms_key_id: str | None = None
    keep_alive_period_in_seconds: int | None = None
    instance_groups: list[InstanceGroup] | None = None
    training_plan_arn: str | None = None
    instance_placement_config: dict[str, Any] | None = None
    enable_managed_spot_training: bool | None = None


class Networking(Shape):
    """The network of a job's containers."""

    security_group_ids: list[str] | None = None
    subnets: list[str] | None = None
    enable_network_isolation: bool | None = None
    enable_inter_container_traffic_encryption: bool | None = None


class SMP(Shape):
    """SMP's parameters, version 2; what is not given is left to the script."""

    hybrid_shard_degree: int | None = None
    sm_activation_offloading: bool | None = None
    activation_loading_horizon: int | None = None
    fsdp_cache_flush_warnings: bool | None = None
    allow_empty_shards: bool | None = None
    tensor_parallel_degree: int | None = None
    context_parallel_degree: int | None = None
    expert_parallel_degree: int | None = None
    random_seed: int | None = None


class DistributedConfig(Shape):
    """A way to start ranks. None processes a node: a rank a GPU."""

    process_count_per_node: int | None = None


class Torchrun(DistributedConfig):
    """Ranks as torchrun starts them, with SMP's parameters."""

    smp: SMP | None = None


class MPI(DistributedConfig):
    """Ranks of a script that was written for MPI."""

    mpi_additional_options: list[str] | None = None


class ModelTrainer(Shape):
    """A training job as version 3 of SageMaker's SDK describes it.

    Raises:
        ConfigError: an argument is unknown, of the wrong type, refused, or missing.
    """

    training_mode: Mode = Mode.SAGEMAKER_TRAINING_JOB
    sagemaker_session: Any = None
    role: str | None = None
    base_job_name: str | None = None
    source_code: SourceCode | None = None
    distributed: Torchrun | MPI | DistributedConfig | None = None
    compute: Compute | None = None
    networking: Networking | None = None
    stopping_condition: StoppingCondition | None = None
    training_image: str | None = None
    algorithm_name: str | None = None
    training_image_config: TrainingImageConfig | None = None
    output_data_config: OutputDataConfig | None = None
    input_data_config: list[Channel | InputData] | None = None
    checkpoint_config: CheckpointConfig | None = None
    training_input_mode: str = "File"
    environment: dict[str, str] = Field(default_factory=dict)
    hyperparameters: dict[str, Any] | str = Field(default_factory=dict)
    tags: list[Tag] | None = None
    local_container_root: str | None = None
    model_package_config: dict[str, Any] | None = None
    # Set by the `with_` methods.
    tensorboard_output_config: TensorBoardOutputConfig | None = None
    retry_strategy: RetryStrategy | None = None
    infra_check_config: InfraCheckConfig | None = None
    remote_debug_config: RemoteDebugConfig | None = None
    session_chaining_config: SessionChainingConfig | None = None
    metric_definitions: list[MetricDefinition] | None = None
    latest_training_job: Any = None

    @classmethod
    def from_recipe(cls, training_recipe: str, *arguments: Any, **settings: Any) -> NoReturn:
        """Refuse a recipe by name: the command for recipes makes a job of it.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"ModelTrainer.from_recipe({training_recipe!r}): a trainer starts scripts and jobs; use `shardwise recipe "
            "RECIPE --to sagemaker`, which reads recipes"
        )

    def with_tensorboard_output_config(self, tensorboard_output_config: TensorBoardOutputConfig) -> Self:
        """Set where TensorBoard's files go."""
        self.tensorboard_output_config = tensorboard_output_config
        return self

    def with_retry_strategy(self, retry_strategy: RetryStrategy) -> Self:
        """Set how often the service tries again after a fault of its own."""
        self.retry_strategy = retry_strategy
        return self

    def with_infra_check_config(self, infra_check_config: InfraCheckConfig | None = None) -> Self:
        """Check the instances before the job."""
        self.infra_check_config = infra_check_config or InfraCheckConfig(enable_infra_check=True)
        return self

    def with_session_chaining_config(self, session_chaining_config: SessionChainingConfig | None = None) -> Self:
        """Let the role hand on its session tags."""
        default = SessionChainingConfig(enable_session_tag_chaining=True)
        self.session_chaining_config = session_chaining_config or default
        return self

    def with_remote_debug_config(self, remote_debug_config: RemoteDebugConfig | None = None) -> Self:
        """Allow a shell in the containers."""
        self.remote_debug_config = remote_debug_config or RemoteDebugConfig(enable_remote_debug=True)
        return self

    def with_checkpoint_config(self, checkpoint_config: CheckpointConfig | None = None) -> Self:
        """Set where checkpoints are kept."""
        self.checkpoint_config = checkpoint_config or CheckpointConfig()
        return self

    def with_metric_definitions(self, metric_definitions: list[MetricDefinition]) -> Self:
        """Set the metrics that are read from the log, in place of those of shardwise's own lines."""
        self.metric_definitions = metric_definitions
        return self

    def train(
        self,
        input_data_config: Sequence[Channel | InputData] | None = None,
        wait: bool = True,
        logs: bool = True,
        dry_run: bool = False,
    ) -> dict[str, Any] | None:
        """Start the job, and wait for its end unless `wait` is False.

        Args:
            input_data_config: channels; they replace those of the constructor that have the same name.
            wait: False returns once the service has the job.
            logs: whether what the containers print is shown.
            dry_run: check everything and start nothing; the body of the API's request is returned.

        Raises:
            ConfigError: something is refused; nothing has been uploaded then.
            LegalityError: SMP's options do not fit the instances.
            MachineError: the service cannot be reached, or refuses the job.
            WorkerError: the job failed.
        """
        draft = self.draft(input_data_config)
        if dry_run:
            draft.check()
            return None if draft.is_local else draft.request()
        client = ServiceClient(self.sagemaker_session)
        root = None if self.local_container_root is None else Path(self.local_container_root)
        self.latest_training_job = start(draft, client, (), wait=wait, with_logs=logs, root=root)
        return None

    def draft(self, input_data_config: Sequence[Channel | InputData] | None = None) -> TrainingDraft:
        """Return the job that `train` starts, with nothing uploaded."""
        self._check()
        inputs: NamedInputs = named_inputs(list(self.input_data_config or ()))
        inputs |= named_inputs(list(input_data_config or ()))
        return TrainingDraft(
            job=self._job(),
            source=self._source(),
            inputs=inputs,
            distribution=self._distribution(),
            upload_uri=None if self.output_data_config is None else _remote(self.output_data_config.s3_output_path),
        )

    @property
    def is_local(self) -> bool:
        """True where the job runs on this machine."""
        return self.training_mode is Mode.LOCAL_CONTAINER

    def _check(self) -> None:
        code = self.source_code
        if self.algorithm_name is not None:
            raise ConfigError(f"algorithm_name={self.algorithm_name!r}: AWS's own are not started; use training_image")
        if self.model_package_config is not None:
            raise ConfigError("model_package_config: shardwise trains; register the model with SageMaker's own SDK")
        if code is None or (code.entry_script is None and code.command is None):
            raise ConfigError("source_code: give SourceCode(entry_script='train.py'), or one with a command")
        if code.requirements == "auto":
            raise ConfigError("source_code.requirements='auto' is JumpStart's; give the path of a file of source_dir")
        script = code.entry_script or ""
        if script and not script.endswith((".py", ".sh", ".yaml", ".yml")):
            raise ConfigError(f"source_code.entry_script={script!r}: must end in .py or .sh, or be a job (.yaml)")
        if self.distributed is not None and not (script or code.command):
            raise ConfigError("distributed needs source_code.entry_script")
        for argument in () if self.is_local else ("role", "training_image"):
            if getattr(self, argument) is None:
                raise ConfigError(f"ModelTrainer: {argument} is not given; {REQUIRED[argument]}")

    def _source(self) -> SourceFiles:
        code = self.source_code
        assert code is not None
        return SourceFiles(
            entry_point=None if code.command is not None else code.entry_script,
            directory=code.source_dir,
            ignored=tuple(code.ignore_patterns),
        )

    def _distribution(self) -> EstimatorDistribution:
        distributed, code = self.distributed, self.source_code
        result = EstimatorDistribution()
        if code is not None and code.command is not None:
            if distributed is not None:
                result.notes.append("distributed has no effect here: source_code.command says what runs.")
            return result
        if distributed is None:
            return result
        result.processes = distributed.process_count_per_node
        if isinstance(distributed, MPI):
            variables, rest = read_mpi_options(distributed.mpi_additional_options or [])
            result.environment = variables
            if rest:
                result.notes.append(f"mpi_additional_options: {' '.join(rest)} has no effect here: there is no mpirun.")
        smp = distributed.smp if isinstance(distributed, Torchrun) else None
        if smp is not None:
            result.options = smp.model_dump(exclude_none=True)
        return result

    def _hyperparameters(self) -> dict[str, Any]:
        code, distributed = self.source_code, self.distributed
        assert code is not None
        parameters = _read_hyperparameters(self.hyperparameters)
        options = self._distribution().options
        if options is not None:
            parameters[OPTIONS] = options
        flag = "sagemaker_mpi_enabled" if isinstance(distributed, MPI) else "sagemaker_torch_distributed_enabled"
        framework: dict[str, Any] = {ARGUMENT_FORM: "json"}
        if code.command is not None:
            framework[COMMAND] = code.command
        elif distributed is not None:
            framework[flag] = True
            if distributed.process_count_per_node is not None:
                framework["sagemaker_mpi_num_of_processes_per_host"] = distributed.process_count_per_node
        if code.requirements is not None:
            framework[REQUIREMENTS] = code.requirements
        return {**parameters, **framework}

    def _job(self) -> TrainingJob:
        compute = self.compute or Compute(instance_type=DEFAULT_INSTANCE, instance_count=1)
        condition = self.stopping_condition or StoppingCondition()
        output, checkpoint = self.output_data_config, self.checkpoint_config
        metrics = self.metric_definitions
        return TrainingJob(
            name=timed_name(self.base_job_name or f"{image_name(self.training_image)}-job"),
            role=self.role or "",
            image=self.training_image or "",
            output_path=(output.s3_output_path if output else None) or "",
            instance_type=_local_type(compute.instance_type) if self.is_local else compute.instance_type,
            instance_count=compute.instance_count or 1,
            instance_groups=compute.instance_groups or (),
            volume_gb=compute.volume_size_in_gb,
            keep_alive_seconds=compute.keep_alive_period_in_seconds,
            training_plan=compute.training_plan_arn,
            placement=compute.instance_placement_config,
            hyperparameters=self._hyperparameters(),
            environment=self.environment,
            input_mode=self.training_input_mode,
            image_config=self.training_image_config.body() if self.training_image_config else None,
            metrics=METRIC_PATTERNS if metrics is None else {metric.name: metric.regex for metric in metrics},
            output_key=output.kms_key_id if output else None,
            output_compression=output.compression_type if output else None,
            volume_key=compute.volume_kms_key_id,
            checkpoint_uri=checkpoint.s3_uri if checkpoint else None,
            checkpoint_path=(checkpoint or CheckpointConfig()).local_path,
            max_run=condition.max_runtime_in_seconds or DEFAULT_SECONDS,
            max_wait=condition.max_wait_time_in_seconds,
            max_pending=condition.max_pending_time_in_seconds,
            spot=bool(compute.enable_managed_spot_training),
            tags={tag.key: tag.value for tag in self.tags or ()},
            more=self._more(),
        )

    def _more(self) -> dict[str, Any]:
        network = self.networking or Networking()
        configs = {
            "TensorBoardOutputConfig": self.tensorboard_output_config,
            "RetryStrategy": self.retry_strategy,
            "InfraCheckConfig": self.infra_check_config,
            "RemoteDebugConfig": self.remote_debug_config,
            "SessionChainingConfig": self.session_chaining_config,
        }
        return given(
            VpcConfig=given(SecurityGroupIds=network.security_group_ids, Subnets=network.subnets),
            EnableNetworkIsolation=network.enable_network_isolation,
            EnableInterContainerTrafficEncryption=network.enable_inter_container_traffic_encryption,
            **{name: None if config is None else config.body() for name, config in configs.items()},
        )


def _read_hyperparameters(given_parameters: dict[str, Any] | str) -> dict[str, Any]:
    """Return hyperparameters, or those of a JSON or YAML file. Raises ConfigError where it holds no mapping."""
    if not isinstance(given_parameters, str):
        return dict(given_parameters)
    try:
        text = Path(given_parameters).read_text(encoding="utf-8")
        value = json.loads(text) if given_parameters.endswith(".json") else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"hyperparameters={given_parameters!r} is no file of JSON or YAML: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"hyperparameters={given_parameters!r} holds a {type(value).__name__}, not a mapping")
    return value


def _local_type(instance_type: str | None) -> str:
    return instance_type if instance_type in ("local_cpu", "local_gpu") else "local_cpu"


def _remote(uri: str | None) -> str | None:
    return uri if uri is not None and uri.startswith("s3://") else None
