"""A selective checkpoint keeps the result of attention that is made of products, and none of its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from shardwise.job.schema import MemorySection
from shardwise.kernels.attention import blockwise
from shardwise.kernels.attention.blockwise import BlockwiseSettings, blockwise_attention
from shardwise.kernels.kept_results import keep_results, kept
from shardwise.observe.memory import tensors_of
from shardwise.parallel.transforms.checkpointing import apply_activation_checkpointing, keeps_output

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
    forward, recomputation = create_selective_checkpoint_contexts(keeps_output)
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
    assert (3, 3) not in _shapes_kept(forward)


def _shapes_kept(forward: Any) -> list[tuple[int, ...]]:
    # torch 2.11 and 2.12 keep a list of each operator's results, later ones a dict
    kept = [getattr(entries, "values", entries.copy)() for entries in forward.storage.values()]
    values = [[getattr(entry, "val", None) for entry in entries] for entries in kept]
    return [tuple(tensor.shape) for tensor in tensors_of(values)]


def _fails() -> tuple[Tensor, ...]:
    raise AssertionError("what is kept is not computed again")


def test_without_a_checkpoint_it_is_computed() -> None:
    compute: Callable[[], tuple[Tensor, ...]] = lambda: (torch.ones(2),)  # noqa: E731
    assert kept(compute)[0].sum() == 2


def test_what_an_adapter_adds_is_no_second_copy_of_a_layers_result() -> None:
    """Kept are the layer's own result and what lies between the factors; their sum is made again."""
    forward, recomputation = create_selective_checkpoint_contexts(keeps_output)
    rows, weight, down, up = torch.ones(6, 16), torch.ones(32, 16), torch.ones(2, 16), torch.ones(32, 2)

    def adapted() -> Tensor:
        return torch.addmm(F.linear(rows, weight), F.linear(rows, down), up.T) + F.linear(rows, weight, torch.ones(32))

    with forward:
        made = adapted()
    assert sorted(_shapes_kept(forward)) == [(6, 2), (6, 32), (6, 32)]  # and the layer's with a bias
    with recomputation:
        again = adapted()
    assert torch.equal(again, made)


def test_adapted_stacks_of_experts_are_made_again() -> None:
    """A sum for each of a stack's matrices is as large as the stack; one that is broadcast is a product's own bias."""
    forward, recomputation = create_selective_checkpoint_contexts(keeps_output)
    stack, down, up = torch.ones(3, 32, 16), torch.ones(3, 2, 16), torch.ones(3, 32, 2)

    def adapted() -> Tensor:
        rows = torch.bmm(torch.ones(3, 5, 16), torch.baddbmm(stack, up, down).mT)
        return torch.baddbmm(torch.ones(3, 1, 16), rows, stack)

    with forward:
        made = adapted()
    assert sorted(_shapes_kept(forward)) == [(3, 5, 16), (3, 5, 32)]
    with recomputation:
        again = adapted()
    assert torch.equal(again, made)
