"""Mistakes that distributed training programs make, planted on purpose, to prove that `shardwise verify` names them."""
