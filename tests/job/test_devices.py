"""The records of devices, what plans take from them, and the rule that nothing else asks for a device by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise._torch_compat import accelerator
from shardwise.job.devices import CPU, KINDS, Feature, default_device_type, device_kind
from shardwise.job.schema import Device, Job
from shardwise.plan.plan import World, resolve
from tests.plan.rules.jobs import FACTS

# Files in which CUDA is named because they are about CUDA alone, or take another library's word for it.
ABOUT_CUDA = {
    "_torch_compat/accelerator.py": "asks for CUDA first",
    "collectives/carriers.py": "NCCL's groups",
    "collectives/hierarchical.py": "the devices of NCCL and of the engine",
    "collectives/registration.py": "the devices of the engine",
    "commands/run.py": "scripts of SMP are written for CUDA",
    "job/devices.py": "the record",
    "job/recipes/smp_keys.py": "a word of recipes",
    "job/schema.py": "the words of `parallel.device`",
    "kernels/attention/sdpa.py": "torch's kernels that can be held to are CUDA's",
    "kernels/experts.py": "compute capability",
    "kernels/loss.py": "cuBLAS's product with a wider output",
    "kernels/precision.py": "compute capability, and ROCm's word for it",
    "launch/watch/announced.py": "NCCL's flight recorder",
    "model/attention_choice.py": "kernels that are narrow on CUDA",
}
NAMED = re.compile(r"""["']cuda["'\]:]|torch\.cuda|\.is_cuda""")


def test_every_word_of_the_key_is_a_kind() -> None:
    assert [kind.name for kind in KINDS] == [word for word in Device.__args__ if word != "auto"]  # type: ignore[attr-defined]


def test_no_other_file_asks_for_cuda_by_name() -> None:
    root = Path(shardwise.__file__).parent
    named = set()
    for path in root.rglob("*.py"):
        code = "\n".join(line.partition("  #")[0] for line in path.read_text(encoding="utf-8").splitlines())
        code = re.sub(r'"""(.*?)"""', "", code, flags=re.DOTALL)
        if NAMED.search(code):
            named.add(str(path.relative_to(root)))
    assert {file for file in named if not file.startswith("smp/")} == set(ABOUT_CUDA)


@pytest.mark.parametrize(
    ("device", "backend", "compute"), [("cuda", "nccl", "bf16"), ("xpu", "xccl", "bf16"), ("cpu", "gloo", "fp32")]
)
def test_a_plan_takes_backend_and_dtype_from_the_record(device: str, backend: str, compute: str) -> None:
    plan = resolve(Job.model_validate({"parallel": {"device": device}}), World(4, device, 4), FACTS)
    assert (plan.backend, plan.dtypes.compute) == (backend, compute)


def test_auto_takes_a_gpu_that_is_no_apple_s(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {}
    for found in ("cpu", "cuda", "xpu", "mps", "hpu"):
        monkeypatch.setattr(accelerator, "available", lambda found=found: found)
        answers[found] = default_device_type()
    assert answers == {"cpu": "cpu", "cuda": "cuda", "xpu": "xpu", "mps": "cpu", "hpu": "cpu"}


def test_a_refusal_names_reason_and_device() -> None:
    assert device_kind(CPU).refusal(Feature.GRAPHS) == "CUDA graphs need a GPU, and the ranks run on cpu"
    assert device_kind("cuda").refusal(Feature.GRAPHS) == ""


def test_generators_are_as_before() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with accelerator.generators_kept(torch.device("cpu")):
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected)
