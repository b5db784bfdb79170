"""`shardwise.sagemaker.PyTorch`: the estimator of version 2 of SageMaker's SDK, with the import changed.

    from shardwise.sagemaker import PyTorch

    estimator = PyTorch(entry_point="train.py", source_dir="src", role=role, image_uri=image, instance_count=2,
                        instance_type="ml.p4d.24xlarge", distribution={"smdistributed": {"modelparallel": {...}}, ...})
    estimator.fit({"train": "s3://bucket/train"})

Every argument of the SDK acts, is answered by a note that says why it does not, or is refused by name. The job is
checked before anything is uploaded: SMP's options by the plan, for these instances. An entry point that is a YAML file
is a job of shardwise; its hyperparameters are keys (`training.steps`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from shardwise.errors import ConfigError
from shardwise.observe.log_patterns import METRIC_PATTERNS
from shardwise.sagemaker.client import ServiceClient
from shardwise.sagemaker.distribution import read_distribution
from shardwise.sagemaker.draft import TrainingDraft, image_name, timed_name
from shardwise.sagemaker.handle import TrainingHandle, start
from shardwise.sagemaker.inputs import named_inputs
from shardwise.sagemaker.request import CHECKPOINT_PATH, TrainingJob
from shardwise.sagemaker.shapes import InstanceGroup, Shape, TensorBoardOutputConfig, as_shape, given
from shardwise.sagemaker.source import SourceFiles
from shardwise.words import nearest

LOGS = {"All": True, "Training": True, "None": False, True: True, False: False}


class EstimatorSettings(Shape):
    """The arguments of the SDK's estimator that act, with its defaults."""

    entry_point: str | Path | None = None
    source_dir: str | Path | None = None
    dependencies: list[str] = Field(default_factory=list)
    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    image_uri: str | None = None
    distribution: dict[str, Any] | None = None
    role: str | None = None
    instance_count: int | None = None
    instance_type: str | None = None
    instance_groups: list[Any] | None = None
    keep_alive_period_in_seconds: int | None = None
    volume_size: int = 30
    volume_kms_key: str | None = None
    max_run: int = 86_400
    max_wait: int | None = None
    max_retry_attempts: int | None = None
    input_mode: Literal["File", "FastFile", "Pipe"] = "File"
    output_path: str | None = None
    output_kms_key: str | None = None
    code_location: str | None = None
    base_job_name: str | None = None
    sagemaker_session: Any = None
    tags: Any = None
    subnets: list[str] | None = None
    security_group_ids: list[str] | None = None
    model_uri: str | None = None
    model_channel_name: str = "model"
    metric_definitions: list[dict[str, str]] | None = None
    encrypt_inter_container_traffic: bool = False
    use_spot_instances: bool = False
    checkpoint_s3_uri: str | None = None
    checkpoint_local_path: str | None = None
    tensorboard_output_config: Any = None
    enable_network_isolation: bool = False
    enable_sagemaker_metrics: bool | None = None
    environment: dict[str, str] | None = None
    training_repository_access_mode: Literal["Platform", "Vpc"] | None = None
    training_repository_credentials_provider_arn: str | None = None
    enable_infra_check: bool | None = None
    enable_remote_debug: bool | None = None
    enable_session_tag_chaining: bool | None = None
    container_log_level: int = 20
    container_entry_point: list[str] | None = None
    container_arguments: list[str] | None = None
    disable_output_compression: bool = False
    training_plan: str | None = None
    instance_placement_config: dict[str, Any] | None = None


# Arguments that are taken and do nothing here: why.
IDLE = {
    "framework_version": "image_uri says which torch there is",
    "py_version": "image_uri says which Python there is",
    "disable_profiler": "SageMaker's profiler is never on; observe.profile is a job's own",
}
# Arguments that are refused where they have another value than these: the values, why, and the way out.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "compiler_config": ((None,), "SageMaker's Training Compiler is discontinued; use model.compile in a job"),
    "rules": ((None, []), "SageMaker Debugger hooks into Amazon's images; leave it out"),
    "debugger_hook_config": ((None, False), "SageMaker Debugger hooks into Amazon's images; use False"),
    "profiler_config": ((None,), "SageMaker's profiler hooks into Amazon's images; use observe.profile in a job"),
    "git_config": ((None,), "files are taken from this machine; clone the repository and give its path as source_dir"),
    "training_recipe": ((None,), "an estimator starts scripts and jobs; use `shardwise recipe RECIPE --to sagemaker`"),
    "recipe_overrides": ((None,), "there is no training_recipe to change; use `shardwise recipe`"),
}
# What the SDK's estimator does besides training.
OTHER_METHODS = ("deploy", "create_model", "register", "transformer", "compile_model", "prepare_workflow_for_training")


