"""Distributed modules."""
