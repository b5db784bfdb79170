"""Distributed checkpoints of SMP, version 2."""
