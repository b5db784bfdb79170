"""The keys of an adapter that a job starts from, against those of the job."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.job.schema import Job
from shardwise.model.adapter_config import with_adapter

STORED = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["v_proj", "q_proj"]}


def started(directory: Path, **keys: object) -> Job:
    (directory / "adapter_config.json").write_text(json.dumps(STORED))
    return with_adapter(Job.model_validate({"adapter": {"path": str(directory), **keys}}))


def test_a_job_has_the_keys_of_its_adapter(tmp_path: Path) -> None:
    job = started(tmp_path, rank=4)
    adapter = job.adapter
    assert (adapter.kind, adapter.rank, adapter.alpha, adapter.dropout) == ("lora", 4, 16, 0.1)
    assert adapter.target_modules == ["q_proj", "v_proj"] and adapter.path == str(tmp_path)
    assert with_adapter(job) == job
    assert started(tmp_path, dropout=0.0).adapter.dropout == 0.0
    assert started(tmp_path, target_modules=["v_proj", "q_proj"]).adapter.target_modules == ["q_proj", "v_proj"]
    assert with_adapter(Job()) == Job()


OTHERWISE = [("rank", 8), ("alpha", 8.0), ("kind", "dora"), ("modules_to_save", ["lm_head"]), ("rslora", True),
             ("target_modules", ["q_proj"])]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), OTHERWISE)
def test_a_key_that_says_otherwise_is_refused(tmp_path: Path, key: str, value: object) -> None:
    """A default that is written out too, and a key that the file leaves out."""
    with pytest.raises(
        ConfigError, match=rf"adapter.{key}={re.escape(repr(value))}: the adapter in .* has .*leave adapter.{key} out"
    ):
        started(tmp_path, **{key: value})
