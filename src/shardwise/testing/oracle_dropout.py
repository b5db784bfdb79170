"""The oracle's own layout-independent dropout, written from the documented hash in plain integers and numpy.

Keep bit of element i of the sample with counter r, for use number n (from 1) of module `name` in one forward:
    key  = little-endian BLAKE2b-64 of "seed/step/name/n"
    x    = (r + 1) * A xor key; twice: x ^= x >> 29, x = x * B + key; x ^= x >> 32   (64 bits, signed shifts)
    low, high = x mod 2**32, (x >> 32) mod 2**32
    b    = i * G + low; b ^= b >> 16; b *= M1; b ^= high; b ^= b >> 15; b *= M2; b ^= b >> 16   (32 bits, unsigned)
    kept iff signed(b) < round((1 - p) * 2**32) - 2**31
    noise of uniform_(low, high): low + (high - low) * (b >> 8) / 2**24
A tensor whose first dim is no multiple of the batch belongs to no sample: it is one row with r = -1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

A, B, G = 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x9E3779B1
M1, M2 = 0x7FEB352D, 0x846CA68B


def oracle_keep_mask(key: int, counter: int, elements: int, probability: float) -> np.ndarray:
    """[elements] bool: which elements of the sample `counter` survive dropout with `probability`."""
    threshold = round((1 - probability) * 2**32) - 2**31
    kept: np.ndarray = random_bits(key, counter, elements).view(np.int32) < np.int64(threshold)
    return kept


def random_bits(key: int, counter: int, elements: int) -> np.ndarray:
    """[elements] uint32: b of each element of the sample `counter`."""
    x = _signed((counter + 1) * A) ^ _signed(key)
    for _ in range(2):
        x ^= x >> 29
        x = _signed(x * B + key)
    x ^= x >> 32
    low, high = np.uint32(x & 0xFFFFFFFF), np.uint32((x >> 32) & 0xFFFFFFFF)
    bits = np.arange(elements, dtype=np.uint32) * np.uint32(G) + low
    bits ^= bits >> np.uint32(16)
    bits = (bits * np.uint32(M1)) ^ high
    bits ^= bits >> np.uint32(15)
    bits *= np.uint32(M2)
    bits ^= bits >> np.uint32(16)
    return bits


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


class OracleDropout(TorchFunctionMode):
    """Lead every `nn.Dropout` of a model and functional dropout to `oracle_keep_mask`; noise likewise.

    Used as a context around one forward, after `begin`. Functional calls are named by the innermost of `blocks` that
    runs.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], seed: int) -> None:
        super().__init__()
        self.seed, self.running = seed, [""]
        for name, module in model.named_modules():
            if type(module) is nn.Dropout:
                module.forward = self._module(module, name)  # type: ignore[method-assign, assignment]
        for name in blocks:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(lambda *_, name=name: self.running.append(name))
            block.register_forward_hook(lambda *_: self._leave())

    def begin(self, step: int, counters: Sequence[int]) -> OracleDropout:
        """Start one forward."""
        self.step, self.counters, self.uses = step, list(counters), Counter[str]()
        return self

    def _leave(self) -> None:
        self.running.pop()

    def _module(self, module: nn.Dropout, name: str) -> Callable[[Tensor], Tensor]:
        return lambda values: self._drop(values, module.p, name, module.inplace) if module.training else values

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.uniform_:
            return self._jitter(*args, **kwargs)
        if function is not nn.functional.dropout:
            return function(*args, **kwargs)
        return self._functional(*args, **kwargs)

    def _functional(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return self._drop(input, p, f"{self.running[-1]}/functional", inplace) if training else input

    def _drop(self, values: Tensor, probability: float, name: str, inplace: bool = False) -> Tensor:
        if probability == 0 or values.numel() == 0:
            return values
        result = self._dropped(values, probability, name)
        return values.copy_(result) if inplace else result

    def _dropped(self, values: Tensor, probability: float, name: str) -> Tensor:
        if probability >= 1:
            return values * 0
        key, counters, shape = self._use(values, name)
        kept = np.stack([oracle_keep_mask(key, counter, shape, probability) for counter in counters])
        return torch.where(torch.from_numpy(kept).view(values.shape), values * (1 / (1 - probability)), 0.0)

    def _jitter(self, values: Tensor, low: float = 0, high: float = 1) -> Tensor:
        key, counters, shape = self._use(values, f"{self.running[-1]}/uniform")
        bits = np.stack([random_bits(key, counter, shape) for counter in counters])
        noise = low + (high - low) * (bits >> np.uint32(8)) / 2.0**24
        return values.copy_(torch.from_numpy(noise).view(values.shape))

    def _use(self, values: Tensor, name: str) -> tuple[int, list[int], int]:
        """(key of the next use of `name`, counters of the rows, elements of each)."""
        self.uses[name] += 1
        text = f"{self.seed}/{self.step}/{name}/{self.uses[name]}"
        key = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        counters = [-1] if values.shape[0] % len(self.counters) else self.counters
        return key, counters, values.numel() // len(counters)
