"""What each target writes: golden files, fields by name and type, the published models where they are installed."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.errors import ConfigError, LegalityError, OutputError
from shardwise.job.launch_section import LaunchSection
from shardwise.job.sources import load_job
from shardwise.launch.launcher import TARGETS, find_target, launch, plan_for_target
from shardwise.launch.targets.kubernetes import environment_of, volumes_of
from shardwise.launch.targets.target import EVERYWHERE, manifest_text
from shardwise.training import checkpoints
from shardwise.training.checkpoints import after_restart
from tests.launch.targets import fields
from tests.launch.targets.jobs_for_launch import (
    CASES,
    GOLDEN,
    JOB,
    ON_KUBERNETES,
    PLACE,
    SETTINGS,
    files_of,
    job_for,
    plan_of,
)

TABLES = {
    "trainjob": fields.TRAIN_JOB,
    "trainjob-2.1": fields.TRAIN_JOB_OF_2_1,
    "pytorchjob": fields.PYTORCH_JOB,
    "jobset": fields.JOB_SET,
    "jobset-cpu": fields.JOB_SET,
    "hyperpod": fields.HYPERPOD,
    "pytorchjob-elastic": fields.PYTORCH_JOB,
    "hyperpod-elastic": fields.HYPERPOD,
}


@pytest.fixture(scope="module")
def written() -> dict[str, dict[str, str]]:
    return {case: files_of(case) for case in CASES}


def manifest_of(files: dict[str, str], name: str = "manifest.yaml") -> dict[str, Any]:
    made = yaml.safe_load(files[name])
    assert isinstance(made, dict)
    return made


@pytest.mark.parametrize("case", CASES)
def test_golden_files(case: str, written: dict[str, dict[str, str]]) -> None:
    golden = {path.name: path.read_text(encoding="utf-8") for path in (GOLDEN / case).iterdir()}
    assert written[case] == golden


@pytest.mark.parametrize("case", TABLES)
def test_fields_of_manifests(case: str, written: dict[str, dict[str, str]]) -> None:
    assert fields.mismatches(manifest_of(written[case]), TABLES[case]) == []
    assert fields.mismatches(manifest_of(written[case], "configmap.yaml"), fields.CONFIG_MAP) == []


@pytest.mark.parametrize("case", ["skypilot", "skypilot-instances"])
def test_fields_of_tasks(case: str, written: dict[str, dict[str, str]]) -> None:
    assert fields.mismatches(manifest_of(written[case], "task.yaml"), fields.SKYPILOT) == []


def test_a_table_finds_wrong_names_and_types() -> None:
    wrong = {"spec": {"nprocPerNode": 8, "runPolicy": {"restarts": 3}}}
    assert fields.mismatches(wrong, fields.PYTORCH_JOB) == [
        ".spec.nprocPerNode: 8 is no <class 'str'>",
        ".spec.runPolicy.restarts: no such field",
    ]


@pytest.mark.skipif(importlib.util.find_spec("kubeflow_trainer_api") is None, reason="kubeflow-trainer-api is missing")
@pytest.mark.parametrize(
    "case, model",
    {
        "trainjob": "TrainerV1alpha1TrainJob",
        "jobset": "JobsetV1alpha2JobSet",
        "jobset-cpu": "JobsetV1alpha2JobSet",
    }.items(),
)
def test_kubeflows_models_keep_every_field(case: str, model: str, written: dict[str, dict[str, str]]) -> None:
    """A field that the model does not know would be missing in what it gives back."""
    import kubeflow_trainer_api.models as models

    made = manifest_of(written[case])
    assert lost(made, getattr(models, model).from_dict(made).to_dict()) == []


@pytest.mark.skipif(importlib.util.find_spec("kubeflow_trainer_api") is None, reason="kubeflow-trainer-api is missing")
@pytest.mark.parametrize("case", ["pytorchjob", "jobset", "hyperpod"])
def test_pods_and_config_maps_are_those_of_kubernetes(case: str, written: dict[str, dict[str, str]]) -> None:
    import kubeflow_trainer_api.models as models

    spec = manifest_of(written[case])["spec"]
    places = {
        "pytorchjob": lambda: spec["pytorchReplicaSpecs"]["Master"],
        "jobset": lambda: spec["replicatedJobs"][0]["template"]["spec"],
        "hyperpod": lambda: spec["replicaSpecs"][0],
    }
    template = places[case]()["template"]
    assert lost(template, models.IoK8sApiCoreV1PodTemplateSpec.from_dict(template).to_dict()) == []


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """Return the places of `given` that a model did not keep; it may add defaults."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [line for key in given for line in lost(given[key], kept.get(key), f"{place}.{key}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [line for n, part in enumerate(given) for line in lost(part, kept[n], f"{place}[{n}]")]
    return [] if given == kept else [f"{place}: {given!r} became {kept!r}"]


