"""Export of a trained model as a Hugging Face directory, one logical tensor at a time.

Every rank takes part in gathering a tensor, rank 0 streams it to disk; the whole model never exists in memory.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from shardwise.checkpoint.hugging_face import HuggingFaceWriter
from shardwise.parallel.model import ParallelModel


def export_hugging_face(model: ParallelModel, path: Path, tokenizer_directory: str | None) -> None:
    """Write `path` so that `from_pretrained` opens it. Collective; ties are stored once, under their first name.

    Raises:
        OutputError: rank 0 cannot write.
    """
    config = getattr(model.module, "config", None)
    writer = HuggingFaceWriter(path, config, tokenizer_directory) if dist.get_rank() == 0 else None
    for entry in model.tensor_map:
        whole = entry.whole()
        if writer is not None:
            writer.add(entry.name, whole.cpu())
    if writer is not None:
        writer.finish()
    dist.barrier()
