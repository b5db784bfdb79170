"""An accelerator that is not there, for fake tensors, and the discipline that code of a real one needs.

`device.py` begins: inside `simulated_device()` torch has a device `simulated:0`, whose tensors are shapes alone.
`streams.py` has its streams, which know what is done when; `memory.py` counts its memory, apart from the host's;
`discipline.py` finds what would be slow or wrong on a real device, at its line.
"""
