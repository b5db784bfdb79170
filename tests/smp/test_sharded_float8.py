"""Float8 of version 2: `fp8_autocast` around the forward of a transformed model."""

from __future__ import annotations

import copy
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise.smp.v2 as tsm
from shardwise.errors import ConfigError
from shardwise.kernels.float8 import Float8
from shardwise.kernels.linear import use_float8
from shardwise.smp.doors.stubs.transformer_engine import pytorch as te
from shardwise.smp.doors.stubs.transformer_engine.common.recipe import DelayedScaling, Format
from shardwise.testing.world import WorldPool

IDS = torch.arange(32).reshape(2, 16)
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
    "intermediate_size": 64, "vocab_size": 48,
}  # fmt: skip


def _model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def _gradients(model: Any) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


def _loss(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=IDS, labels=IDS).loss
    return loss


def test_the_blocks_multiply_as_the_engine_does_and_only_inside() -> None:
    plain = _model()
    rounded = copy.deepcopy(plain)
    layers = [m for m in rounded.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    use_float8(layers, Float8("emulate", "tensorwise"))
    expected = _loss(rounded)
    expected.backward()
    try:
        tsm.init({"hybrid_shard_degree": 1})
        model = tsm.transform(copy.deepcopy(plain))
        for block in model.model.layers:  # as scripts checkpoint under fp8
            own = block.forward
            block.forward = lambda *args, own=own, **kwargs: te.checkpoint(own, *args, tp_group=None, **kwargs)
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=4)):
            found = _loss(model)
        found.backward()  # recomputes outside of the scope
        assert torch.equal(found, expected)
        assert all(torch.equal(a, b) for a, b in zip(_gradients(model), _gradients(rounded), strict=True))
        with te.fp8_autocast(enabled=True, fp8_recipe=DelayedScaling(fp8_format=Format.E4M3)):
            assert not torch.equal(_loss(model), expected)  # the other format
            with te.fp8_autocast(enabled=False):
                assert torch.equal(_loss(model), _loss(plain))
        assert torch.equal(_loss(model), _loss(plain)) and not torch.equal(_loss(plain), expected)
        with pytest.raises(ConfigError, match="E5M2"), te.fp8_autocast(fp8_recipe=DelayedScaling(Format.E5M2)):
            pass
    finally:
        tsm.state.reset()


def test_an_installed_transformer_engines_scope_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scope:
        enabled = False

        @classmethod
        def is_fp8_enabled(cls) -> bool:
            return cls.enabled

        @classmethod
        def get_fp8_recipe(cls) -> DelayedScaling:
            return DelayedScaling(fp8_format=Format.E4M3)

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.fp8"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["transformer_engine.pytorch.fp8"])["FP8GlobalStateManager"] = Scope
    rounded = _model()
    use_float8(
        [m for m in rounded.model.layers.modules() if isinstance(m, torch.nn.Linear)], Float8("emulate", "rowwise")
    )
    try:
        tsm.init({"hybrid_shard_degree": 1})
        model = tsm.transform(_model())
        assert torch.equal(_loss(model), _loss(_model()))
        Scope.enabled = True
        assert torch.equal(_loss(model), _loss(rounded)) and not torch.equal(_loss(rounded), _loss(_model()))
    finally:
        tsm.state.reset()


def _split() -> tuple[float, float]:
    try:
        tsm.init({"tensor_parallel_degree": 2})
        model = tsm.transform(_model())
        with te.fp8_autocast(fp8_recipe=DelayedScaling(fp8_format=Format.E4M3)):
            rounded = _loss(model)
        return float(rounded.detach()), float(_loss(model).detach())
    finally:
        tsm.state.reset()


def test_tensor_parts_multiply_in_float8_too(world_pool: WorldPool) -> None:
    one = _model()
    use_float8([m for m in one.model.layers.modules() if isinstance(m, torch.nn.Linear)], Float8("emulate", "rowwise"))
    for rounded, exact in world_pool.run(2, _split):
        assert rounded == pytest.approx(float(_loss(one).detach()), rel=1e-6)
        assert exact == pytest.approx(float(_loss(_model()).detach()), rel=1e-6) and exact != rounded
