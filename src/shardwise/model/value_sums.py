"""Sums that change with the values of parameters, by which writes behind autograd's back (`weight.data`) are seen."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise._torch_compat.tracing import is_fake


def value_sum(parameter: Tensor) -> Tensor | None:
    """Return a sum of the values by their places, in fp64, so that rows that are exchanged change it too.

    None of a fake parameter, which has no values.
    """
    if is_fake(parameter):
        return None
    detached = parameter.detach().resolve_conj()
    real = torch.view_as_real(detached) if detached.is_complex() else detached
    values = real.reshape(-1).double().nan_to_num()
    return (values * torch.arange(1, len(values) + 1, device=values.device)).sum()


def is_other(now: Tensor | None, before: Tensor | None) -> bool:
    """Tell whether two sums of one parameter differ; those of fake ones never do."""
    return now is not None and before is not None and not torch.equal(now, before)
