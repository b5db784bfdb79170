"""Liger's kernels in a model: which modules are led to them, and that the model then computes what it did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.kernels.liger import use_liger
from shardwise.model.fusible import GEGLU, NORM, ROTARY, SWIGLU, fusible

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2,
                         "num_key_value_heads": 2, "vocab_size": 97, "head_dim": 8}  # fmt: skip


def make(family: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **more)
    model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model


class Kernels(SimpleNamespace):
    """What Liger's functions compute, in plain torch; `calls` counts them."""

    def __init__(self) -> None:
        super().__init__(calls=[])

    def liger_rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, offset: float, casting: str, inside: bool
    ) -> Tensor:
        assert (offset, casting, inside) == (0.0, "llama", False)
        self.calls.append(NORM)
        return weight * (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def liger_swiglu(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls.append(SWIGLU)
        return F.silu(a) * b

    def liger_geglu(self, a: Tensor, b: Tensor) -> Tensor:
        self.calls.append(GEGLU)
        return F.gelu(a, approximate="tanh") * b

    def liger_rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append(ROTARY)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

        def turn(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * cos + torch.cat((-second, first), -1) * sin

        return turn(q), turn(k)


@pytest.mark.parametrize(
    "family, counts",
    [
        ("llama", {NORM: 5, SWIGLU: 2, ROTARY: 2}),
        ("mistral", {NORM: 5, SWIGLU: 2, ROTARY: 2}),
        ("qwen3", {NORM: 9, SWIGLU: 2, ROTARY: 2}),
        ("gemma", {GEGLU: 2, ROTARY: 2}),  # its norms add one to the weight
        ("gpt_neox", {}),
    ],
)
def test_a_model_on_the_kernels_computes_the_same(family: str, counts: dict[str, int]) -> None:
    model, kernels = make(family), Kernels()
    kinds = fusible(model)
    assert {kind: list(kinds.values()).count(kind) for kind in kinds.values()} == counts
    ids = torch.arange(24).view(2, 12)
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    other = make(family)
    use_liger(model, kinds, kernels)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert {kind: kernels.calls.count(kind) for kind in kernels.calls} == counts
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    before = len(kernels.calls)
    other(input_ids=ids)
    assert len(kernels.calls) == before  # one model was led, and not its family


def test_an_mlp_of_another_activation_stays() -> None:
    assert SWIGLU not in fusible(make("llama", hidden_act="gelu")).values()
    assert GEGLU not in fusible(make("llama", hidden_act="gelu")).values()


@pytest.mark.slow
def test_ligers_own_kernels_compute_the_same() -> None:
    """In Triton's interpreter, which runs them on a CPU; in a process of its own, where that is switched on first."""
    for package in ("triton", "liger_kernel"):
        pytest.importorskip(package)
    script = Path(__file__).with_name("liger_interpreted.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["llama", "gemma"]
