"""The memory that a CPU rank frees: it stays with the process, since the next step asks for it again.

A training step allocates and frees the same large buffers again and again: gathered parameters, gradients, activations.
glibc gives freed memory back to the system, which hands out and clears each page anew when it is touched next.
"""

from __future__ import annotations

import ctypes
import os

# glibc's names and numbers of its settings (malloc.h), and what they are set to; the first value that it takes.
_SETTINGS = {
    # Smaller buffers come from the heap, not each from a mapping of its own; older ones take 32 MiB at most.
    "MALLOC_MMAP_THRESHOLD_": (-3, (1 << 30, 32 << 20)),
    "MALLOC_TRIM_THRESHOLD_": (-1, ((1 << 31) - 1,)),  # so much may lie free at the heap's end; the largest it takes
    "MALLOC_TOP_PAD_": (-2, (64 << 20,)),  # by which the heap grows
}


def keep_freed_memory() -> None:
    """Let this process keep what it frees. A setting of glibc in the environment is the user's word on that.

    Where malloc is not glibc's, nothing changes.
    """
    settle = getattr(ctypes.CDLL(None), "mallopt", None)
    if settle is not None and not any(name in os.environ for name in (*_SETTINGS, "GLIBC_TUNABLES")):
        for number, values in _SETTINGS.values():
            for value in values:
                if settle(number, value):
                    break
