"""Tests mirror src/shardwise: tests/<room>/test_<file>.py."""
