"""Gathering in float8: what arrives is the rounded weight, exactly, and takes half the bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwise._torch_compat.fsdp2 import gather_asynchronously
from shardwise.kernels import float8_gather as under_test
from shardwise.kernels.float8 import E4M3, Float8, quantize
from shardwise.kernels.float8_gather import BufferSegment, gather_in_float8, pack, unpack
from shardwise.kernels.linear import use_float8
from shardwise.testing.world import WorldPool

PIECES = [BufferSegment(7, False), BufferSegment(33, True), BufferSegment(2, False), BufferSegment(64, True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_unpacked_is_what_was_packed_rounded_by_powers_of_two(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ranks = [torch.randn(106).to(dtype) * 10.0**rank for rank in range(3)]
    messages = torch.stack([pack(values, PIECES) for values in ranks])
    assert messages.shape[1] % 16 == 0
    output = torch.empty(3, 106, dtype=dtype)
    unpack(messages, PIECES, output)
    for values, found in zip(ranks, output, strict=True):
        expected = []
        for segment, part in zip(PIECES, values.split([segment.elements for segment in PIECES]), strict=True):
            rounded = quantize(part, E4M3, by_powers=True)
            assert float(rounded.scale.log2()) == int(rounded.scale.log2())
            expected.append((rounded.values.double() / rounded.scale.double()) if segment.rounded else part.double())
        torch.testing.assert_close(found.double(), torch.cat(expected), rtol=0, atol=0)


def test_what_is_no_number_stays_none() -> None:
    values = torch.randn(106)
    values[10], values[50] = float("inf"), float("nan")
    output = torch.empty(1, 106)
    unpack(pack(values, PIECES)[None], PIECES, output)
    assert not torch.isfinite(output[0, 7:40]).all() and not torch.isfinite(output[0, 42:]).all()


class Layers(nn.Module):
    """Uneven over two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.plain = nn.LayerNorm(33), nn.Linear(33, 65), nn.Linear(65, 33)

    def forward(self, values: Tensor) -> Tensor:
        return self.plain(self.up(self.norm(values)).relu())


def gathered(asynchronous: bool) -> tuple[dict[str, Tensor], int, int, Tensor]:
    """(parameters as forward sees them, bytes of a rank's message, bytes without float8, the gradient of `up`)."""
    torch.manual_seed(0)
    model = Layers()
    use_float8([model.up], Float8("emulate", "tensorwise", gathered=True))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=True)
    gather_in_float8([model])
    if asynchronous:
        gather_asynchronously(model)
    sent: list[int] = []
    plain = under_test.all_gather_single

    def counted(output: Tensor, message: Tensor, **rest: object) -> dist.Work | None:
        sent.append(message.numel() * message.element_size())
        return plain(output, message, **rest)

    seen: dict[str, Tensor] = {}
    model.up.register_forward_pre_hook(
        lambda *_: seen.update({name: value.detach().clone() for name, value in model.named_parameters()})
    )
    under_test.all_gather_single = counted
    try:
        model(torch.randn(4, 33)).sum().backward()
    finally:
        under_test.all_gather_single = plain
    assert len(sent) == 2 and sent[0] == sent[1]  # forward and backward
    whole = sum(2 * (-(-value.shape[0] // 2)) * value[0].numel() for value in seen.values())
    gradient = model.up.weight.grad.full_tensor()  # type: ignore[union-attr]
    return seen, sent[0], whole, gradient


@pytest.mark.parametrize("asynchronous", [False, True])
def test_fsdp2_gathers_the_weights_of_float8_layers_in_half_the_bytes(
    world_pool: WorldPool, asynchronous: bool
) -> None:
    torch.manual_seed(0)
    expected = {name: value.detach().bfloat16() for name, value in Layers().named_parameters()}
    parts = [quantize(part, E4M3, by_powers=True) for part in expected["up.weight"].split(33)]
    expected["up.weight"] = torch.cat([part.values.float() / part.scale for part in parts]).bfloat16()
    for seen, sent, whole, gradient in world_pool.run(2, gathered, asynchronous):
        assert all(torch.equal(seen[name], value) for name, value in expected.items())
        assert gradient.abs().sum() > 0
        assert whole - 33 * 33 <= sent <= whole - 33 * 33 + 4 + 16  # a scale, and padding
