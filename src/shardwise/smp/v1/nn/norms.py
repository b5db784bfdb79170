"""Layer normalization under the name that scripts look for."""

from __future__ import annotations

from torch import nn


class FusedLayerNorm(nn.LayerNorm):
    """Layer normalization with apex's constructor; torch's own kernel is fused already.

    Args:
        normalized_shape: trailing dims that are normalized.
        eps: added to the variance.
        elementwise_affine: whether there are weight and bias.
    """


LayerNorm = FusedLayerNorm  # its name in older scripts
