"""Attention in the place of that of transformers."""
