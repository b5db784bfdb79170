"""The run itself: initialization, optimizer, step, trainer and the output directory."""
