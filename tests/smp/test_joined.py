"""`smp.init` of a script that has joined its ranks itself."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import shardwise.smp as smp
from shardwise.errors import ConfigError
from shardwise.smp.v1.session import state


def test_nccl_alone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_DEVICE", "cpu")
    monkeypatch.setattr(dist, "get_backend_config", lambda *group: "cuda:nccl")
    try:
        with pytest.raises(ConfigError, match=r"give that 'cpu:gloo,cuda:nccl'"):
            smp.init({})
    finally:
        state.reset()