def test_a_request_is_valid_for_botocores_model(written: dict[str, dict[str, str]]) -> None:
    import botocore.session
    from botocore.validate import ParamValidator

    model = botocore.session.get_session().get_service_model("sagemaker").operation_model("CreateTrainingJob")
    report = ParamValidator().validate(json.loads(written["sagemaker"]["request.json"]), model.input_shape)
    assert not report.has_errors(), report.generate_report()


def test_the_job_of_the_nodes_can_be_read(written: dict[str, dict[str, str]]) -> None:
    for case, files in written.items():
        job = load_job(yaml.safe_load(files["job.yaml"]), environ={})
        assert job.launch == LaunchSection(), case
        assert (job.checkpoint.resume, job.parallel.max_restarts) == ("auto", 0)
        assert job.parallel.workers in (None, plan_of(case).ranks_of_node)


def test_every_key_acts_on_a_target_or_is_refused() -> None:
    used = {key for target in TARGETS for key in (*EVERYWHERE, *target.keys)}
    assert used == set(LaunchSection.model_fields)


GIVEN = {
    "name": "x", "image": "x", "pull_secret": "x", "namespace": "x", "queue": "x", "priority": "x", "account": "x",
    "required_topology": "x", "preferred_topology": "x", "time_limit": "1h", "stop_seconds": 77, "port": 1234,
    "mounts": {"/x": "pvc:x"}, "secrets": {"X": "x/y"}, "setup": ["x"], "hosts": ["x"], "node_selector": {"x": "y"},
    "labels": {"x": "y"}, "service_account": "x", "shared_memory_gb": 2.0, "trainer_version": "2.1", "runtime": "x",
    "role": "x", "region": "x", "output_path": "s3://x", "volume_gb": 99, "subnets": ["x"], "security_groups": ["x"],
    "spot": True,
}  # fmt: skip


