"""Closed forms of step time and memory."""
