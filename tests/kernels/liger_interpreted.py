"""Liger's kernels in Triton's interpreter against transformers' own code, on a CPU; run by test_liger.py."""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime import interpreter

from shardwise.kernels.liger import use_liger
from shardwise.model.fusible import fusible


class Scalar(float):
    """A number with the method that kernels call on theirs; the interpreter hands Python's through."""

    def to(self, dtype: Any) -> float:
        return float(self)


# The device library's functions have no interpretation; the language's own are the same.
rms_norm.rsqrt, geglu.tanh = lambda x: tl.math.rsqrt(x), lambda x: 2 * tl.sigmoid(2 * x) - 1
convert = interpreter._implicit_cvt
interpreter._implicit_cvt = lambda value: Scalar(value) if type(value) is float else convert(value)
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 1,
                         "num_key_value_heads": 2, "vocab_size": 97, "head_dim": 8}  # fmt: skip

for family in ("llama", "gemma"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES), attn_implementation="eager")
    ids = torch.arange(24).view(2, 12)
    expected = model(input_ids=ids, labels=ids).loss
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    use_liger(model, fusible(model))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)
    print(family)
