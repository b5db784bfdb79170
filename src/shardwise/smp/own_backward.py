"""A script's own `loss.backward()` in the place of `model.backward(loss)`: noticed at the output, and refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.smp.exceptions import StepUsageError
from shardwise.smp.nesting import tensors


class OwnBackward:
    """Watches outputs of the model for a backward of the script's own, while `refused` is true.

    Hooks of tensors hold this alone, which leads back to nothing: outputs go with the step that made them, and do not
    wait for Python to look for cycles.

    Args:
        what: what the script does, and what goes wrong by it.
    """

    def __init__(self, what: str, refused: bool = False) -> None:
        self.what, self.refused = what, refused

    def watch(self, output: Any) -> Any:
        """The `output`, whose tensors know of a backward through them."""
        for tensor in tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._refuse)
        return output

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """While the backward is the library's."""
        self.refused = False
        try:
            yield
        finally:
            self.refused = True

    def _refuse(self, gradient: Tensor) -> None:
        if self.refused:
            raise StepUsageError(f"{self.what}; use model.backward(loss) in the place of loss.backward()")
