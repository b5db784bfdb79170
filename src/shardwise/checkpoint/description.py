"""The words of a manifest about a run, beside its tensors: job and plan, the model's config, adapters, versions."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import torch
import transformers

import shardwise
from shardwise.checkpoint.adapters import hash_of_base
from shardwise.checkpoint.manifest import (
    AdapterRecord,
    FileRecord,
    Manifest,
    Progress,
    Scaler,
    TensorRecord,
    written_version,
)
from shardwise.checkpoint.state import leaves_out_base
from shardwise.checkpoint.storage_write import Describe
from shardwise.kernels.precision import LossScaler
from shardwise.model.adapter_config import adapter_config, adapter_settings
from shardwise.model.routers import config_as_given
from shardwise.parallel.model import ParallelModel


class RunDescription:
    """Makes the manifests of one run.

    Args:
        data: what they say of the data.
    """

    def __init__(self, model: ParallelModel, data: dict[str, Any]) -> None:
        self.model, self.data = model, data

    def describer(self, progress: Progress, scaler: LossScaler) -> Describe:
        """Return the manifest's maker, with everything that changes as training goes on read now. Collective."""
        plan, module = self.model.plan, self.model.module
        state = Scaler(scale=scaler.scale, good_steps=scaler.good_steps, hysteresis=scaler.hysteresis)
        adapter = self._adapter
        ties = {first: list(others) for first, *others in self.model.facts.ties}
        facts = self.model.facts
        config = config_as_given(module, facts.adds_balancing_loss).to_dict() if facts.has_config else None
        generation: Any = getattr(module, "generation_config", None) if config is not None else None

        def describe(
            scalars: dict[str, Any], tensors: dict[str, TensorRecord], files: dict[str, FileRecord]
        ) -> Manifest:
            return Manifest(
                progress=progress,
                scaler=state,
                optimizer=plan.job.optimizer.name,
                optimizer_scalars=scalars,
                tensors=tensors,
                ties=ties,
                version=written_version(progress, adapter, tensors),
                adapter=adapter,
                files=files,
                job=plan.job.model_dump(mode="json"),
                plan=plan.to_dict(),
                data=self.data,
                config=config,
                generation=None if generation is None else generation.to_diff_dict(),
                versions=versions(),
                written=datetime.now(UTC).isoformat(timespec="seconds"),
            )

        return describe

    @cached_property
    def _adapter(self) -> AdapterRecord | None:
        """The record of the adapters and their base. Collective where it is a directory."""
        job, facts = self.model.plan.job, self.model.facts
        if not facts.adapters:
            return None
        config = adapter_config(job, adapter_settings(job.adapter), facts.adapters)
        base = job.model.path if leaves_out_base(self.model) else None
        base_hash = hash_of_base(base) if base is not None else ""
        return AdapterRecord(
            config=config, layers=facts.adapters, base=base or "", base_hash=base_hash, packed=dict(facts.packed)
        )


def versions() -> dict[str, str]:
    """Return the versions of everything that decides what a run computes."""
    return {
        "shardwise": shardwise.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
