"""Export of a trained model as a Hugging Face directory, one logical tensor at a time.

Every rank takes part in gathering a tensor, rank 0 streams it to disk; the whole model never exists in memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.checkpoint.hugging_face import HuggingFaceWriter
from shardwise.parallel.model import ParallelModel


def export_hugging_face(model: ParallelModel, path: Path, tokenizer_directory: str | None) -> None:
    """Write `path` so that `from_pretrained` opens it; a user's own module as safetensors alone. Collective.

    Ties are stored once, under their first name.

    Raises:
        OutputError: rank 0 cannot write; nothing is left behind.
    """
    with _writer(model, path, tokenizer_directory) as writer:
        for entry in model.tensor_map:
            whole = entry.whole()
            if writer is not None:
                writer.add(entry.name, whole.cpu())
        if writer is not None:
            writer.finish()
    dist.barrier()


def _writer(
    model: ParallelModel, path: Path, tokenizer_directory: str | None
) -> AbstractContextManager[HuggingFaceWriter | None]:
    """The writer on rank 0, None elsewhere."""
    if dist.get_rank() != 0:
        return nullcontext()
    module: Any = model.module
    config = module.config if model.facts.is_hugging_face else None
    generation = getattr(module, "generation_config", None)
    return HuggingFaceWriter(path, config, tokenizer_directory, generation_config=generation)
