"""From a corpus to batches: tokenizers, the token cache, packing, and the order of samples."""
