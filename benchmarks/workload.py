"""The one training job that every contender of `training_cpu` runs: a GPT-2, its weights, batch and arithmetic.

All contenders load the same saved weights and see the same random token ids, fixed for each rank. Dropout is off, so
that their losses can be compared number by number.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """Shape of the model and of one rank's batch, and the optimizer's numbers."""

    layers: int = 4
    width: int = 512
    heads: int = 8
    vocabulary: int = 8192
    sequence: int = 256
    batch: int = 4  # sequences in one rank's batch
    learning_rate: float = 3e-4
    weight_decay: float = 0.1  # on tensors of two or more dims
    clip_norm: float = 1.0
    seed: int = 0
    reshard: bool = False  # free a block's gathered parameters between forward and backward
    frozen: bool = False  # the model's weights get no gradient: adapters, which are left out of its FLOPs, are trained

    @property
    def tokens(self) -> int:
        """Tokens in one rank's batch."""
        return self.batch * self.sequence

    @property
    def block_parameters(self) -> int:
        """Parameters of all blocks: four matrices (12·h²), their biases (9·h) and two layer norms (4·h)."""
        return self.layers * (12 * self.width**2 + 13 * self.width)

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of forward and backward for one token: 6·P + 12·L·s·h, or 4·P with frozen weights.

        P counts the parameters that matrix products read: blocks, last layer norm and the head, which GPT-2 ties to the
        token embedding; not the positions (PaLM, arXiv 2204.02311, appendix B).
        """
        parameters = self.block_parameters + 2 * self.width + self.vocabulary * self.width
        return (4.0 if self.frozen else 6.0) * parameters + 12.0 * self.layers * self.sequence * self.width

    def products(self, rows: int) -> list[tuple[tuple[int, int, int], int]]:
        """Matrix products [m, k] x [k, n] of one forward over `rows` tokens, each with how often it occurs."""
        width = self.width
        blocks = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
        head = ((rows, width, self.vocabulary), 1)
        return [*(((rows, k, n), self.layers) for k, n in blocks), head]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def save_model(workload: Workload, directory: Path) -> None:
    """Draw the weights once and save them, with the config, where every contender loads them from."""
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = GPT2Config(
        vocab_size=workload.vocabulary,
        n_positions=workload.sequence,
        n_embd=workload.width,
        n_layer=workload.layers,
        n_head=workload.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,  # no key-value cache in training: it would cost every contender time for nothing
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(workload.seed)
    GPT2LMHeadModel(config).save_pretrained(directory)


def load_model(directory: Path) -> nn.Module:
    """The model of `save_model` in fp32 with SDPA attention, in training mode."""
    from transformers import GPT2LMHeadModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
    return model.train()


def token_ids(workload: Workload, rank: int) -> Tensor:
    """The rank's batch [B, S] of random token ids, the same at every step and for every contender."""
    generator = torch.Generator().manual_seed(1_000_003 * (workload.seed + 1) + rank)
    return torch.randint(workload.vocabulary, (workload.batch, workload.sequence), generator=generator)


def parameter_groups(model: nn.Module, workload: Workload) -> list[dict[str, Any]]:
    """Two groups, as GPT-2 is trained: weight decay on matrices and embeddings, none on biases and norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": workload.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def product_rate(workload: Workload, rows: int, threads: int, repeats: int = 3) -> float:
    """FLOP/s of `torch.mm` over the workload's own shapes on `threads` cores: the physical limit of a step.

    Each shape counts by the share of the FLOPs it has in the model; of several repeats the fastest is taken.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        flops = seconds = 0.0
        for (m, k, n), count in workload.products(rows):
            flops += count * 2.0 * m * k * n
            seconds += count * _product_seconds(m, k, n, repeats)
    finally:
        torch.set_num_threads(before)
    return flops / seconds


def _product_seconds(m: int, k: int, n: int, repeats: int) -> float:
    left, right, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    best = float("inf")
    for _ in range(repeats + 1):  # the first one warms up; being slower, it never is the fastest
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    return best
