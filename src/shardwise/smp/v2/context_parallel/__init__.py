"""Context parallelism of SMP, version 2."""