@pytest.mark.parametrize("target", SETTINGS)
def test_keys_that_do_nothing_on_a_target_are_refused(target: str) -> None:
    used = (*EVERYWHERE, *find_target(target).keys)
    for key, value in GIVEN.items():
        if key not in used:
            with pytest.raises(ConfigError, match=rf"launch\.{key}=.* does nothing on {target}; leave it out"):
                plan_for_target(job_for(target, **{key: value}), target)


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no cluster": ("slurm", {"cluster": None}, "launch.cluster is not set"),
    "unknown instance type": ("jobset", {"cluster": "p5.48xlage:4"}, "Did you mean 'p5.48xlarge'"),
    "unknown instance type of SageMaker": ("sagemaker", {"cluster": "ml.p5.48xlage"}, "Did you mean 'p5.48xlarge'"),
    "chips of AWS": ("sagemaker", {"cluster": "ml.trn1.32xlarge"}, "no backend here"),
    "no instance type": ("sagemaker", {"cluster": "h100:8"}, "SageMaker starts instance types"),
    "no image": ("trainjob", {"image": None}, "launch.image is not set; trainjob starts containers"),
    "no role": ("sagemaker", {"role": None}, "launch.role is not set"),
    "no place for the output": ("sagemaker", {"output_path": None}, "launch.output_path is not set"),
    "output that is not in S3": ("sagemaker", {"output_path": "/data"}, "must be a URI of S3"),
    "no quota": ("jobset", {"cluster": "h100:8"}, "Kueue counts quotas from requests of cpu and memory"),
    "priority without a queue": ("jobset", {"queue": None}, r"launch.priority='high' is read by Kueue alone"),
    "a secret in the environment": ("jobset", {"environment": {"HF_TOKEN": "abcdefgh"}}, "launch.environment.HF_TOKEN"),
    "a token by its form": ("slurm", {"setup": ["login hf_" + "a" * 30]}, r"launch.setup\[0\] holds a secret"),
    "a password in a line": (
        "slurm",
        {"setup": ["export API_KEY=abcdefgh"]},
        r"launch.setup\[0\] holds a secret",
    ),
    "a password in a URL": ("jobset", {"image": "https://me:pass@registry/x"}, "launch.image holds a secret"),
    "a secret as a reference": ("jobset", {"secrets": {"HF_TOKEN": "hf_" + "b" * 30}}, "must be a reference"),
    "a reference of another target": ("slurm", {"secrets": {"HF_TOKEN": "secret/key"}}, "file:/home/me/.token"),
    "a secret of another name": ("skypilot", {"secrets": {"A": "env:B"}}, "use env:A"),
    "a name that is none": ("jobset", {"name": "My Run"}, r"launch.name='My Run'.*use my-run"),
    "a long name": ("jobset", {"name": "a" * 50}, "has 68 letters, of 63 .* use at most 45"),
    "a long name of SageMaker": ("sagemaker", {"name": "a" * 64}, "SageMaker takes letters, digits and hyphens"),
    "a rank of its own": ("local", {"environment": {"RANK": "0"}}, "local says it to each rank; leave it out"),
    "a port of its own": ("slurm", {"environment": {"MASTER_PORT": "1"}}, "slurm says it .*; give launch.port"),
    "an option of torchrun": ("slurm", {"environment": {"PET_NNODES": "1"}}, "launch.environment.PET_NNODES"),
    "a label of Kueue": ("jobset", {"labels": {"kueue.x-k8s.io/queue-name": "a"}}, "sets it; give launch.queue"),
    "an option in another": ("slurm", {"account": "a\n#SBATCH --wrap=x"}, r"launch.account=.*sbatch reads words"),
    "no time": ("slurm", {"time_limit": "soon"}, "must be seconds, HH:MM:SS"),
    "a time that is too short": ("slurm", {"time_limit": "5m"}, "must be longer than launch.stop_seconds"),
    "an unknown kind of mount": ("jobset", {"mounts": {"/data": "nfs:x"}}, "must begin with pvc: or host:"),
    "a mount over the job": ("jobset", {"mounts": {"/shardwise": "pvc:x"}}, "a directory of its own"),
    "an input elsewhere": ("sagemaker", {"mounts": {"/data": "s3://x"}}, "no input of SageMaker"),
    "FSx without a network": (
        "sagemaker",
        {"subnets": None, "security_groups": None},
        "FSx needs launch.subnets",
    ),
    "a file system that is none": (
        "sagemaker",
        {"mounts": {"/opt/ml/input/data/x": "fsx:fs-1/x"}},
        "'fs-1' is no file system",
    ),
    "half a network": ("sagemaker", {"subnets": None}, "go together"),
    "a mount of another target": (
        "slurm",
        {"image": "x", "mounts": {"/a": "pvc:b"}},
        r"launch\.mounts\./a='pvc:b': .*; give both from /",
    ),
    "mounts without a container": ("slurm", {"mounts": {"/a": "/b"}}, "without a container"),
    "no hosts": ("ssh", {"hosts": None}, "launch.hosts is not set"),
    "an option as a host": ("ssh", {"hosts": ["-oProxyCommand=x", "b"]}, "is no name of a host"),
    "hosts that are not the cluster": ("ssh", {"hosts": ["a", "b", "c"]}, "name as many hosts"),
    "several machines": ("local", {"cluster": "p4d.24xlarge:2"}, "this is one machine"),
    "2.1 has no deadline": ("trainjob", {"trainer_version": "2.1"}, "a TrainJob of 2.1 has no deadline"),
    "a variable's name": ("jobset", {"environment": {"A-B": "x"}}, "is no name of a variable"),
}


SECRETS = ("abcdefgh", "hf_aaaa", "hf_bbbb", "me:pass")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    target, changes, words = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=words) as caught:
        plan_for_target(job_for(target, **changes), target)
    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_a_layout_that_does_not_fit_is_refused() -> None:
    job = load_job({**JOB, "parallel": {"tensor_parallel_degree": 3}, "launch": ON_KUBERNETES}, environ={})
    with pytest.raises(LegalityError, match="tensor_parallel_degree=3"):
        plan_for_target(job, "jobset")


def test_workers_that_are_not_the_clusters_are_refused() -> None:
    job = load_job({**JOB, "parallel": {"workers": 4}, "launch": ON_KUBERNETES}, environ={})
    with pytest.raises(ConfigError, match=r"parallel.workers=4: .* has 32 ranks \(4 x 8\); use 32"):
        plan_for_target(job, "jobset")


