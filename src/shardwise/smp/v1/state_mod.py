"""`smp.state_mod.state`, where scripts of 2021 and 2022 look for the names of tensor-parallel parameters."""

from shardwise.smp.v1.session import state

__all__ = ["state"]
