"""Newton-Schulz iterations that make a matrix orthogonal, as torch.optim.Muon runs them: whole, or block by block.

A quintic iteration drives all singular values near 1 (arXiv 2409.20325; torch's coefficients let them end between 0.7
and 1.2). The dtype is that of the matrix. Blocks share the larger dim; only the square matrix of the smaller one is
summed over them, in fp32 at least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]


def newton_schulz(matrix: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Return the orthogonalized matrix, with the operators of torch.optim.Muon in their order."""
    a, b, c = coefficients
    is_tall = matrix.size(0) > matrix.size(1)
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if is_tall else x


def newton_schulz_of_blocks(
    blocks: Sequence[Tensor],
    summed: Callable[[Sequence[Tensor]], Sequence[Tensor]],
    coefficients: Coefficients,
    steps: int,
    eps: float,
) -> list[Tensor]:
    """Return this rank's blocks of several orthogonalized matrices.

    Args:
        blocks: [smaller dim, this rank's share of the larger one] of each matrix; a share may be empty.
        summed: sums tensors, one of each matrix, over the ranks that share it.
    """
    a, b, c = coefficients
    squares = summed([_wide(block).square().sum() for block in blocks])
    blocks = [
        block / square.sqrt().to(block.dtype).clamp(min=eps) for block, square in zip(blocks, squares, strict=True)
    ]
    for _ in range(steps):
        grams = summed([_wide(block) @ _wide(block).T for block in blocks])
        grams = [gram.to(block.dtype) for gram, block in zip(grams, blocks, strict=True)]
        updates = [torch.addmm(gram, gram, gram, beta=b, alpha=c) for gram in grams]
        blocks = [torch.addmm(x, update, x, beta=a) for x, update in zip(blocks, updates, strict=True)]
    return list(blocks)


def _wide(block: Tensor) -> Tensor:
    return block.to(torch.promote_types(block.dtype, torch.float32))
