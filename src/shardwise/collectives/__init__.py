"""Collectives: so far the two that stand at the borders of tensor parallelism."""
