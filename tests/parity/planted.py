"""Jobs on which faults are planted: two-layer models of several families, two ranks unless the keys say otherwise."""

from __future__ import annotations

import csv
import random
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from shardwise.errors import ShardwiseError
from shardwise.job.schema import Job
from shardwise.job.sources import load_job
from shardwise.plan.plan import World, resolve
from shardwise.testing.comparison import VerifyReport
from shardwise.testing.faults.registry import FAULTS
from tests.parity.jobs import facts_of, make_job, span_job, tensor_job, verify_one
from tests.parity.test_experts import experts_job

TABLE = Path(__file__).with_name("planted_faults.csv")
DROPOUT = 0.1
EXPERT_FAMILIES = ("qwen3_moe", "glm4_moe")  # whose experts ranks share


class PlantedFault(NamedTuple):
    """A row of the table; `diagnosis` holds the names that are right, separated by spaces."""

    fault: str
    family: str
    keys: str
    diagnosis: str

    @property
    def label(self) -> str:
        return f"{self.fault} {self.family} {self.keys}".strip()


def planted_faults() -> list[PlantedFault]:
    """Return the rows of the table."""
    with TABLE.open() as file:
        return [PlantedFault(**row) for row in csv.DictReader(file)]


def planted_job(corpora: Path, family: str, keys: str) -> tuple[int, Job]:
    """Return the number of ranks and the job of a row."""
    given: dict[str, Any] = {"parallel.workers": 2}
    words = shlex.split(keys)
    while words:
        key = words.pop(0).removeprefix("--")
        given[key] = yaml.safe_load(words.pop(0)) if words and not words[0].startswith("--") else True
    ranks = given["parallel.workers"]
    given = {"precision.compute": "fp32", "optimizer.clip_norm": 0.1, **given}
    attention = given.pop("model.attention", None)
    job = _base(corpora, family)
    if attention is None and given["precision.compute"] == "fp16":
        attention = "auto"  # eager is refused there, since its scores overflow
    given |= {"model.attention": attention} if attention else {}
    return ranks, load_job(job, given)


def _base(corpora: Path, family: str) -> Job:
    training = {"training": {"sequences_per_step": 8, "microbatch_size": 1, "steps": 20}}
    if family == "bert":
        return tensor_job(corpora, "bert", **training)
    if family == "t5":
        return span_job(corpora, dropout=DROPOUT, **training)
    if family == "gpt2":
        return tensor_job(corpora, "gpt2", dropout=DROPOUT, **training)
    if family == "llamakv1":
        return tensor_job(corpora, "llama", config={"num_key_value_heads": 1}, **training)
    if family == "llama4":
        return make_job(corpora, model={"config": LLAMA4, "attention": "eager"}, **training)
    if family in EXPERT_FAMILIES:
        return experts_job(corpora, family, config={"experts_implementation": "eager"}, **training)
    return tensor_job(corpora, family, tied=False, **training)


LLAMA4 = {
    "model_type": "llama4_text", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "num_hidden_layers": 2, "intermediate_size": 13, "intermediate_size_mlp": 13, "num_local_experts": 2,
    "vocab_size": 97, "max_position_embeddings": 16, "attention_chunk_size": 8,
}  # fmt: skip


def verify_planted(job: Job, fault: str, steps: int = 2) -> VerifyReport | None:
    """Verify with a fault; run on every rank of a world. Tokens are cached apart from those of right jobs."""
    apart = job.data.model_copy(update={"cache_directory": f"{job.data.cache_directory}-{fault}"})
    with FAULTS[fault]():
        return verify_one(job.model_copy(update={"data": apart}), steps)


HEALTHY: dict[str, list[str]] = {
    "--precision.compute": ["fp64", "fp32", "bf16", "fp16"],
    "--parallel.workers": ["1", "2", "4"],
    "--parallel.sharded_data_parallel_degree": ["1", "2"],
    "--parallel.tensor_parallel_degree": ["2"],
    "--parallel.pipeline_parallel_degree": ["2"],
    "--parallel.context_parallel_degree": ["2"],
    "--parallel.context_parallel_method": ["ring", "ulysses"],
    "--parallel.sequence_parallel": ["true", "false"],
    "--parallel.shard_optimizer_state": ["true"],
    "--memory.activation_checkpointing": ["full", "selective"],
    "--memory.loss_chunk_tokens": ["7"],
    "--model.attention": ["eager", "sdpa", "auto"],
    "--optimizer.name": ["SGD", "AdamW", "Adam", "NAdam", "RMSprop"],
    "--optimizer.clip_norm": ["0.1", "null", "100.0"],
    "--optimizer.learning_rate": ["2e-5", "1e-2"],
    "--optimizer.warmup_steps": ["0", "100"],
    "--training.label_smoothing": ["0.1"],
    "--training.z_loss": ["1e-4"],
    "--training.sequences_per_step": ["5", "8"],
    "--training.microbatch_size": ["1", "2"],
    "--data.isolate_documents": ["true"],
}
FAMILIES = ("llama", "llama", "gpt2", "gpt2", "bert", "mixtral", "t5", "qwen3", "llamakv1", "llama4")


def draw_healthy(draw: random.Random, corpora: Path) -> tuple[str, str, int, Job]:
    """Draw a legal job: (family, keys, ranks, job)."""
    while True:
        family = draw.choice(FAMILIES)
        chosen = {key: draw.choice(values) for key, values in HEALTHY.items() if draw.random() < 0.25}
        chosen.setdefault("--precision.compute", draw.choice(HEALTHY["--precision.compute"]))
        keys = " ".join(f"{key} {value}" for key, value in chosen.items())
        try:
            ranks, job = planted_job(corpora, family, keys)
            resolve(job, World(ranks, "cpu", ranks), facts_of(job))
        except ShardwiseError:
            continue
        return family, keys, ranks, job
