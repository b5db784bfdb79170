"""Submits through clients that only note what they are asked: once, nothing left behind, failures by name."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.commands.cli import main
from shardwise.errors import LaunchError, OutputError
from shardwise.launch import jobs
from shardwise.launch.client import HalfSubmittedError
from shardwise.launch.launcher import launch, submit_record
from shardwise.launch.record import LaunchRecord, read_record
from shardwise.launch.targets import ssh
from shardwise.launch.targets.local import SCRIPT, LocalTarget
from tests.launch.targets.conftest import FakeClients
from tests.launch.targets.jobs_for_launch import job_for, launch_of_tutorial
from tests.sagemaker.made_service import MadeSession, ServiceRefusal

CONDITIONS = {
    "status": {
        "conditions": [
            {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-01-01T00:00:02Z"},
            {"type": "Running", "status": "True", "reason": "Started", "lastTransitionTime": "2026-01-01T00:00:01Z"},
        ]
    }
}
KUBECTL = "kubectl --namespace team-a"


def test_kubectl_submits_once_and_finds_the_job_again(clients: FakeClients, tmp_path: Path) -> None:
    clients.add(
        "kubectl", f"""case "$*" in *" get "*) echo '{json.dumps(CONDITIONS)}';; *" logs "*) echo hello;; esac"""
    )
    out = tmp_path / "out"
    launched = launch(job_for("jobset"), "jobset", out, submit=True, default_name="llama")
    assert launched.identifier == "jobsets.jobset.x-k8s.io/llama"
    assert clients.calls() == [
        f"{KUBECTL} auth can-i create jobsets.jobset.x-k8s.io",
        f"{KUBECTL} create -f {out}/configmap.yaml",
        f"{KUBECTL} create -f {out}/manifest.yaml",
    ]
    with pytest.raises(
        LaunchError, match=r"was submitted as jobsets\.jobset\.x-k8s\.io/llama; nothing is submitted twice"
    ):
        launch(job_for("jobset"), "jobset", out, submit=True, default_name="llama")
    assert all("create -f" not in call for call in clients.calls())
    assert jobs.job_status(out) == "Running (Started)"
    assert jobs.job_logs(out) == "hello\n"
    assert jobs.stop_job(out) == "stopped jobsets.jobset.x-k8s.io/llama"
    assert clients.calls()[-2:] == [
        f"{KUBECTL} delete jobsets.jobset.x-k8s.io llama --wait=false",
        f"{KUBECTL} delete configmap llama-job --ignore-not-found",
    ]


def test_a_refused_object_leaves_nothing_and_may_be_tried_again(clients: FakeClients, tmp_path: Path) -> None:
    clients.add(
        "kubectl", """case "$*" in *"create -f"*manifest*) echo 'denied: hf_%s' >&2; exit 1;; esac""" % ("a" * 30)
    )
    with pytest.raises(LaunchError, match=r"exit code 1: denied: \(secret\)"):
        launch(job_for("trainjob"), "trainjob", tmp_path / "out", submit=True)
    assert clients.calls()[-1].endswith(f"delete -f {tmp_path}/out/configmap.yaml")
    assert read_record(tmp_path / "out").state == "written"
    clients.add("kubectl")
    assert submit_record(read_record(tmp_path / "out")) == "trainjobs.trainer.kubeflow.org/shardwise"


def test_a_submit_that_fails_half_way_is_not_done_again(clients: FakeClients, tmp_path: Path) -> None:
    clients.add("kubectl", """case "$*" in *"create -f"*manifest*|*delete*) exit 1;; esac""")
    with pytest.raises(HalfSubmittedError, match="its ConfigMap shardwise-job is still there"):
        launch(job_for("pytorchjob"), "pytorchjob", tmp_path / "out", submit=True)
    clients.add("kubectl", "echo '{}'")
    with pytest.raises(LaunchError, match="has a submit whose end is not known; nothing is submitted twice"):
        submit_record(read_record(tmp_path / "out"))
    assert jobs.job_status(tmp_path / "out") == "Created"


def test_missing_clients_and_rights_are_named_before_anything_is_submitted(
    clients: FakeClients, tmp_path: Path
) -> None:
    for target, program in (("jobset", "kubectl"), ("slurm", "sbatch"), ("skypilot", "sky"), ("ssh", "ssh")):
        with pytest.raises(LaunchError, match=f"{program} is not installed here, so nothing was submitted"):
            launch(job_for(target), target, tmp_path / target, submit=True)
        assert read_record(tmp_path / target).state == "written"
    clients.add("kubectl", "echo no; exit 1")
    with pytest.raises(LaunchError, match=r"may not create jobsets.jobset.x-k8s.io here.* exit code 1: no"):
        submit_record(read_record(tmp_path / "jobset"))
    clients.add("sky", "echo 'No cloud is enabled'; exit 1")
    with pytest.raises(LaunchError, match=r"sky has no cloud to use, so nothing was submitted.*No cloud is enabled"):
        submit_record(read_record(tmp_path / "skypilot"))
    assert not any("create -f" in call or "launch" in call for call in clients.calls())


def test_sbatch_squeue_and_scancel(clients: FakeClients, tmp_path: Path) -> None:
    clients.add("sbatch", "echo '17;east'")
    clients.add("squeue", "exit 1")
    clients.add("sacct", "echo COMPLETED")
    clients.add("scancel")
    out = tmp_path / "out"
    assert launch(job_for("slurm"), "slurm", out, submit=True, default_name="llama").identifier == "17;east"
    assert jobs.job_status(out) == "COMPLETED"
    (out / "llama-17.out").write_text("step 1/2\n")
    assert jobs.job_logs(out) == "step 1/2\n"
    jobs.stop_job(out)
    calls = clients.calls()
    assert calls[0] == f"sbatch --parsable {out}/job.sbatch"
    assert calls[-1] == "scancel --clusters east 17"


def test_sky_gets_secrets_by_name(clients: FakeClients, tmp_path: Path) -> None:
    clients.add("sky", """case "$*" in *queue*) echo '1 llama RUNNING';; esac""")
    out = tmp_path / "out"
    launch(job_for("skypilot"), "skypilot", out, submit=True, default_name="llama")
    assert clients.calls() == [
        "sky check",
        f"sky jobs launch --name llama --secret WANDB_API_KEY --yes --detach-run {out}/task.yaml",
    ]
    assert jobs.job_status(out) == "1 llama RUNNING"


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.05)


REMOTE_HOME = """export HOME="$HOMES/$5"; shift 5; cd "$HOME" && sh -c "$*" """


def test_ssh_starts_hosts_in_order_and_stops_them_where_one_fails(
    clients: FakeClients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMES", str(tmp_path))
    for host in ("me@host1", "me@host2"):
        (tmp_path / host).mkdir()
    clients.add("ssh", REMOTE_HOME)
    clients.add("shardwise", 'echo "$PET_NODE_RANK of $PET_NNODES at $PET_MASTER_ADDR"')
    out = tmp_path / "out"
    job = job_for("ssh", setup=None)
    assert launch(job, "ssh", out, submit=True).identifier == "shardwise on me@host1, me@host2"
    logs = [tmp_path / f"me@host{place + 1}/shardwise-jobs/shardwise/log-{place}.txt" for place in range(2)]
    wait_until(lambda: all(log.exists() and log.read_text() for log in logs))
    assert [log.read_text() for log in logs] == ["0 of 2 at host1\n", "1 of 2 at host1\n"]
    assert jobs.job_logs(out) == "me@host1 | 0 of 2 at host1\nme@host2 | 1 of 2 at host1\n"
    assert "host1: " in jobs.job_status(out)
    with pytest.raises(LaunchError, match="has a directory ~/shardwise-jobs/shardwise already"):
        launch(job, "ssh", tmp_path / "second", submit=True)

    late = f"while [ ! -e {tmp_path}/process ]; do sleep 0.05; done; exit 255"
    clients.add("ssh", f'case "$*" in *host2*setsid*) {late};; esac\n' + REMOTE_HOME)
    clients.add("shardwise", f"echo $$ > {tmp_path}/process; exec sleep 30")
    with pytest.raises(LaunchError, match="exit code 255"):
        launch(job_for("ssh", setup=None, name="third"), "ssh", tmp_path / "third-out", submit=True)
    process = (tmp_path / "process").read_text().strip()
    wait_until(lambda: not os.path.exists(f"/proc/{process}"))
    assert not (tmp_path / "me@host1" / "shardwise-jobs" / "third").exists()
    assert read_record(tmp_path / "third-out").state == "written"


def run_script(
    clients: FakeClients, tmp_path: Path, step: str, restarts: str = "0", told: str = ""
) -> tuple[int, list[str]]:
    """Run the batch script with a step of its own, as Slurm would; return its code and what it asked for."""
    out = tmp_path / f"out{restarts}{len(step)}"
    launch(job_for("slurm", setup=None, secrets=None), "slurm", out)
    clients.add("srun", step)
    clients.add("scontrol")
    clients.add("scancel", told or f'kill -USR1 "$(cat {tmp_path}/step)"')
    variables = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restarts, "SLURM_CPUS_ON_NODE": "4"}
    ended = subprocess.run(["bash", str(out / "job.sbatch")], env=variables, timeout=60, check=False)
    return ended.returncode, [call for call in clients.calls() if not call.startswith("srun")]


@pytest.mark.parametrize(
    "code, restarts, is_requeued",
    [(0, "0", False), (2, "0", False), (138, "0", True), (200, "0", True), (143, "2", True), (137, "3", False)],
)
def test_a_batch_script_requeues_what_may_do_better(
    clients: FakeClients, tmp_path: Path, code: int, restarts: str, is_requeued: bool
) -> None:
    ended, calls = run_script(clients, tmp_path, f"exit {code}", restarts)
    assert (ended, calls) == (code, ["scontrol requeue 7"] if is_requeued else [])


def test_a_batch_script_passes_slurms_signal_to_the_step(clients: FakeClients, tmp_path: Path) -> None:
    """The batch shell alone gets USR1; the step saves and ends with the code of a planned stop."""
    step = (
        f'echo $BASHPID > {tmp_path}/step; trap "exit 143" USR1; kill -USR1 $PPID; '
        "for _ in {1..400}; do sleep 0.05; done; exit 9"
    )
    ended, calls = run_script(clients, tmp_path, step)
    assert (ended, calls) == (143, ["scancel --signal=USR1 7", "scontrol requeue 7"])


def test_a_step_that_ends_while_it_is_told_keeps_its_code(clients: FakeClients, tmp_path: Path) -> None:
    """It was taken for one that the signal has killed, and put back into the queue."""
    step = (
        f'echo $BASHPID > {tmp_path}/step; trap "exit 0" USR1; kill -USR1 $PPID; '
        "for _ in {1..400}; do sleep 0.05; done; exit 9"
    )
    told = f"kill -USR1 $(cat {tmp_path}/step); while kill -0 $(cat {tmp_path}/step); do sleep 0.05; done"
    assert run_script(clients, tmp_path, step, told=told) == (0, ["scancel --signal=USR1 7"])


def test_directories_that_hold_no_launch_are_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="holds no launch, nor do the directories in it"):
        jobs.launch_table(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(OutputError, match=r"holds no launch; give a directory .* Did you mean .*runs'"):
        jobs.job_status(tmp_path / "run")
    launch(job_for("slurm"), "slurm", tmp_path / "runs")
    assert jobs.launch_table(tmp_path).row_count == 1
    for name, text in {"torn": "{", "other": "[]", "half": '{"target": "local"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "launch.json").write_text(text)
    table = jobs.launch_table(tmp_path)
    states = list(table.columns[-1].cells)
    assert len(states) == 4 and sum("cannot be read" in str(state) for state in states) == 3
    assert jobs.job_status(tmp_path / "runs") == "written, not submitted"
    with pytest.raises(LaunchError, match="was not submitted"):
        jobs.stop_job(tmp_path / "runs")
    (tmp_path / "runs" / "launch.json").write_text("{}")
    with pytest.raises(OutputError, match="cannot be read"):
        jobs.job_status(tmp_path / "runs")


def made_boto3(monkeypatch: pytest.MonkeyPatch, session: MadeSession) -> None:
    """Let boto3's sessions be one that answers out of this process."""

    def session_in(region_name: str) -> MadeSession:
        session.region = region_name
        return session

    monkeypatch.setitem(sys.modules, "boto3", SimpleNamespace(Session=session_in))  # type: ignore[arg-type]


