"""Objectives of jobs: what a microbatch gives the model, and what its loss is."""
