"""Collectives: those that stand at the borders of tensor and sequence parallelism."""
