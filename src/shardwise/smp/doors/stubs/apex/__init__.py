"""Stands for NVIDIA's apex where scripts import it: what scripts of SMP call of it beside its `amp`, in plain torch."""
