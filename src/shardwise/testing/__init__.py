"""For proofs: worlds of ranks, the one-process oracle and planted faults."""
