"""A run that hangs or is slow: where each rank is, in one sentence."""
