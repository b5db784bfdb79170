"""What is recomputed or kept on the host: activation checkpointing and activation offload."""
