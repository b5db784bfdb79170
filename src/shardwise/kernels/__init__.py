"""Numerical pieces that replace a model's own: the chunked loss and layout-independent dropout."""
