"""A selective checkpoint keeps the result of attention that is made of products, and none of its scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shardwise.job.schema import MemorySection
from shardwise.kernels.attention import blockwise
from shardwise.kernels.attention.blockwise import BlockwiseSettings, blockwise_attention
from shardwise.kernels.kept_results import keep_results, kept
from shardwise.observe.memory import tensors_of
from shardwise.parallel.transforms.checkpointing import KEPT, apply_activation_checkpointing

LENGTH = 64


class Block(nn.Module):
    """Attention by plain products, as a soft cap makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.project(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
        return blockwise_attention(heads, heads, heads, BlockwiseSettings(0.3, causal=True, softcap=5.0)).flatten(2)


def gradients(block: nn.Module) -> list[Tensor]:
    torch.manual_seed(1)
    block(torch.randn(1, LENGTH, 16).requires_grad_()).square().sum().backward()
    return [parameter.grad for parameter in block.parameters() if parameter.grad is not None]


def test_attention_of_products_is_computed_once(monkeypatch: object) -> None:
    plain, checkpointed = Block(), Block()
    checkpointed.load_state_dict(plain.state_dict())
    apply_activation_checkpointing([[checkpointed]], MemorySection(activation_checkpointing="selective"), None)
    expected = gradients(plain)
    calls = []
    attended = blockwise._attended
    monkeypatch.setattr(blockwise, "_attended", lambda *args: calls.append(1) or attended(*args))  # type: ignore[attr-defined]
    for own, one in zip(gradients(checkpointed), expected, strict=True):
        assert torch.equal(own, one)
    assert len(calls) == 1


def test_products_inside_are_not_kept() -> None:
    forward, recomputation = create_selective_checkpoint_contexts(KEPT)
    keep_results(forward, recomputation)
    rows = torch.ones(3, 5)

    def scores() -> tuple[Tensor, ...]:
        return (rows @ rows.T, rows.sum(1))

    with forward:
        beside, made = rows.T @ rows, kept(scores)
    with recomputation:
        again = rows.T @ rows
        given = kept(_fails)
    assert again is not beside and torch.equal(again, beside)
    assert [one.data_ptr() for one in given] == [one.data_ptr() for one in made]
    shapes = [tuple(tensor.shape) for entries in forward.storage.values() for tensor in tensors_of(_values(entries))]
    assert (3, 3) not in shapes


def _values(entries: dict[int, object]) -> list[object]:
    return [getattr(entry, "val", None) for entry in entries.values()]


def _fails() -> tuple[Tensor, ...]:
    raise AssertionError("what is kept is not computed again")


def test_without_a_checkpoint_it_is_computed() -> None:
    compute: Callable[[], tuple[Tensor, ...]] = lambda: (torch.ones(2),)  # noqa: E731
    assert kept(compute)[0].sum() == 2