class PyTorch:
    """A training job as version 2 of SageMaker's SDK describes it.

    Raises:
        ConfigError: an argument is unknown, of the wrong type, refused, or missing.

    Attributes:
        settings: the arguments, with the SDK's defaults.
        latest_training_job: of the last `fit`; None before.
    """

    def __init__(self, entry_point: str | Path | None = None, **arguments: Any) -> None:
        rest = {name: value for name, value in arguments.items() if name not in (*IDLE, *REFUSED)}
        for name in rest:
            if name not in EstimatorSettings.model_fields:
                known = [*EstimatorSettings.model_fields, *IDLE, *REFUSED]
                raise ConfigError(f"PyTorch: unknown argument {name}={rest[name]!r}.{nearest(name, known)}")
        for name, (harmless, why) in REFUSED.items():
            if name in arguments and arguments[name] not in harmless:
                raise ConfigError(f"PyTorch: {name}={arguments[name]!r} is refused: {why}")
        self.settings = EstimatorSettings(entry_point=entry_point, **rest)
        self.notes = [
            f"{name}={arguments[name]!r} has no effect here: {why}."
            for name, why in IDLE.items()
            if arguments.get(name) is not None
        ]
        self.latest_training_job: TrainingHandle | None = None
        self._check_instances()

    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: str | bool = "All",
        job_name: str | None = None,
        experiment_config: Mapping[str, str] | None = None,
    ) -> None:
        """Start the job, and wait for its end unless `wait` is False.

        Args:
            inputs: an S3 URI or a path (channel `training`), a TrainingInput, a FileSystemInput, or a mapping of them.
            wait: False returns once the service has the job.
            logs: "All", "Training", "None", or a bool: whether what the containers print is shown.
            job_name: of the service; unset: made of `base_job_name` and the time.
            experiment_config: names of SageMaker Experiments.

        Raises:
            ConfigError: something is refused; nothing has been uploaded then.
            LegalityError: SMP's options do not fit the instances.
            MachineError: the service cannot be reached, or refuses the job.
            WorkerError: the job failed.
        """
        if logs not in LOGS:
            raise ConfigError(f"logs={logs!r}: must be 'All', 'Training' or 'None'; Debugger's rules are refused")
        draft = self.draft(inputs, job_name, experiment_config)
        client = ServiceClient(self.settings.sagemaker_session)
        self.latest_training_job = start(draft, client, self.notes, wait=wait, with_logs=LOGS[logs])

    def draft(
        self, inputs: Any = None, job_name: str | None = None, experiment_config: Mapping[str, str] | None = None
    ) -> TrainingDraft:
        """Return the job that `fit` starts, with nothing uploaded; `draft().request()` is the body of the API."""
        settings = self.settings
        channels = named_inputs(inputs)
        if settings.model_uri is not None:
            channels |= named_inputs({settings.model_channel_name: settings.model_uri})
        more = _more(settings) | given(ExperimentConfig=dict(experiment_config or {}))
        return TrainingDraft(
            job=self._job(job_name or timed_name(settings.base_job_name or image_name(settings.image_uri)), more),
            source=SourceFiles(
                entry_point=None if settings.entry_point is None else str(settings.entry_point),
                directory=None if settings.source_dir is None else str(settings.source_dir),
                dependencies=tuple(settings.dependencies),
            ),
            inputs=channels,
            distribution=read_distribution(settings.distribution, settings.instance_type or ""),
            upload_uri=settings.code_location,
        )

    @property
    def model_data(self) -> str | None:
        """The URI of the model's archive; None before a job has ended."""
        return None if self.latest_training_job is None else self.latest_training_job.model_data

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters of the job, SMP's options among them."""
        return {**self.settings.hyperparameters, **read_distribution(self.settings.distribution).hyperparameters}

    def set_hyperparameters(self, **hyperparameters: Any) -> None:
        """Add hyperparameters."""
        self.settings.hyperparameters = {**self.settings.hyperparameters, **hyperparameters}

    def __getattr__(self, name: str) -> Any:
        """Return an argument by its name, as scripts read `estimator.instance_count`."""
        if name in OTHER_METHODS:
            raise ConfigError(f"PyTorch.{name}: shardwise trains; give estimator.model_data to SageMaker's own SDK")
        settings = vars(self).get("settings")
        if settings is None or name not in type(settings).model_fields:
            raise AttributeError(f"PyTorch has no {name!r}")
        return getattr(settings, name)

    def _check_instances(self) -> None:
        settings = self.settings
        if settings.instance_groups is None:
            for name in ("instance_type", "instance_count"):
                if getattr(settings, name) is None:
                    raise ConfigError(f"PyTorch: {name} is not given; give e.g. instance_type='ml.p4d.24xlarge', "
                                      "instance_count=2, or instance_groups")  # fmt: skip
        elif settings.instance_type or settings.instance_count:
            raise ConfigError("PyTorch: instance_groups holds types and counts; leave instance_type and _count out")
        if settings.entry_point is None and not settings.container_entry_point:
            raise ConfigError("PyTorch: entry_point is not given; give a script, or the YAML file of a job")

    def _job(self, name: str, more: Mapping[str, Any]) -> TrainingJob:
        settings = self.settings
        is_local = (settings.instance_type or "").startswith("local")
        for argument in () if is_local else ("role", "image_uri"):
            if getattr(settings, argument) is None:
                raise ConfigError(f"PyTorch: {argument} is not given; {REQUIRED[argument]}")
        return TrainingJob(
            name=name,
            role=settings.role or "",
            image=settings.image_uri or "",
            output_path=settings.output_path or "",
            instance_type=settings.instance_type,
            instance_count=settings.instance_count or 1,
            instance_groups=[_instance_group(group) for group in settings.instance_groups or ()],
            volume_gb=settings.volume_size,
            keep_alive_seconds=settings.keep_alive_period_in_seconds,
            training_plan=settings.training_plan,
            placement=settings.instance_placement_config,
            hyperparameters={**self.hyperparameters(), "sagemaker_container_log_level": settings.container_log_level},
            environment=settings.environment or {},
            input_mode=settings.input_mode,
            entrypoint=settings.container_entry_point or (),
            arguments=settings.container_arguments or (),
            image_config=_image_config(settings),
            metrics=_metrics(settings.metric_definitions),
            metrics_time_series=settings.enable_sagemaker_metrics,
            output_key=settings.output_kms_key,
            output_compression="NONE" if settings.disable_output_compression else None,
            volume_key=settings.volume_kms_key,
            checkpoint_uri=settings.checkpoint_s3_uri,
            checkpoint_path=settings.checkpoint_local_path or CHECKPOINT_PATH,
            max_run=settings.max_run,
            max_wait=settings.max_wait,
            spot=settings.use_spot_instances,
            tags=_tags(settings.tags),
            more=more,
        )


