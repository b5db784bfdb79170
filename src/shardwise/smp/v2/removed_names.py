"""Names that public scripts of version 2 take from transformers 4 and transformers 5 has no more.

Each leads to what does its work now, with a line that says so. There are two, and no more unless a published script
needs one: `LlamaFlashAttention2`, which scripts put in the place of each layer's attention, and the rotary tables of
each GPT-NeoX layer, which they move to the device. One keyword that only SMP's build of torch had stands with them.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import optimizer as optimizer_files
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from shardwise.errors import ConfigError

FLASH, TABLES = "LlamaFlashAttention2", "rotary_emb"
_llama: Any = modeling_llama
_neox: Any = modeling_gpt_neox.GPTNeoXAttention
_told: set[str] = set()


class _LlamaAttention(modeling_llama.LlamaAttention):
    """Llama's attention, which takes the kernel that the config names; made without its layer's number, as before."""

    def __init__(self, config: Any, layer_idx: int | None = None) -> None:
        super().__init__(config, layer_idx)  # type: ignore[arg-type]
        _tell(f"{FLASH} is no more in transformers: it is LlamaAttention, with {config._attn_implementation} attention")


def accept_process_group() -> None:
    """Let torch's `load_sharded_optimizer_state_dict` take the `process_group` that SMP's own build of torch takes.

    Scripts import the function before `tsm.init`, so it is changed when `torch.sagemaker` is imported, for good.
    """
    if "process_group" not in inspect.signature(optimizer_files.load_sharded_optimizer_state_dict).parameters:
        files: Any = optimizer_files
        files.load_sharded_optimizer_state_dict = _with_group(files.load_sharded_optimizer_state_dict)


def _with_group(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def call(*args: Any, process_group: Any = None, **kwargs: Any) -> Any:
        """Raises ConfigError for a group that is not of all ranks, over which torch would deal the state."""
        ranks = 1 if process_group is None else dist.get_world_size(process_group)
        if process_group is not None and ranks != dist.get_world_size():
            raise ConfigError(
                f"load_sharded_optimizer_state_dict: torch deals the state over all {dist.get_world_size()} ranks, and "
                f"process_group has {ranks}; shard over all ranks, or use save_model_checkpoint (use_pg_with_util)"
            )
        return load(*args, **kwargs)

    call.__signature__ = inspect.signature(call, follow_wrapped=False)  # type: ignore[attr-defined]
    return call


def install() -> None:
    """Put the names where they were; what is there stays, and a second call does nothing."""
    if not hasattr(modeling_llama, FLASH):
        _llama.LlamaFlashAttention2 = _LlamaAttention
    if not hasattr(_neox, TABLES):
        _neox.rotary_emb = property(_tables)


def uninstall() -> None:
    """Take them out again."""
    if getattr(modeling_llama, FLASH, None) is _LlamaAttention:
        del _llama.LlamaFlashAttention2
    if isinstance(vars(_neox).get(TABLES), property):
        del _neox.rotary_emb


def _tables(attention: Any) -> Any:
    _tell("layers of GPT-NeoX have no rotary tables in transformers: the model has one, which FSDP moves to the device")
    empty = SimpleNamespace(sin_cached=torch.empty(0), cos_cached=torch.empty(0))
    return vars(attention).setdefault("_rotary_tables", empty)


def _tell(text: str) -> None:
    from shardwise.smp.v2.state_handler import state

    if text not in _told and state.rank == 0:
        print(f"note: {text}.", file=sys.stderr)
    _told.add(text)
