"""Four containers of a training job, each a host of its own with `/opt/ml` laid out, started as the service does it.

Network namespaces stand for the containers' network; `/opt` of each is bound to a directory. Needs root.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.cluster import obstacle
from shardwise.observe.log_patterns import METRIC_PATTERNS
from shardwise.sagemaker.container import find_container
from tests.launch.named_hosts import ROOT, NamedHosts
from tests.sagemaker.layouts import lay_out

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be hosts"),
    pytest.mark.timeout(1200),
]
NAMES = ("algo-2", "algo-10", "algo-1", "algo-3")  # in the service's order, which is any
SHARED = "/opt/ml/input/data/shared"  # a channel that is a file system of all hosts
ROWS = "all work and no play makes jack a dull boy\n" * 300
JOB = f"""
model: {{config: {{model_type: gpt2, n_layer: 2, n_embd: 16, n_head: 2, n_positions: 32}}}}
training: {{steps: 4, sequences_per_step: 8, evaluate_batches: 1}}
data: {{path: /opt/ml/input/data/train, sequence_length: 16, vocabulary_size: 300}}
observe: {{tensorboard: false, sample: false}}
checkpoint: {{every: 2, directory: {SHARED}/checkpoints}}
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[NamedHosts]:
    """Four hosts whose containers are laid out."""
    made = NamedHosts(tmp_path, NAMES)
    (tmp_path / "shared").mkdir()
    for name in NAMES:
        base = container(tmp_path, name)
        one_rank = {"sagemaker_mpi_num_of_processes_per_host": 1}
        lay_out(base, one_rank, ("job", "train", "shared"), hosts=list(NAMES), current_host=name)
        (base / "input" / "data" / "job" / "job.yaml").write_text(JOB)
        (base / "input" / "data" / "train" / "rows.txt").write_text(
            "all work and no play makes jack a dull boy\n" * 300
        )
        for place in ("model", "output/data"):
            (base / place).mkdir(parents=True)
    try:
        made.build()
        yield made
    finally:
        made.tear_down()


def container(directory: Path, name: str) -> Path:
    """Return what is `/opt/ml` on a host."""
    return directory / name / "ml"


def binds_of(directory: Path, name: str) -> dict[str, Path]:
    """Return what a host has at other places."""
    return {"/opt": directory / name, SHARED: directory / "shared"}


def variables_of(directory: Path, name: str) -> dict[str, str]:
    """Return the variables of a host's processes."""
    return {
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}/opt/ml/input/data/job",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "XDG_CACHE_HOME": str(directory / f"cache-{name}"),
        "TRAINING_JOB_NAME": "four",
    }


TRAIN = ["-m", "shardwise", "train"]


def toolkits_torchrun(rank: int) -> tuple[list[str], dict[str, str]]:
    """Return how the training toolkit's torchrun starts the rank of a host."""
    where = ["--master_addr", "algo-1", "--master_port", "7777", "--node_rank", str(rank)]
    return ["-m", "torch.distributed.run", "--nnodes", "4", "--nproc_per_node", "1", *where, *TRAIN], {}


def mpirun(rank: int) -> tuple[list[str], dict[str, str]]:
    """Return the command of a rank, and what mpirun leaves in its environment."""
    place = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    return TRAIN, {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in place.items()}


STARTS: dict[str, Callable[[int], tuple[list[str], dict[str, str]]]] = {
    "shardwise train": lambda rank: (TRAIN, {}),
    "torchrun": toolkits_torchrun,
    "mpirun": mpirun,
}


MPI_OPTIONS = """--allow-run-as-root --display-map --tag-output -mca btl_tcp_if_include eth0
    -mca oob_tcp_if_include eth0 -mca plm_rsh_no_tree_spawn 1 -bind-to none -map-by slot -mca pml ob1 -mca btl ^openib
    -mca orte_abort_on_non_zero_status 1 -mca btl_vader_single_copy_mechanism none -x NCCL_MIN_NRINGS=4"""