def test_an_unknown_target_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'slurm'"):
        find_target("slrum")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    job = job_for("slurm")
    launched = launch(job, "slurm", tmp_path / "out")
    again = launch(job, "slurm", tmp_path / "out")  # the same files: nothing changes
    assert launched.files == again.files == ("job.sbatch", "job.yaml", "launch.json")
    with pytest.raises(OutputError, match=r"holds another job\.sbatch, and nothing is overwritten"):
        launch(job_for("slurm", time_limit="40h"), "slurm", tmp_path / "out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds another notes\.txt"):
        launch(job, "slurm", tmp_path / "other")


def test_a_directory_is_quoted_or_refused(tmp_path: Path) -> None:
    directory = tmp_path / "it's $(touch ran)"
    assert launch(job_for("local"), "local", directory).files
    script = (directory / "run.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("exec ")]
    assert str(directory / "job.yaml") in shlex.split(line)
    with pytest.raises(ConfigError, match="sbatch reads words"):
        launch(job_for("slurm"), "slurm", tmp_path / "with space")
    assert not (tmp_path / "with space").exists()


def test_text_that_kubectl_would_misread_is_quoted() -> None:
    text = manifest_text({"y": "y", "count": "1e3", "mode": "0o17", "plain": "yes sir", "size": "2Gi", "name": "llama"})
    for line in ("'y': 'y'", "count: '1e3'", "mode: '0o17'", "plain: yes sir", "size: 2Gi", "name: llama"):
        assert line in text.splitlines(), line


@pytest.mark.parametrize("target", ["trainjob", "pytorchjob", "jobset", "hyperpod"])
def test_kubernetes_puts_no_other_values_into_variables(target: str) -> None:
    """It would read `$(A)` as the value of A, and `$$` as one dollar."""
    plan = plan_for_target(job_for(target, environment={"B": "a$$b$(A)$c"}, time_limit=None), target)
    assert {"name": "B", "value": "a$$$$b$$(A)$$c"} in environment_of(plan)


@pytest.mark.parametrize("resume", [None, "none", "/data/runs/other/checkpoints/step-8"])
def test_a_start_after_a_fault_goes_on_from_the_runs_own_checkpoint(
    monkeypatch: pytest.MonkeyPatch, resume: str | None
) -> None:
    """Kubernetes starts a pod again by the same manifest, which names another run's checkpoint."""
    checkpoint = {"every": 100} | ({} if resume is None else {"resume": resume})
    job = load_job({**JOB, "checkpoint": checkpoint, "launch": ON_KUBERNETES}, environ={})
    plan = plan_for_target(job, "jobset")
    for name, value in plan.environment.items():
        monkeypatch.setenv(name, value)
    assert plan.job.checkpoint.resume == (resume or "auto")
    assert after_restart(plan.job) == plan.job  # it has none of its own yet
    monkeypatch.setattr(checkpoints, "complete", lambda store: iter([("step-16", None)]))
    assert after_restart(plan.job).checkpoint.resume == ("none" if resume == "none" else "auto")


def test_slurm_signals_ahead_of_the_partitions_own_limit_where_it_is_asked_to() -> None:
    def signals(**changes: Any) -> list[str]:
        plan = plan_for_target(job_for("slurm", time_limit=None, **changes), "slurm")
        script = find_target("slurm").files(plan, PLACE)["job.sbatch"]
        return re.findall("^#SBATCH --(?:time|signal).*", script, re.MULTILINE)

    assert signals() == []
    assert signals(stop_seconds=600) == ["#SBATCH --signal=B:USR1@600"]


@pytest.mark.parametrize(("asked", "limit"), [(0.5, "512Mi"), (1.9, "1946Mi"), (3, "3Gi")])
def test_shared_memory_is_as_much_as_is_asked_for(asked: float, limit: str) -> None:
    plan = plan_for_target(job_for("jobset", shared_memory_gb=asked), "jobset")
    volumes, _ = volumes_of(plan)
    assert [volume["emptyDir"]["sizeLimit"] for volume in volumes if "emptyDir" in volume] == [limit]


def test_what_a_container_would_lose_is_noted() -> None:
    plan = plan_for_target(job_for("jobset", mounts=None), "jobset")
    assert any("output=/data/runs/llama lies inside of the container" in note for note in plan.notes)
    beside = plan_for_target(job_for("jobset", mounts={"/da": "pvc:data"}), "jobset")
    assert any("output=/data/runs/llama lies inside of the container" in note for note in beside.notes)
    assert any("model.path=/data/models/llama3-8b is not on this machine" in note for note in plan.notes)


def noted(target: str, job: dict[str, Any], **changes: Any) -> list[str]:
    """The keys of what a launch says to be lost."""
    settings = {key: value for key, value in {**SETTINGS[target], **changes}.items() if value is not None}
    plan = plan_for_target(load_job({**JOB, **job, "launch": settings}, environ={}), target)
    return [note.partition("=")[0] for note in plan.notes if "ends with" in note or "end with" in note]


@pytest.mark.parametrize(
    ("target", "job", "changes", "lost"),
    [
        ("slurm", {}, {}, []),
        ("slurm", {"output": "runs/x"}, {"image": "x", "mounts": {"/data": "/shared"}}, ["output"]),
        ("slurm", {}, {"image": "x", "mounts": {"/data": "/shared"}}, []),
        ("skypilot", {}, {}, ["output"]),
        ("skypilot", {"checkpoint": {"directory": "/data/ck"}}, {}, ["output", "checkpoint.directory"]),
        ("skypilot", {"checkpoint": {"directory": "s3://bucket/ck"}}, {}, ["output"]),
    ],
)
def test_what_other_targets_would_lose_is_noted(
    target: str, job: dict[str, Any], changes: dict[str, Any], lost: list[str]
) -> None:
    assert noted(target, job, **changes) == lost


MODELS = "/opt/ml/input/data/models"  # FSx in `SETTINGS`


@pytest.mark.parametrize(
    ("nodes", "directory", "kept", "shown"),
    [
        (4, None, "s3://bucket/runs/shardwise/checkpoints", "s3://bucket/runs/shardwise/checkpoints"),
        (4, "ck", "s3://bucket/runs/shardwise/checkpoints", "s3://bucket/runs/shardwise/checkpoints"),
        (4, "/opt/ml/checkpoints", "s3://bucket/runs/shardwise/checkpoints", "s3://bucket/runs/shardwise/checkpoints"),
        (4, f"{MODELS}/ck", f"{MODELS}/ck", f"{MODELS}/ck"),
        (1, "ck", None, "s3://bucket/runs/shardwise/checkpoints"),
        (1, "/opt/ml/checkpoints/x", "/opt/ml/checkpoints/x", "s3://bucket/runs/shardwise/checkpoints"),
        (1, "s3://mine/ck", "s3://mine/ck", "s3://mine/ck"),
    ],
)
def test_sagemaker_keeps_checkpoints_where_the_table_says(
    nodes: int, directory: str | None, kept: str | None, shown: str
) -> None:
    settings = SETTINGS["sagemaker"] | {"cluster": f"ml.p5.48xlarge:{nodes}"}
    job = {**JOB, "checkpoint": {"every": 5} | ({} if directory is None else {"directory": directory})}
    plan = plan_for_target(load_job({**job, "launch": settings}, environ={}), "sagemaker")
    assert plan.job.checkpoint.directory == kept
    assert {key: value for key, value, _ in plan.derived}["checkpoints"] == shown
    assert any("checkpoint.directory" in note for note in plan.notes) == (directory is not None and directory != kept)


@pytest.mark.parametrize(("output", "kept"), [("/opt/ml/runs", False), ("/opt/ml/model", True), (f"{MODELS}/x", True)])
def test_sagemaker_gets_an_output_that_it_keeps(output: str, kept: bool) -> None:
    plan = plan_for_target(
        load_job({**JOB, "output": output, "launch": SETTINGS["sagemaker"]}, environ={}), "sagemaker"
    )
    assert ("output" in plan.job.model_fields_set) == kept
    assert {key: value for key, value, _ in plan.derived}["output"] == (output if kept else "/opt/ml/output/data")


def test_sagemaker_s_retries_are_shown_as_it_takes_them() -> None:
    job = {**JOB, "parallel": {"max_restarts": 50}, "launch": SETTINGS["sagemaker"]}
    plan = plan_for_target(load_job(job, environ={}), "sagemaker")
    assert {key: value for key, value, _ in plan.derived}["MaximumRetryAttempts"] == "30"


def test_this_machine_restarts_as_often_as_the_job_says() -> None:
    script = find_target("local").files(plan_of("local"), PLACE)["run.sh"]
    assert script.endswith(" --parallel.workers 2 --parallel.max_restarts 3\n")


@pytest.mark.parametrize("target", ["slurm", "skypilot", "ssh", "local"])
def test_setup_is_part_of_the_start(target: str, tmp_path: Path) -> None:
    """Each line acts in the shell that starts the ranks, on every node; one that fails ends it."""
    for last, code in ((":", 0), ("false", 7)):
        setup = ['export FROM_SETUP="it\'s"', 'echo "$UNSET"', f"{last} || exit 7"]
        files = find_target(target).files(plan_for_target(job_for(target, setup=setup, secrets=None), target), PLACE)
        script = next(text for name, text in files.items() if name in ("run.sh", "job.sbatch", "task.yaml"))
        script = yaml.safe_load(script)["run"] if target == "skypilot" else script
        for program, body in {
            "srun": 'env -u FROM_SETUP "${@:3}"', "shardwise": 'printf %s "$FROM_SETUP"', "scontrol": ""
        }.items():  # fmt: skip
            (tmp_path / program).write_text(f"#!/bin/bash\n{body}\n")
            (tmp_path / program).chmod(0o755)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_CPUS_ON_NODE": "1", "SHARDWISE_PYTHON": "shardwise"}
        ended = subprocess.run(["bash", "-c", script, "run", "0"], capture_output=True, text=True, env=environ)
        assert (ended.returncode, ended.stdout.strip()) == (code, "" if code else "it's"), ended


def test_slurm_does_not_start_without_a_secret(tmp_path: Path) -> None:
    plan = plan_for_target(job_for("slurm", secrets={"WANDB_API_KEY": f"file:{tmp_path}/none"}, setup=None), "slurm")
    script = find_target("slurm").files(plan, PLACE)["job.sbatch"]
    ended = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert ended.returncode == 1 and "No such file" in ended.stderr and "srun" not in ended.stderr


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        ("slurm", {"least_nodes": 2}, r"launch\.least_nodes=2 does nothing on slurm"),
        ("ssh", {"least_nodes": 3}, r"launch\.least_nodes=3, .*has 2 node\(s\), which must be between them"),
        ("pytorchjob", {"most_nodes": 8}, r"launch\.most_nodes=8 is read beside launch\.least_nodes alone"),
        ("hyperpod", {"least_nodes": 1, "most_nodes": 3}, r"has 4 node\(s\), which must be between them"),
        ("pytorchjob", {"least_nodes": 1, "cluster": "p5.48xlarge:1"}, ""),
    ],
)
def test_numbers_of_nodes_that_cannot_be_are_refused(target: str, changes: dict[str, Any], message: str) -> None:
    if message:
        with pytest.raises(ConfigError, match=message):
            plan_for_target(job_for(target, **changes), target)
        return
    job = load_job({**JOB, "parallel": {}, "launch": SETTINGS[target] | changes}, environ={})
    with pytest.raises(ConfigError, match=r"parallel\.max_restarts=0 ends the job with the first pod"):
        plan_for_target(job, target)