def test_sagemaker_is_asked_in_its_region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = [
        {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Downloading"},
        {"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed", "FailureReason": "no capacity"},
    ]
    session = MadeSession(states=states)
    session.log = {"llama/algo-1-16": [["step 1"]]}
    made_boto3(monkeypatch, session)
    out, job = tmp_path / "out", job_for("sagemaker", region="eu-west-1")
    launched = launch(job, "sagemaker", out, submit=True, default_name="llama")
    assert launched.identifier == "arn:aws:sagemaker:eu-west-1:123456789012:training-job/llama"
    assert session.objects == {("bucket", "runs/llama/job/job.yaml"): (out / "job.yaml").read_bytes()}
    assert session.requests["llama"] == json.loads((out / "request.json").read_text())
    assert jobs.job_status(out) == "InProgress  Downloading"
    assert jobs.job_status(out) == "Failed  no capacity"  # a word is said once
    assert jobs.job_logs(out) == "algo-1 | step 1\n"
    jobs.stop_job(out)
    assert session.stopped == ["llama"]
    with pytest.raises(LaunchError, match=r"has a training job llama already \(Failed\); give another launch.name"):
        launch(job, "sagemaker", tmp_path / "second", submit=True, default_name="llama")


def test_sagemaker_s_refusals_are_those_of_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session = MadeSession()
    made_boto3(monkeypatch, session)

    def refuse(**_: object) -> None:
        raise ServiceRefusal("the quota is used up")

    job = job_for("sagemaker", region="us-east-1")
    monkeypatch.setattr(session, "create_training_job", refuse)
    with pytest.raises(LaunchError, match="training job llama: ServiceRefusal: the quota is used up"):
        launch(job, "sagemaker", tmp_path / "out", submit=True, default_name="llama")
    monkeypatch.setattr(session, "get_caller_identity", refuse)
    with pytest.raises(LaunchError, match="AWS does not know who is asking, so nothing was submitted: ServiceRefusal"):
        launch(job, "sagemaker", tmp_path / "next", submit=True, default_name="llama")
    monkeypatch.setitem(sys.modules, "boto3", None)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="pip install"):
        launch(job, "sagemaker", tmp_path / "last", submit=True, default_name="llama")


