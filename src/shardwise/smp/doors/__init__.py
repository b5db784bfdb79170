"""Doors by which scripts written for SageMaker come in: the import hook, CUDA on the CPU, stubs."""
