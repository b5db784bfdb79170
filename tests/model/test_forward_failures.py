"""Why a forward cannot run without values is said in words, with the user's line and without torch's text."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardwise._torch_compat.tracing import FakeTensorMode
from shardwise.model.forward_failures import UntraceableError, failure_reason


def multiplied(x: Tensor) -> Tensor:
    raise KeyError("gate")


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: x * float(x.sum()), "it reads values of tensors ({line}), which are known in a step alone"),
        (lambda x: x[x > 0], "it reads values of tensors ({line}), which are known in a step alone"),
        (lambda x: x * x.numpy(), "it reads values of tensors ({line}), which are known in a step alone"),
        (lambda x: copy.deepcopy(x * x.requires_grad_()), "it copies modules or tensors ({line})"),
        (multiplied, "it raises KeyError: 'gate' ({line})"),
    ],
)
def test_a_failure_has_words_and_a_line(forward: Callable[[Tensor], Tensor], reason: str) -> None:
    line = f"{__file__}:{forward.__code__.co_firstlineno + (forward is multiplied)}"
    with FakeTensorMode(), pytest.raises(Exception) as raised:
        forward(torch.ones(2))
    assert failure_reason(raised.value) == reason.format(line=line)


def test_torch_s_own_failures_have_no_text_of_torch() -> None:
    assert failure_reason(RuntimeError("Node submod_1 target")) == "torch cannot follow it (RuntimeError)"
    assert failure_reason(UntraceableError("its forward has it")) == "its forward has it"
