"""Shardwise's own side of the benchmarks, apart from the peers."""
