"""Commands on a host that shows one GPU: what they say of it, and jobs and scripts on their own workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import yaml

from tests.parity.jobs import make_job

SCRIPT = """
import torch
import smdistributed.modelparallel.torch as smp
from tests.smp.scripts import batches, make_model, train_step

smp.init({"microbatches": 2})
torch.cuda.set_device(smp.local_rank())
model = smp.DistributedModel(make_model("gpt2", torch.float32).cuda())
scaler = smp.amp.GradScaler()
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
losses = []
for _ in range(2):
    optimizer.zero_grad()
    losses.append(float(train_step(model, batches()[0].to("cuda", non_blocking=True)).reduce_mean()))
    optimizer.step()
torch.cuda.synchronize()
smp.save_checkpoint("saved", tag="last", model=model, optimizer=optimizer)
assert losses[1] < losses[0] and all(parameter.is_cuda for parameter in model.parameters())
print("trained on", smp.state.device)
"""


def shardwise(*words: str | Path) -> str:
    command = [sys.executable, "-m", "shardwise", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_doctor_shows_the_gpu() -> None:
    assert torch.cuda.get_device_name() in shardwise("doctor")


def test_two_workers_train_on_the_one_gpu(corpora: Path, tmp_path: Path) -> None:
    parallel = {"device": "auto", "workers": 2}
    job = make_job(corpora, parallel=parallel, precision={"compute": "auto"}, checkpoint={"every": 2})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(mode="json")))
    said = shardwise("train", tmp_path / "job.yaml", "--output", tmp_path / "run")
    assert f"2 {torch.cuda.get_device_name()} ranks" in said and "bf16" in said and "validation loss" in said


def test_a_script_trains_on_the_gpu(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace('"saved"', repr(str(tmp_path / "saved"))))
    assert "trained on cuda:0" in shardwise("run", script)
