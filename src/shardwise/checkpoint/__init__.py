"""Weights on disk: Hugging Face directories read by slices and written tensor by tensor."""
