"""Forecasts before anything runs: accelerators and closed forms. Pure, no torch.distributed."""
