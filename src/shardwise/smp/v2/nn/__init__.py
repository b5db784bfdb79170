"""Modules of SMP, version 2."""
