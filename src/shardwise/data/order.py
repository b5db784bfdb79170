"""The order of samples: a pure function of (seed, sample counter), in O(1) memory.

The state of a run's data is therefore one integer, the samples consumed, on any number of ranks and any batch size.

Exact definition. `epoch, position = divmod(sample_index, size)`. Each epoch is a permutation of 0 … size - 1: a Feistel
network of `ROUNDS` rounds on two halves of `h` bits each, where h is the least with 4**h >= size, applied again while
its result is >= size (cycle walking). The round function is BLAKE2b with 8 bytes of digest, keyed with the text
"seed:epoch", of the round number (one byte) and the right half (eight bytes, little endian), cut to h bits.
"""

from __future__ import annotations

from hashlib import blake2b

ROUNDS = 6


def order(seed: int, sample_index: int, size: int) -> int:
    """Data set index of the sample_index-th sample of a run; each epoch of `size` samples has its own order."""
    if sample_index < 0 or size < 1:
        raise ValueError(f"sample_index={sample_index} must be >= 0 and size={size} >= 1")
    epoch, position = divmod(sample_index, size)
    half_bits = ((size - 1).bit_length() + 1) // 2
    key = f"{seed}:{epoch}".encode()
    position = _feistel(position, half_bits, key)
    while position >= size:
        position = _feistel(position, half_bits, key)
    return position


def _feistel(value: int, half_bits: int, key: bytes) -> int:
    """A permutation of 0 … 4**half_bits - 1."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for number in range(ROUNDS):
        message = bytes([number]) + right.to_bytes(8, "little")
        mixed = int.from_bytes(blake2b(message, key=key, digest_size=8).digest(), "little")
        left, right = right, left ^ (mixed & mask)
    return (left << half_bits) | right
