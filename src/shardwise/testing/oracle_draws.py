"""The oracle's own seeds for what a user's module draws by itself (torch, Python, NumPy), written from their rule.

Generators are seeded anew for each forward and, inside, for each run of a block and of a module outside of blocks:
    seed = little-endian BLAKE2b-64 of "seed/step/name/draws/r/n"
for run number n (from 1) of the module `name` in a forward whose first row has the counter r; the whole forward's own
name is empty. Behind such a run generators go on from where they were.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise._torch_compat.autograd import checkpointed_functions


class OracleDraws:
    """Seeds the generators of one process; used as a context around each forward.

    Args:
        model: the user's module, whose blocks are seeded by themselves from now on.
        blocks: their names.
        seed: training.seed.
        by_module: so they are; a forward that is cut by a trace has one seed alone.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], seed: int, by_module: bool = True) -> None:
        self.seed, self.step, self.first = seed, 0, 0
        self.runs = Counter[str]()
        inside = tuple(f"{name}." for name in blocks)
        for name, module in model.named_modules() if by_module else ():
            if name and not name.startswith(inside) and type(module).forward is not nn.Module.forward:
                module.forward = self._seeding(module.forward, name)  # type: ignore[method-assign]

    @contextmanager
    def forward(self, step: int, first: int) -> Iterator[None]:
        """Be inside one forward; what checkpoints of the user's run again draws the same numbers again."""
        self.step, self.first, self.runs = step, first, Counter()
        with checkpointed_functions(self._run_again), self._drawing(""):
            yield

    def _seeding(self, forward: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._drawing(name):
                return forward(*args, **kwargs)

        return run

    @contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        self.runs[name] += 1
        text = f"{self.seed}/{self.step}/{name}/draws/{self.first}/{self.runs[name]}"
        key = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
        random.seed(key)
        np.random.seed(key % 2**32)
        torch.default_generator.manual_seed(key)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
            torch.set_rng_state(of_torch)

    def _run_again(self, function: Callable[..., Any], before: int) -> Callable[..., Any]:
        """Return a function that, behind its first `before` runs, counts runs of modules from where they are now."""
        counted, runs = Counter(self.runs), count()

        def run(*args: Any, **kwargs: Any) -> Any:
            if next(runs) < before:
                return function(*args, **kwargs)
            later, self.runs = self.runs, Counter(counted)
            try:
                return function(*args, **kwargs)
            finally:
                self.runs = later

        return run
