"""What can be said before anything runs: accelerators and closed forms. Pure, no torch.distributed."""
