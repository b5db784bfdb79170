"""The command line: what reaches the commands, and that a mistake is one message and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from shardwise import __version__
from shardwise.commands.cli import COMMANDS, main
from shardwise.errors import DataError, OutputError, WorkerError
from shardwise.errors.exit_codes import FAULT, STOPPED
from shardwise.job.keys import leaf_keys
from shardwise.job.schema import Job
from shardwise.plan.plan import resolve
from tests.plan.rules.jobs import CPU4, FACTS
from tests.sagemaker.layouts import lay_out

Calls = list[tuple[str, Job, dict[str, Any]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """The commands' work replaced: what they were called with."""
    monkeypatch.delenv("SM_HP_MP_PARAMETERS", raising=False)
    made: Calls = []
    entry: Any = ModuleType("shardwise.commands.train")
    entry.train = lambda job, notes=(): made.append(("train", job, {"notes": notes})) or SimpleNamespace(stopped=None)
    entry.plan_with_facts = lambda job: (resolve(job, CPU4, FACTS), FACTS)
    verify: Any = ModuleType("shardwise.commands.verify")

    def run_verify(job: Job, **options: Any) -> int:
        made.append(("verify", job, options))
        return 0

    verify.run_verify = run_verify
    import shardwise.commands

    monkeypatch.setattr(shardwise.commands, "train", entry, raising=False)
    monkeypatch.setitem(sys.modules, "shardwise.commands.train", entry)
    monkeypatch.setitem(sys.modules, "shardwise.commands.verify", verify)
    yield made


def test_train_alone_runs_the_default_job(calls: Calls) -> None:
    assert main(["train"]) == 0
    assert calls == [("train", Job(), {"notes": ()})]


