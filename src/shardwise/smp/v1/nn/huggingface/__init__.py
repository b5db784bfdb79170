"""`smp.nn.huggingface`: six families of transformers' models as `smp.nn`'s modules, and their weights' names."""