def run_by_mpirun(hosts: NamedHosts, wrapper: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Start the ranks as the training toolkit does: from the first host, whose variables the others get too."""
    directory, base = hosts.directory, container(hosts.directory, "algo-1")
    laid_out = find_container({"SAGEMAKER_BASE_DIR": str(base)})
    assert laid_out is not None
    inside = {name: text.replace(str(base), "/opt/ml") for name, text in laid_out.variables().items()}
    variables = variables_of(directory, "algo-1") | inside
    if spec := importlib.util.find_spec("mpi4py"):  # which may lie in a place of its own
        variables["PYTHONPATH"] += os.pathsep + str(Path(str(spec.origin)).parents[1])
    agent = directory / "rsh"  # in the place of sshd: what is to run on a host
    cases = "".join(
        f'  {name}) exec {shlex.join(hosts.inside(host, ["sh", "-c"], binds_of(directory, name)))} "$*";;\n'
        for host, name in enumerate(NAMES)
    )
    agent.write_text(f'#!/bin/sh\nname="$1"; shift\ncase "$name" in\n{cases}esac\n')
    agent.chmod(0o755)
    names = ",".join(f"{name}:1" for name in sorted(NAMES))
    kept = [word for name in (*variables, "PATH") for word in ("-x", name)]
    options = ["-mca", "plm_rsh_agent", str(agent), *MPI_OPTIONS.split(), *kept]
    command = ["mpirun", "--host", names, "-np", "4", *options, sys.executable, *wrapper, *TRAIN]
    words = hosts.inside(NAMES.index("algo-1"), command, binds_of(directory, "algo-1"))
    environment = os.environ | variables
    return subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(shutil.which("ompi_info") is None, reason="Open MPI's mpirun is not installed (openmpi-bin)")
@pytest.mark.parametrize("wrapper", [[], ["-m", "mpi4py"]], ids=["python", "mpi4py"])
def test_a_real_mpirun_starts_the_ranks_of_four_containers(
    hosts: NamedHosts, tmp_path: Path, wrapper: list[str]
) -> None:
    if wrapper:
        pytest.importorskip("mpi4py", reason="the toolkit starts scripts by mpi4py, which is not installed")
    done = run_by_mpirun(hosts, wrapper)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 cpu ranks" in done.stdout and "step 4/4" in done.stdout
    assert "config.json" in [path.name for path in (container(tmp_path, "algo-1") / "model").iterdir()]
    assert not any((container(tmp_path, name) / "output" / "failure").exists() for name in NAMES)


def run(hosts: NamedHosts, start: str = "shardwise train") -> dict[str, tuple[int, str]]:
    """Start every container; return exit code and output by host."""
    directory, started = hosts.directory, {}
    for host, name in enumerate(NAMES):
        command, of_start = STARTS[start](sorted(NAMES).index(name))
        words = hosts.inside(host, [sys.executable, *command], binds_of(directory, name))
        variables = os.environ | variables_of(directory, name) | of_start
        started[name] = subprocess.Popen(
            words, env=variables, cwd=directory / name, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    printed = {name: process.communicate(timeout=900)[0] for name, process in started.items()}
    return {name: (process.returncode, printed[name]) for name, process in started.items()}


def test_four_containers_train_and_leave_what_the_service_takes(hosts: NamedHosts, tmp_path: Path) -> None:
    ended = run(hosts)
    assert [code for code, _ in ended.values()] == [0] * 4, ended
    first = ended["algo-1"][1]  # as words are sorted, its rank is 0
    assert "4 cpu ranks" in first and not any("step 4/4" in ended[name][1] for name in NAMES if name != "algo-1")
    for metric in ("train:loss", "validation:loss", "train:tokens_per_second"):
        values = re.findall(METRIC_PATTERNS[metric], first)
        assert values and all(float(value) > 0 for value in values), metric
    kept = {name: sorted(path.name for path in (container(tmp_path, name) / "model").iterdir()) for name in NAMES}
    assert "config.json" in kept.pop("algo-1") and not any(kept.values())
    assert (tmp_path / "shared" / "checkpoints" / "step-00000004").is_dir()
    assert not any((container(tmp_path, name) / "output" / "failure").exists() for name in NAMES)
    records = (container(tmp_path, "algo-1") / "output" / "data" / "metrics.jsonl").read_text().splitlines()
    assert [record["step"] for record in map(json.loads, records) if "loss" in record] == [1, 2, 3, 4]


FAILING = """
import os

import shardwise


class Failing(shardwise.Callback):
    def on_step_end(self, session, record):
        if record["step"] == 2 and os.environ["SM_CURRENT_HOST"] == "algo-3":
            raise RuntimeError("the disk of algo-3 is full")
"""


@pytest.mark.parametrize("start", STARTS)
def test_each_of_four_containers_says_why_one_has_failed(hosts: NamedHosts, tmp_path: Path, start: str) -> None:
    """Whoever starts the ranks: the service shows the file of any container, and all of them name the rank."""
    for name in NAMES:
        job = container(tmp_path, name) / "input" / "data" / "job"
        (job / "failing.py").write_text(FAILING)
        (job / "job.yaml").write_text(JOB.replace("steps: 4", "steps: 40, callbacks: ['failing:Failing']"))
    ended = run(hosts, start)
    assert all(code != 0 for code, _ in ended.values()), ended
    for name in NAMES:
        failure = (container(tmp_path, name) / "output" / "failure").read_text()
        assert "the disk of algo-3 is full" in failure and "failing.py" in failure, (name, failure)
        assert name == "algo-3" or "rank 3" in failure, (name, failure)
        assert not any((container(tmp_path, name) / "model").iterdir())