def test_an_elastic_launch_keeps_its_batch_and_fits_every_number_of_nodes() -> None:
    training = {"steps": 10, "microbatch_size": 2, "gradient_accumulation": 3}
    settings = SETTINGS["ssh"] | {"least_nodes": 1}
    plan = plan_for_target(load_job({**JOB, "training": training, "launch": settings}, environ={}), "ssh")
    assert (plan.job.training.sequences_per_step, plan.job.training.gradient_accumulation) == (48, None)
    script = find_target("ssh").files(plan, Path("out"))["run.sh"]
    assert "PET_NNODES=1:2" in script and script.endswith("--parallel.max_restarts 3\n")
    parallel = {"pipeline_parallel_degree": 16}
    job = load_job({**JOB, "parallel": parallel, "launch": settings}, environ={})
    with pytest.raises(LegalityError, match=r"with 1 node\(s\), 8 ranks: .*pipeline_parallel_degree=16"):
        plan_for_target(job, "ssh")


def test_hyperpod_watches_the_lines_that_a_run_prints(written: dict[str, dict[str, str]]) -> None:
    rule = manifest_of(written["hyperpod"])["spec"]["runPolicy"]["logMonitoringConfiguration"][0]
    line = "step 12/1000  loss 3.1234  norm 1.2  lr 3.00e-04  tokens/s 1,234  memory/rank 1.0 GiB  5 min left"
    assert re.fullmatch(rule["logPattern"], f"[pod-0] {line}")
    assert not re.fullmatch(rule["logPattern"], "loading the model")
    assert rule["expectedRecurringFrequencyInSeconds"] == 600
