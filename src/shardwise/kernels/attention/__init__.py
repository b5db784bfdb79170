"""Attention: one entry point (dispatch.py) and the kernels behind it."""
