"""The output projection, taken out of the model's forward so that the loss can run it in chunks."""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.kernels.loss import VocabularyShard


class DeferredHead:
    """An output projection whose forward returns its input while it is deferred.

    `weight` and `bias` are read when the loss runs: FSDP2 then holds them gathered, in the compute dtype. `vocabulary`
    says which rows of them this rank holds, if not all. `seed` is the gradient that backward will bring to the summed
    loss, for a loss that takes its gradients in forward; 1 without backward.
    """

    def __init__(self, head: nn.Module, vocabulary: VocabularyShard | None = None) -> None:
        self.head, self.vocabulary, self.deferred = head, vocabulary, True
        self.seed: Tensor | float = 1.0
        self._forward = head.forward
        head.forward = self._run_or_defer  # type: ignore[method-assign]

    def _run_or_defer(self, hidden: Tensor) -> Tensor:
        if self.deferred:
            return hidden
        logits: Tensor = self._forward(hidden)
        return logits

    @property
    def weight(self) -> Tensor:
        return self.head.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        return self.head.bias  # type: ignore[return-value]
