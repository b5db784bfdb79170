"""How scripts written for SageMaker come in: the import hook, the CPU in CUDA's place, stubs of absent packages."""
