"""`shardwise run`: a script is run unchanged, and mistakes end as messages."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel, GPTNeoXForCausalLM

from shardwise.commands.cli import main
from shardwise.errors.exit_codes import FAULT
from tests.fork_server import run_python

SCRIPT = Path(__file__).parent / "step_script.py"
T5_SCRIPT = Path(__file__).parent / "flan_t5_script.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
CALLED = re.compile(r'shardwise\(("\w+")')


def _run(*words: str | Path | int) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "shardwise", "run", "--device", "cpu", *words)


def test_script_runs_unchanged_on_two_stages(tmp_path: Path) -> None:
    options = '{"pipeline_parallel_degree": 2, "microbatches": 4, "ddp_dist_backend": "nccl"}'
    done = _run(
        "--workers", "2", "--smp-options", options, "--model-dir", tmp_path, "--channel", "train=here", SCRIPT, 2
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done").read_text() == "here 2"
    assert done.stderr.count("--device cpu: ") == 1
    assert "stage 1: transformer.h.1" in done.stderr and done.stderr.count("NCCL is for CUDA") == 1


@pytest.mark.parametrize("kind", ["untied", "tied", "bart"])
@pytest.mark.slow
def test_t5_and_bart_on_two_stages_are_plain_transformers(tmp_path: Path, kind: str) -> None:
    """Padding, labels that the model shifts itself, checkpointed blocks, a stop and a resume in between."""
    options = '{"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "interleaved"}'
    done = _run("--workers", "2", "--smp-options", options, "--model-dir", tmp_path, T5_SCRIPT, kind, 3)
    assert done.returncode == 0, done.stderr
    first = "model.encoder.layers.0" if kind == "bart" else "encoder.block.0"
    assert f"stage 0: {first}" in done.stderr and "has no effect" not in done.stderr
    found = torch.load(tmp_path / "result.pt")
    config = json.loads(found["config"])
    plain = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**config))
    plain.load_state_dict(found["start"])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    losses = []
    for step, rows in enumerate(found["batches"]):
        optimizer.zero_grad()
        names = ("input_ids", "attention_mask", "labels")
        pieces = zip(*(tensor.chunk(4) for tensor in rows), strict=True)
        loss = sum(plain(**dict(zip(names, piece, strict=True))).loss for piece in pieces) / 4
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        losses.append(float(loss.detach()))
        if step < 3:
            optimizer.step()
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)


POOL = """
import concurrent.futures
pool = concurrent.futures.ProcessPoolExecutor(1)
assert pool.submit(abs, -1).result() == 1
raise RuntimeError("of the script")
"""


def test_failed_script_does_not_wait_for_its_process_pool(tmp_path: Path) -> None:
    (tmp_path / "pool.py").write_text(POOL)
    done = _run("--workers", "2", tmp_path / "pool.py")
    assert done.returncode == FAULT and "RuntimeError: of the script" in done.stderr


MISTAKEN = """
import sys
import smdistributed.modelparallel.torch as smp
import torch

smp.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
model = smp.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2))))

@smp.step
def train(model, x):
    loss = model(x).sum()
    if sys.argv[1] == "backward":
        loss.backward()
    try:
        {}["no such key"]
    except KeyError as error:
        raise ValueError("of the script") from error

train(model, torch.ones(4, 4, 4))
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mistake, code", [("backward", 2), ("raise", FAULT)])
def test_mistakes_after_the_last_stage_are_seen_as_they_are(tmp_path: Path, mistake: str, code: int) -> None:
    """Torch's schedule, in which the body runs, puts an error of its own around each."""
    (tmp_path / "mistaken.py").write_text(MISTAKEN)
    done = _run("--workers", "2", tmp_path / "mistaken.py", mistake)
    assert done.returncode == code and "failed to run forward" not in done.stderr
    last = done.stderr.splitlines()[-1]
    if mistake == "backward":
        assert last.startswith("error: rank 1: the step 'train' runs backward itself")
        assert last.endswith("use model.backward(loss) in the place of loss.backward()")
    else:
        assert last == "ValueError: of the script" and "KeyError: 'no such key'" in done.stderr


def test_example_learns_and_leaves_a_model_of_transformers(tmp_path: Path) -> None:
    example = EXAMPLES / "smp_gpt.py"
    options = '{"tensor_parallel_degree": 2, "prescaled_batch": true, "optimize": "speed"}'
    where = ("--model-dir", tmp_path, "--channel", f"train={tmp_path / 'data'}")
    done = _run("--workers", "2", "--smp-options", options, *where, example, "--steps", "8")
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    config = GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=256)
    GPT2LMHeadModel(config).load_state_dict(torch.load(tmp_path / "model.pt"))


@pytest.mark.slow
def test_example_of_version_2_learns_and_leaves_a_model_of_transformers(tmp_path: Path) -> None:
    options = '{"tensor_parallel_degree": 2, "sm_activation_offloading": false}'
    example = EXAMPLES / "smp_sharded.py"
    done = _run("--workers", "2", "--smp-options", options, "--model-dir", tmp_path, example, "--steps", "8")
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    assert GPTNeoXForCausalLM.from_pretrained(tmp_path).config.hidden_size == 64


def _cells() -> str:
    """The code of the notebook, as one program."""
    cells = json.loads((EXAMPLES / "smp_tutorial.ipynb").read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text("")
    assert main(["run", "--device", "cuda", str(tmp_path / "script.py")]) == 2
    assert "--device cuda: this host shows no GPU; use --device cpu" in capsys.readouterr().err


def test_notebook_is_a_program() -> None:
    assert {"train", "plan"} <= set(ast.literal_eval(f"[{', '.join(CALLED.findall(_cells()))}]"))
    compile(_cells(), "smp_tutorial.ipynb", "exec")


@pytest.mark.slow
@pytest.mark.timeout(900)  # six commands, one after the other
def test_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    environment = os.environ | {"TUTORIAL_DIRECTORY": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _cells()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=880
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_scripts_of_data_parallelism_run_unchanged(tmp_path: Path) -> None:
    done = _run("--workers", "2", SCRIPT.with_name("data_parallel_script.py"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "whole-1.pt").is_file()


def test_a_rank_that_ends_while_others_wait_is_named(tmp_path: Path) -> None:
    done = _run("--workers", "2", SCRIPT.with_name("step_script_alone.py"), tmp_path)
    assert done.returncode == 2
    assert "rank 0 is in smp.barrier with rank 1, which has ended; all of ranks [0, 1] have to call it" in done.stderr


def test_mistakes_end_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ((tmp_path / "none.py",), "is not a file"),
        (("--smp-options", "{", SCRIPT), "neither a JSON object"),
        (("--smp-options", '{"microbatch": 2}', SCRIPT), "Did you mean 'microbatches'?"),
        (("--channel", "train", SCRIPT), "must be NAME=DIR"),
        (("--smp-options", '{"mpi": {"processes_per_host": "4"}}', SCRIPT), "processes_per_host='4' must be a whole"),
        (
            ("--smp-options", '{"enabled": false, "parameters": {}}', tmp_path / "none.py"),
            "enabled=False, so its param",
        ),
        (("--smp-options", '{"mpi": {"processes_per_host": 0}}', SCRIPT), "processes_per_host=0 must be a whole"),
    ):
        assert main(["run", *map(str, words)]) == 2
        assert said in capsys.readouterr().err