def test_train_takes_a_file_keys_and_its_own_options(calls: Calls, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("training: {steps: 5, seed: 3}\n")
    words = ["train", str(file), "--training.steps", "30", "--model.compile", "--profile", "10,12", "--output", "there"]
    assert main(words) == 0
    job = calls[0][1]
    assert (job.training.steps, job.training.seed, job.model.compile) == (30, 3, True)
    assert (job.observe.profile, job.output) == ([10, 12], "there")


def test_keys_may_stand_before_the_job(calls: Calls, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("training: {seed: 3}\n")
    assert main(["train", "--model.compile", "--training.steps=3", str(file), "--output=x.y"]) == 0
    job = calls[0][1]
    assert (job.training.steps, job.training.seed, job.model.compile, job.output) == (3, 3, True, "x.y")


def test_notes_of_smp_options_reach_the_run(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HP_MP_PARAMETERS", '{"sharded_data_parallel_degree": 2, "skip_tracing": true}')
    assert main(["train"]) == 0
    assert calls[0][1].parallel.sharded_data_parallel_degree == 2
    assert "skip_tracing=True has no effect here" in calls[0][2]["notes"][0]


def test_print_plan_shows_the_plan_and_trains_nothing(calls: Calls, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--print-plan", "--memory.offload_parameters"]) == 0
    shown = capsys.readouterr().out
    assert calls == []
    assert all(word in shown for word in ("microbatch", "accumulation", "sequences_per_step", "DPT", "gloo"))
    assert "note: memory.offload_parameters saves nothing on a CPU" in shown


def test_verify_hands_on_its_options(calls: Calls, tmp_path: Path) -> None:
    other = tmp_path / "plan.yaml"
    other.write_text("parallel: {sharded_data_parallel_degree: 1}\n")
    words = ["verify", "--blocks", "2", "--against", str(other), "--steps", "5", "--training.seed", "9"]
    assert main(words) == 0
    _, job, options = calls[0]
    assert (job.training.seed, options["blocks"], options["steps"]) == (9, 2, 5)
    assert options["against"].parallel.sharded_data_parallel_degree == 1
    assert options["against"].training.seed == 9
    assert main(["verify"]) == 0
    assert calls[1][2] == {"blocks": None, "against": None, "steps": 3}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["train", "--steps", "30"], "unknown option --steps. Did you mean 'training.steps'?"),
        (["train", "--workers=30"], "unknown option --workers=30. Did you mean 'parallel.workers'?"),
        (["train", "--print-plans"], "Did you mean '--print-plan'?"),
        (["train", "--training.step", "3"], "unknown key training.step. Did you mean 'training.steps'?"),
        (["train", "--training.steps"], "--training.steps needs a value, e.g. --training.steps=32"),
        (["train", "--parallel.pipeline"], "e.g. --parallel.pipeline=simple"),
        (["train", "--optimizer.learning_rate"], "e.g. --optimizer.learning_rate=0.0015"),
        (["train", "--optimizer.clip_norm"], "e.g. --optimizer.clip_norm=0.5"),
        (
            ["train", "--training.steps", "9" * 23],
            "training.steps=99999999999999999999999: must be less than",
        ),
        (
            ["train", "--training.seed", "9" * 23],
            "training.seed=99999999999999999999999: must be less than",
        ),
        (
            ["train", "--parallel.sequence_parallel", "maybe"],
            "parallel.sequence_parallel='maybe': must be a valid boolean",
        ),
        (
            ["train", "--training.steps", "3", "--training.steps=4"],
            "--training.steps is given twice, as 3 and as 4; keep",
        ),
        (["train", "--output", "a", "--output", "b"], "--output is given twice, as a and as b; keep one"),
        (["export", "a", "b", "--dtype", "fp16", "--dtype", "fp32"], "--dtype is given twice, as fp16 and as fp32"),
        (["doctor", "--model", "/no/such"], "--model='/no/such' does not exist"),
        (["doctor", "--model", "/proc"], "--model='/proc' holds no config.json"),
        (["doctor", "--model", "/proc", "--preflight"], "--model does nothing with --preflight"),
        (["train", "--training.steps", "few"], "training.steps='few': must be a valid integer"),
        (["train", "--output"], "expected one argument; see `shardwise train --help`"),
        (["train", "--profile", "a"], "observe.profile[0]='a': must be a valid integer"),
        (["train", "a.yaml", "b.yaml"], "unexpected 'b.yaml'"),
        (["train", "nowhere.yaml"], "job file 'nowhere.yaml' does not exist"),
        (["train", "--print-plan", "--parallel.sharded_data_parallel_degree", "3"], "4 data ranks; use 1, 2 or 4"),
        (["verify", "--blocks", "0"], "'0' is not a whole number from 1"),
        (["doctor", "--training.steps", "3"], "unknown option --training.steps"),
        (["export", "run"], "the following arguments are required: OUT; see `shardwise export --help`"),
        (["export", "run", "out", "--dtype", "fp8"], "argument --dtype: invalid choice: 'fp8'"),
        (["export", "run", "out", "more"], "unexpected 'more': export does not take so many words"),
        (["export", "run", "out", "--training.steps", "3"], "unknown option --training.steps"),
        (["checkpoint", "list", "run"], "invalid choice: 'list' (choose from 'ls', 'show', 'verify')"),
        (["checkpoint", "ls", "run", "--tensors"], "--tensors is an option of show, not of ls"),
        (["checkpoint", "verify", "run", "--json"], "--json is an option of ls and show, not of verify"),
        (["checkpoint", "ls", "no/where"], "no/where holds no checkpoints; give a checkpoint, the directory"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    calls: Calls, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error: ")
    assert says in output.err
    assert "Traceback" not in output.err
    assert output.out == ""
    assert calls == []


@pytest.mark.parametrize(
    ("raised", "code", "says"),
    [
        (WorkerError("rank 1 failed\n\n[rank 1] disk [full]"), FAULT, "error: rank 1 failed\n\n[rank 1] disk [full]\n"),
        (DataError("no such file " + "x" * 200), 2, "error: no such file " + "x" * 200 + "\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_errors_of_a_run(
    calls: Calls,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    code: int,
    says: str,
) -> None:
    def fail(job: Job, notes: tuple[str, ...]) -> None:
        raise raised

    monkeypatch.setattr(sys.modules["shardwise.commands.train"], "train", fail)
    assert main(["train"]) == code
    assert capsys.readouterr().err == says


@pytest.mark.parametrize(
    ("stopped", "code"),
    [
        ("SIGTERM received by rank 1; checkpoints/step-3 holds its state", STOPPED),
        ("no better validation loss than 2.0; checkpoints/step-3 holds its state", 0),
    ],
)
def test_a_stop_by_a_signal_has_a_code_of_its_own(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, stopped: str, code: int
) -> None:
    entry = sys.modules["shardwise.commands.train"]
    monkeypatch.setattr(entry, "train", lambda job, notes: SimpleNamespace(stopped=stopped))
    assert main(["train"]) == code


def test_a_job_of_a_container_has_its_keys_and_places(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shardwise train` alone, as SageMaker starts an image."""
    monkeypatch.chdir(tmp_path)  # and back, since the command goes to the job's directory
    monkeypatch.setattr(os, "environ", os.environ | {"SAGEMAKER_BASE_DIR": str(tmp_path)})
    lay_out(tmp_path, {"training.steps": 30, "training.seed": 1}, ("job",), hosts=["algo-1"], current_host="algo-1")
    (tmp_path / "input" / "data" / "job" / "job.yaml").write_text("training: {steps: 5, seed: 3, epochs: null}\n")
    assert main(["train", "--training.seed", "7"]) == 0
    job = calls[0][1]
    assert (job.training.steps, job.training.seed, job.output) == (30, 7, str(tmp_path / "output" / "data"))


def test_a_failure_in_a_container_is_left_for_the_service(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", os.environ | {"SAGEMAKER_BASE_DIR": str(tmp_path)})
    lay_out(tmp_path, {"steps": 30}, hosts=["algo-1"], current_host="algo-1")
    assert main(["train"]) == 2
    assert "hyperparameter steps=30 is no key of a job" in (tmp_path / "output" / "failure").read_text()


def test_export_reaches_its_function(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.checkpoint import export

    made: list[tuple[object, ...]] = []

    def fake(*words: object, say: Callable[[str], None]) -> Path:
        made.append(words)
        say("something of note")
        return Path("out")

    monkeypatch.setattr(export, "export_checkpoint", fake)
    assert main(["export", "s3://bucket/run", "out", "--dtype", "bf16"]) == 0
    assert main(["export", "run", "out"]) == 0
    assert made == [("s3://bucket/run", "out", "bf16"), ("run", "out", None)]
    shown = capsys.readouterr()
    assert shown.out == "exported to out\n" * 2 and shown.err == "note: something of note\n" * 2


@pytest.mark.parametrize(
    ("words", "function", "expected"),
    [
        (["ls", "run", "--json"], "inspect.run_ls", ("run", True)),
        (["show", "run", "--tensors"], "inspect.run_show", ("run", True, False)),
        (["verify", "memory://x"], "verification.verify_checkpoint", ("memory://x",)),
    ],
)
def test_checkpoint_reaches_its_functions(
    monkeypatch: pytest.MonkeyPatch, words: list[str], function: str, expected: tuple[object, ...]
) -> None:
    made: list[tuple[object, ...]] = []

    def fake(*given: object, **_: object) -> int:
        made.append(given)
        return 1

    monkeypatch.setattr(f"shardwise.checkpoint.{function}", fake)
    assert main(["checkpoint", *words]) == 1
    assert made == [expected]


def test_a_bug_is_not_hidden(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: Job, notes: tuple[str, ...]) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["shardwise.commands.train"], "train", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train"])


def _page(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main([*words])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_pages(capsys: pytest.CaptureFixture[str]) -> None:
    overview = _page(capsys, "--help")
    assert all(f"{name} " in overview and command.summary in overview for name, command in COMMANDS.items())
    train = _page(capsys, "train", "--help")
    assert all(key.rpartition(".")[2] in train for key in leaf_keys())
    assert "--against" in _page(capsys, "verify", "--help")
    for name in ("export", "checkpoint", "doctor"):
        page = _page(capsys, name, "--help")
        assert "keys of the job" not in page and max(map(len, page.splitlines())) <= 102
    assert max(len(line) for line in train.splitlines()) <= 100
    assert _page(capsys, "--version") == f"shardwise {__version__}\n"
    assert main([]) == 2
    assert capsys.readouterr().out == overview


INTERRUPTED_INSIDE_EXEC = """
import os, signal, sys
from shardwise import __main__
from shardwise.commands import cli
cli.run = lambda words: exec("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
sys.exit(__main__.run_process())
"""


def test_ctrl_c_is_one_line_and_exit_code_130() -> None:
    """Python itself would die of the signal where it came inside of an `exec`."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_INSIDE_EXEC], capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (130, "error: interrupted\n", "")


def test_help_and_mistakes_need_no_torch() -> None:
    code = (
        "import sys; from shardwise.commands.cli import main\n"
        "assert main(['train', '--training.stps', '3']) == 2\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "settings", "says"),
    [
        ("llama", {"num_key_value_heads": 2}, ["tensor degree 2 or 4", "sequence degree 2 or 4"]),
        ("falcon", {}, ["tensor degree 2 or 4"]),
        (
            "falcon",
            {"num_kv_heads": 1, "new_decoder_architecture": True},
            ["tensor degree 2 or 4", "context any degree"],
        ),
        (
            "mpt",
            {},
            [
                "tensor degree 2 to 16, by outputs: there is no plan for mpt",
                "sequence no: the outputs of its split",
            ],
        ),
        (
            "mamba2",
            {"num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 16},
            ["tensor any degree; mixers of states by heads or channels at degree 2 or 4", "sequence degree 2 or 4"],
        ),
        ("gemma2", {"head_dim": 4}, ["loss of whole logits"]),
        ("modernbert", {"pad_token_id": 0}, ["model modernbert", "sharding any degree, block by block"]),
        (
            "qwen3_moe",
            {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            [
                "experts degree 2, 3 or 6",
                "products grouped products on cpu for model.layers.0.mlp.experts, model.layers.1.mlp.experts: "
                "experts_implementation is grouped_mm, which does not compute in fp64",
            ],
        ),
        pytest.param(
            "jetmoe",
            {"num_local_experts": 4, "kv_channels": 4, "num_key_value_heads": 2, "intermediate_size": 8},
            ["experts degree 2 or 4", "the stack's own forward on cpu", "no other for JetMoeParallelExperts"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_doctor_says_what_a_model_supports(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, family: str, settings: dict[str, Any], says: list[str]
) -> None:
    config = {
        "model_type": family,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
        **settings,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["doctor", "--model", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(line in shown for line in says), shown


def test_doctor_of_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--model", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in (__version__, "torch", "gloo", "cores", "memory", "extra test"))
    assert "rank 0 (local 0)" in shown and "cpu: rank 0" in shown


@pytest.mark.parametrize("words", [("export", "a" * 300, "out"), ("jobs", "list", "a" * 300)])
def test_a_name_that_is_too_long_is_no_traceback(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(words)) == OutputError.exit_code
    assert "is longer than a file's name may be" in " ".join(capsys.readouterr().err.split())
