"""Processes and process groups: local workers, torchrun, Slurm and Open MPI."""
