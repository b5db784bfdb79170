"""Amazon SageMaker: what a training job of it is asked for, and what its containers hold."""
