"""Mixtures of experts in SMP, version 2."""