REQUIRED = {
    "role": "give the name or ARN of the IAM role of the containers",
    "image_uri": "Amazon's images do not hold shardwise; build one with the Dockerfile and give its URI in ECR",
}


def _more(settings: EstimatorSettings) -> dict[str, Any]:
    """Return the members of the request that have no word of their own in `TrainingJob`."""
    network = given(SecurityGroupIds=settings.security_group_ids, Subnets=settings.subnets)
    if network and len(network) < 2:
        raise ConfigError("PyTorch: subnets and security_group_ids belong together; give both")
    board = as_shape(TensorBoardOutputConfig, settings.tensorboard_output_config, "tensorboard_output_config")
    attempts = settings.max_retry_attempts
    return given(
        VpcConfig=network,
        EnableNetworkIsolation=settings.enable_network_isolation or None,
        EnableInterContainerTrafficEncryption=settings.encrypt_inter_container_traffic or None,
        RetryStrategy=None if attempts is None else {"MaximumRetryAttempts": attempts},
        TensorBoardOutputConfig=None if board is None else board.body(),
        InfraCheckConfig=_switch("EnableInfraCheck", settings.enable_infra_check),
        RemoteDebugConfig=_switch("EnableRemoteDebug", settings.enable_remote_debug),
        SessionChainingConfig=_switch("EnableSessionTagChaining", settings.enable_session_tag_chaining),
    )


def _switch(member: str, value: bool | None) -> dict[str, bool] | None:
    return None if value is None else {member: value}


def _image_config(settings: EstimatorSettings) -> dict[str, Any] | None:
    arn = settings.training_repository_credentials_provider_arn
    if settings.training_repository_access_mode is None:
        return None
    credentials = {"TrainingRepositoryCredentialsProviderArn": arn} if arn else None
    return given(
        TrainingRepositoryAccessMode=settings.training_repository_access_mode, TrainingRepositoryAuthConfig=credentials
    )


def _instance_group(group: Any) -> InstanceGroup:
    """Return a group of this module, of a mapping, or of the SDK's own class."""
    if isinstance(group, InstanceGroup | Mapping):
        return as_shape(InstanceGroup, group, "instance_groups")  # type: ignore[no-any-return]
    return InstanceGroup(
        instance_type=group.instance_type,
        instance_count=group.instance_count,
        instance_group_name=group.instance_group_name,
    )


def _metrics(definitions: list[dict[str, str]] | None) -> dict[str, str]:
    """Return regular expressions by name; without any, those of what shardwise prints."""
    if definitions is None:
        return dict(METRIC_PATTERNS)
    for definition in definitions:
        if set(definition) != {"Name", "Regex"}:
            raise ConfigError(f"metric_definitions: {definition!r} must be {{'Name': ..., 'Regex': ...}}")
    return {definition["Name"]: definition["Regex"] for definition in definitions}


def _tags(tags: Any) -> dict[str, str]:
    """Return tags of either form: a mapping, or a list of `{"Key": ..., "Value": ...}`."""
    if tags is None:
        return {}
    if isinstance(tags, Mapping):
        return {str(key): str(value) for key, value in tags.items()}
    try:
        return {str(tag["Key"]): str(tag["Value"]) for tag in tags}
    except (TypeError, KeyError) as error:
        raise ConfigError(f"tags={tags!r}: must be a mapping, or a list of {{'Key': ..., 'Value': ...}}") from error