@pytest.fixture
def local_record(tmp_path: Path) -> Iterator[LaunchRecord]:
    """A launch on this machine whose script says so and waits; its process is gone afterwards."""
    (tmp_path / SCRIPT).write_text('echo "with $SHARDWISE_PYTHON"; exec sleep 600\n')
    written = LaunchRecord(tmp_path, "local", "run")
    record = replace(written, identifier=LocalTarget().submit(written))
    yield record
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        pid = int(record.identifier.partition("@")[0])
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_script_of_this_machine_is_known_by_process_and_start(local_record: LaunchRecord) -> None:
    target = LocalTarget()
    wait_until(lambda: bool(target.logs(local_record)))
    assert target.logs(local_record) == f"with {sys.executable}\n"
    assert target.status(local_record) == "running"
    pid, _, started = local_record.identifier.partition("@")
    later = replace(local_record, identifier=f"{pid}@{float(started) + 60}")  # the number was given to another
    assert target.status(later) == "ended"
    target.stop(local_record)
    wait_until(lambda: target.status(local_record) == "ended")
    with pytest.raises(LaunchError, match="run has ended already; there is nothing to stop"):
        target.stop(local_record)
    assert target.status(replace(local_record, identifier="")) == "ended"


def test_a_process_is_not_stopped_for_its_number(tmp_path: Path) -> None:
    """What a shell on a host is told: the number of a process that has ended may be another one's by now."""
    (tmp_path / "job").mkdir()
    for is_other in (True, False):
        with subprocess.Popen(["sleep", "600"]) as process:
            subprocess.run(["sh", "-c", ssh._note(str(process.pid), 0)], cwd=tmp_path / "job", check=True)
            if is_other:
                (tmp_path / "job" / ssh._process(0)).write_text(f"{process.pid} 1")
            runs = subprocess.run(["sh", "-c", ssh._runs("job", 0)], cwd=tmp_path)
            subprocess.run(["sh", "-c", ssh._stop("job", 0)], cwd=tmp_path, check=True)
            if is_other:
                assert process.poll() is None and runs.returncode == 1
                process.terminate()
            else:
                assert process.wait(30) == -signal.SIGTERM and runs.returncode == 0
    for text in (f"{process.pid} ", f"{process.pid} 1"):  # it has ended; or had before it was looked at
        (tmp_path / "job" / ssh._process(0)).write_text(text)
        assert subprocess.run(["sh", "-c", ssh._runs("job", 0)], cwd=tmp_path, capture_output=True).returncode
    subprocess.run(["sh", "-c", ssh._stop("none", 0)], cwd=tmp_path, check=True, capture_output=True)


