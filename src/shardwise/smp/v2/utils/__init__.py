"""Small helpers of SMP, version 2."""
