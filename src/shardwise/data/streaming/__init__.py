"""Sources that are read, tokenized and shuffled while a model is trained on them."""
