"""A script's own `loss.backward()` in the place of `model.backward(loss)`, noticed at the model's output.

In a step it is refused: it would run before the other microbatches and stages have had their turn. Outside of one there
are no stages, and it gets what `model.backward` does around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise._torch_compat.autograd import at_end_of_backward, number_of_backward
from shardwise.smp.exceptions import StepUsageError
from shardwise.smp.nesting import map_leaves, nested_tensors


class OwnBackward:
    """Watches outputs of the model in a step for a backward of the script's own, while `refused` is true.

    Hooks of tensors hold this alone, which leads back to nothing: outputs go with the step that made them, and do not
    wait for Python to look for cycles.

    Args:
        what: what the script does, and what goes wrong by it.
    """

    def __init__(self, what: str) -> None:
        self.what, self.refused = what, False

    def watch(self, output: Any) -> Any:
        """The `output`, whose tensors know of a backward through them."""
        for tensor in nested_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(self._refuse)
        return output

    def _refuse(self, gradient: Tensor) -> None:
        if self.refused:
            raise StepUsageError(f"{self.what}; use model.backward(loss) in the place of loss.backward()")


class OutsideBackward:
    """Leads a backward through outputs of the model outside of a step, unless it is the library's.

    Args:
        begin: is called when a backward reaches an output, and says by what the gradients are multiplied.
        finish: is called when all gradients of that backward are there.
    """

    def __init__(self, begin: Callable[[], float], finish: Callable[[], None]) -> None:
        self.begin, self.finish = begin, finish
        self._library, self._number, self._seed = False, -1, 1.0

    def watch(self, output: Any) -> Any:
        """The `output` with views of its tensors: a loss that comes from the logits beside it passes one of them."""
        return map_leaves(self._watched, output)

    @contextmanager
    def library(self) -> Iterator[None]:
        """While the backward is the library's."""
        self._library = True
        try:
            yield
        finally:
            self._library = False

    def _watched(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        view = leaf.view_as(leaf)
        view.register_hook(self._arrived)
        return view

    def _arrived(self, gradient: Tensor) -> Tensor:
        if self._library:
            return gradient
        if (number := number_of_backward()) != self._number:
            self._number, self._seed = number, self.begin()
            # FSDP2 ends its own backward by such a call, which it is yet to ask for: this one goes behind it.
            at_end_of_backward(lambda: at_end_of_backward(self.finish))
        return gradient * self._seed
