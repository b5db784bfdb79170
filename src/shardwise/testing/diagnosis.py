"""Names the mistake behind a disagreement: a table of signatures, each a question put to the oracle.

A wrong gradient is written as a combination of what every microbatch of every rank should have brought: coefficients
of 0, 2 or 1/n then say what was lost, doubled or averaged. Where no combination fits, the oracle is asked to make the
suspected mistake itself (labels shifted, documents leaked, another step's dropout; another eps) and the mistake that
reproduces our numbers is the diagnosis. Where none does, it is the first module at which the two runs part.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.testing import gradient_mistakes as gradients
from shardwise.testing import update_mistakes as updates
from shardwise.testing.evidence import Diagnosis, Evidence

GRADIENT = {"gradient", "direction"}
# Judged in order; a signature is asked only where one of its quantities disagrees.
SIGNATURES: tuple[tuple[set[str], Callable[[Evidence], Diagnosis | None]], ...] = (
    ({"data"}, gradients.misread),
    ({"dtype"}, gradients.wrong_dtypes),
    (GRADIENT | {"loss", "loss of outputs", "parameter"}, gradients.broken_ties),
    (GRADIENT | {"loss", "norm"}, gradients.not_finite),
    (GRADIENT | {"loss"}, gradients.adapter_scaled_twice),
    (GRADIENT | {"loss"}, gradients.reference_not_frozen),
    (GRADIENT, gradients.unreduced_replicas),
    (GRADIENT, gradients.local_means),
    (GRADIENT, gradients.one_scale),
    (GRADIENT, gradients.odd_parts),
    (GRADIENT, gradients.kept_gradients),
    (GRADIENT | {"loss"}, gradients.stale_weights),
    (GRADIENT | {"loss"}, gradients.batch_mistake),
    (GRADIENT, gradients.dropout_alone),
    (GRADIENT | {"gradient copies"}, gradients.unsummed_copies),
    (GRADIENT, gradients.some_tensors),
    (GRADIENT | {"loss"}, gradients.where_it_begins),
    ({"gradient copies"}, gradients.gradients_apart),
    ({"loss", "loss of outputs"}, gradients.wrong_loss),
    ({"norm"}, updates.wrong_norm),
    ({"clipping"}, updates.wrong_clipping),
    ({"options"}, updates.wrong_options),
    ({"parameter", "update", "replicas"}, updates.stale_slices),
    ({"parameter", "update"}, updates.wrong_update),
    ({"replicas"}, updates.copies_apart),
)


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """Return the first signature that fits."""
    for quantities, signature in SIGNATURES:
        if quantities & evidence.wrong.keys() and (diagnosis := signature(evidence)):
            return diagnosis
    return None
