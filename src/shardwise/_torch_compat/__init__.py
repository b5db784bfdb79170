"""The only place that imports and calls private names of torch; each says which public name it waits for.

A file for each part of torch: `fsdp2` and `fsdp1`, `pipelining`, `groups`, `operators`, `autograd`, `modules`,
`optimizers` and `tracing`.
"""