def test_ssh_finds_job_and_process_wherever_setup_goes(
    clients: FakeClients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes no notice of what a host's start-up files print; a log may hold bytes that are no text."""
    monkeypatch.setenv("HOMES", str(tmp_path))
    (tmp_path / "host1").mkdir()
    clients.add("ssh", "echo welcome\n" + REMOTE_HOME)
    clients.add("shardwise", r"""cat "$2" > /dev/null && printf 'began \377\n' && exec sleep 600""")
    out = tmp_path / "out"
    launch(job_for("ssh", setup=["cd /"], cluster="cpu:2", hosts=["host1"], secrets=None), "ssh", out, submit=True)
    wait_until(lambda: "began" in jobs.job_logs(out))
    assert "began \ufffd" in jobs.job_logs(out) and jobs.job_status(out).endswith("running")
    jobs.stop_job(out)
    wait_until(lambda: jobs.job_status(out).endswith("ended"))


def test_of_conditions_of_one_second_the_last_is_the_state(clients: FakeClients, tmp_path: Path) -> None:
    conditions = [
        {"type": kind, "status": "True", "reason": "x", "lastTransitionTime": "2026-01-01T00:00:02Z"}
        for kind in ("Created", "Failed")
    ]
    told = json.dumps({"status": {"conditions": conditions}})
    clients.add("kubectl", f"""case "$*" in *" get "*) echo '{told}';; esac""")
    launch(job_for("jobset"), "jobset", tmp_path / "out", submit=True)
    assert jobs.job_status(tmp_path / "out") == "Failed (x)"


@pytest.mark.slow
def test_sagemaker_gets_the_job_file_and_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from moto import mock_aws

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
        out = tmp_path / "out"
        job = job_for("sagemaker", region="us-east-1")
        launched = launch(job, "sagemaker", out, submit=True, default_name="llama")
        assert launched.identifier.endswith("training-job/llama")
        stored = boto3.client("s3", region_name="us-east-1").get_object(Bucket="bucket", Key="runs/llama/job/job.yaml")
        assert stored["Body"].read() == (out / "job.yaml").read_bytes()
        assert jobs.job_status(out)
        with pytest.raises(LaunchError, match="has a training job llama already"):
            launch(job, "sagemaker", tmp_path / "second", submit=True, default_name="llama")


@pytest.mark.slow
def test_the_tutorial_s_job_is_a_request_to_sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3
    from moto import mock_aws

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.chdir(tmp_path)
    words = launch_of_tutorial("sagemaker", tmp_path)
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="bucket")
        assert main(words) == 0
        request = json.loads((tmp_path / "job-sagemaker" / "request.json").read_text())
        described = boto3.client("sagemaker", region_name="us-east-1").describe_training_job(TrainingJobName="job")
        assert described["ResourceConfig"]["InstanceCount"] == 2
        assert described["AlgorithmSpecification"]["TrainingImage"] == "registry/shardwise"
        assert described["InputDataConfig"] == request["InputDataConfig"]
        assert jobs.job_status(tmp_path / "job-sagemaker")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_local_launch_runs_is_seen_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way on this machine: write, start, list, read, stop with the state saved."""
    from shardwise.job.sources import load_job

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = load_job({
        "training": {"steps": 100_000, "tokens_per_step": 512}, "data": {"sequence_length": 64, "max_documents": 20},
        "observe": {"sample": False}, "launch": {"cluster": "cpu:1"}, "output": str(tmp_path / "run"),
    }, environ={})  # fmt: skip
    out = tmp_path / "out"
    pid = int(launch(job, "local", out, submit=True).identifier.partition("@")[0])
    try:
        deadline = time.monotonic() + 200
        while "step 2/" not in jobs.job_logs(out) and time.monotonic() < deadline:
            assert jobs.job_status(out) == "running", jobs.job_logs(out)
            time.sleep(0.5)
        jobs.stop_job(out)
        deadline = time.monotonic() + 200
        while jobs.job_status(out) == "running" and time.monotonic() < deadline:
            time.sleep(0.5)
        assert "stopped after step" in jobs.job_logs(out) or "SIGTERM" in jobs.job_logs(out)
    finally:
        if os.path.exists(f"/proc/{pid}"):
            os.killpg(pid, signal.SIGKILL)
    assert jobs.job_status(out) == "ended"
    with pytest.raises(LaunchError, match="has ended already"):
        jobs.stop_job(out)
