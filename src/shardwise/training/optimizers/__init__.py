"""Optimizers of this package: their tensors are slices of whole ones, and they know which."""
