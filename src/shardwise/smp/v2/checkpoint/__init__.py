"""Helpers of SMP's checkpoints, version 2."""
