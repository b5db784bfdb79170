"""Modules of SMP's tensor parallelism, version 2."""
