"""The division of a loss: the one place, for jobs (`token`, `sample`, `pair`) and for scripts of SMP (`smp_mean`).

Losses are sums. Their normalisation is the seed of backward, so no gradient is ever divided; reductions are sums too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class LossCounts(NamedTuple):
    """The counts over which a step's loss is summed, on all ranks together.

    Attributes:
        tokens: counted labels (rows, where labels are no class ids).
        samples: documents, or rows of conversations, with a counted label (sequences, where these are not isolated);
            or pairs of preferences. Of interest under a mean over samples or pairs alone.
        microbatches: of one rank.
        data_ranks: ranks that read different rows.
    """

    tokens: int = 0
    samples: int = 0
    microbatches: int = 1
    data_ranks: int = 1


class Normalisation(Protocol):
    """The rule by which summed losses become one number.

    Attributes:
        name: in the plan.
        sentence: for the plan's table.
        weighs_samples: a label's loss is multiplied by 1 / (counted labels of its sample) before it is summed.
    """

    name: str
    sentence: str
    weighs_samples: bool = False

    def divisor(self, counts: LossCounts) -> int:
        """Return what the sum of the losses is divided by."""
        ...

    def seed(self, counts: LossCounts, loss_scale: float = 1.0) -> float:
        """Return the gradient of each microbatch's summed loss: `loss_scale` (of fp16) over the divisor."""
        return loss_scale / self.divisor(counts)

    def mean(self, total: float, counts: LossCounts) -> float:
        """Return the loss to report, of the sum over all ranks."""
        return total / self.divisor(counts)


class TokenMean(Normalisation):
    """The mean over the counted tokens of the step, whichever ranks hold them."""

    name = "token"
    sentence = "sum of the losses / counted tokens of all ranks, applied once"

    def divisor(self, counts: LossCounts) -> int:
        """Return the counted tokens; 1 where there is none, whose gradients are 0."""
        return max(counts.tokens, 1)


class SampleMean(Normalisation):
    """The mean over the samples of the step of each one's own mean: long answers weigh as much as short ones."""

    name = "sample"
    sentence = "sum of the samples' mean losses / samples of all ranks, applied once"
    weighs_samples = True

    def divisor(self, counts: LossCounts) -> int:
        """Return the samples that have a counted label; 1 where there is none, whose gradients are 0."""
        return max(counts.samples, 1)


class PairMean(SampleMean):
    """The mean over the pairs of preferences of the step, each of which has one loss."""

    name = "pair"
    sentence = "sum of the pairs' losses / pairs of all ranks, applied once"


class SmpMean(Normalisation):
    """SMP's mean of means: a script's loss is a mean already, averaged over microbatches and data ranks."""

    name = "smp_mean"
    sentence = "the script's means / (microbatches x data ranks)"

    def divisor(self, counts: LossCounts) -> int:
        """Return microbatches x data ranks."""
        return counts.microbatches * counts.data_ranks


TOKEN_MEAN, SAMPLE_MEAN, PAIR_MEAN, SMP_MEAN = TokenMean(), SampleMean(), PairMean(), SmpMean()
NORMALISATIONS: dict[str, Normalisation] = {kind.name: kind for kind in (TOKEN_MEAN, SAMPLE_MEAN, PAIR_MEAN, SMP_MEAN)}
