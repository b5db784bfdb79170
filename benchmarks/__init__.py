"""Benchmarks: each module prints a table and writes JSON; every peer runs in the same run as shardwise.

Run them from a clone, e.g. `python -m benchmarks.training_cpu --json result.json`; the peers come with
`pip install '.[bench-peers]'`. What was measured, with date and commit, is in `docs/benchmarks/`.
"""
