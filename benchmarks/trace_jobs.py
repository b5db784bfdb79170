"""Full-size jobs, drawn: models of 1 to 70 billion parameters on 8 to 512 accelerators, for `trace_memory`.

A job is a function of its seed and number. What is drawn and is illegal, has no trace, or does not fit by the closed
form, is drawn again.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.job.schema import Job
from shardwise.model.build import build_model
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.plan.plan import Plan, World, resolve
from shardwise.planner.constants.inventory import cluster, presets
from shardwise.planner.constants.presets import preset_config
from shardwise.planner.formulas.memory import estimate
from shardwise.planner.formulas.prediction import Cluster
from shardwise.planner.search.search import world_of
from shardwise.testing.trace.refusals import refuse_untraceable

PAIRS = {"format": "preference", "path": "pairs.jsonl"}
LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 8, "intermediate_size": 9728, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
GPT2_XL = {
    "model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257, "n_positions": 4096,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
MIXTRAL_8X7B = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 8192,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # -> (config, numbers of nodes of eight)
    "Llama 3.2 1B": (LLAMA_1B, (1, 2, 4)),
    "GPT-2 XL": (GPT2_XL, (1, 2, 4)),
    "Qwen3 4B": (QWEN3_4B, (1, 2, 4)),
    "Llama 3 8B": (preset_config(presets()["llama3-8b"]), (1, 4, 8, 16)),
    "GPT-NeoX 13B": (preset_config(presets()["smp-13b"]), (2, 8, 16)),
    "Qwen3 30B-A3B": (QWEN3_30B_A3B, (4, 8, 16)),
    "Mixtral 8x7B": (MIXTRAL_8X7B, (8, 16)),
    "Llama 3 70B": (preset_config(presets()["llama3-70b"]), (16, 32, 64)),
}
WITH_EXPERTS = ("Qwen3 30B-A3B", "Mixtral 8x7B")
TRIES = 1000


@dataclass(frozen=True)
class DrawnJob:
    """A job to be traced, on its cluster.

    Attributes:
        number: of the draw.
        model: its name.
        settings: of the job.
        cluster: where it runs.
    """

    number: int
    model: str
    settings: dict[str, Any]
    cluster: Cluster

    @property
    def world(self) -> World:
        return world_of(self.cluster)

    def resolved(self) -> tuple[Plan, ModelFacts]:
        """Return its plan and its model's facts."""
        job = Job.model_validate(self.settings)
        studied = {section: self.settings[section] for section in ("model", "adapter", "data")}
        facts = _facts(json.dumps(studied))
        return resolve(job, self.world, facts), facts

    def described(self) -> str:
        """Return what sets it apart, in a line."""
        sections = {name: keys for name, keys in self.settings.items() if name not in ("model", "training")}
        keys = {key: value for section in sections.values() for key, value in section.items() if key != "path"}
        keys |= {key: value for key, value in self.settings["model"].items() if key != "config"}
        short = {key.replace("_parallel_degree", "").replace("activation_", ""): value for key, value in keys.items()}
        words = [key if value is True else f"{key} {value}" for key, value in short.items()]
        return ", ".join([f"{self.model} on {self.cluster.size}", *words])


@cache
def _facts(settings: str) -> ModelFacts:
    """Return the facts of a model: many draws have the same."""
    job = Job.model_validate_json(settings)
    return discover(build_model(job), job)


def drawn_job(seed: int, number: int) -> DrawnJob:
    """Return job `number` of a seed's."""
    draws = random.Random(f"{seed}/{number}")
    for _ in range(TRIES):
        job = _draw(draws, number)
        if is_wanted(job):
            return job
    raise AssertionError(f"no legal job among {TRIES} draws of seed {seed}, number {number}")


def is_wanted(drawn: DrawnJob) -> bool:
    """Return whether a job is legal, has a trace, and fits its accelerators by the closed form."""
    try:
        plan, facts = drawn.resolved()
        refuse_untraceable(plan, facts)
    except ShardwiseError:
        return False
    return estimate(plan, facts).total < drawn.cluster.accelerator.memory_bytes


def _draw(draws: random.Random, number: int) -> DrawnJob:
    model = draws.choice([*MODELS])
    config, nodes = MODELS[model]
    where = cluster(f"dgx-h100:{draws.choice(nodes)}")
    parallel = _parallel(draws, model, where.size)
    settings: dict[str, Any] = {
        "model": {"config": config},
        "parallel": parallel,
        "memory": _memory(draws),
        "data": {"sequence_length": draws.choice((1024, 2048, 4096))},
        "precision": {"compute": draws.choice(("bf16", "bf16", "bf16", "fp16", "fp32"))},
        "optimizer": {"name": draws.choice(("AdamW", "AdamW", "AdamW", "AdamW8bit", "AdamWBf16", "Lion", "Adafactor"))},
    }
    settings["data"] |= draws.choice(({}, {}, {}, PAIRS, {"isolate_documents": True}))
    settings["adapter"] = draws.choice(({}, {}, {}, {}, {"kind": "lora"}))
    settings["model"] |= draws.choice(({}, {}, {}, {}, {"attention": "eager"}))
    settings["training"] = _training(draws, parallel, where.size)
    return DrawnJob(number, model, settings, where)


def _parallel(draws: random.Random, model: str, ranks: int) -> dict[str, Any]:
    parallel: dict[str, Any] = {
        "tensor_parallel_degree": draws.choice((1, 1, 2, 4, 8)),
        "pipeline_parallel_degree": draws.choice((1, 1, 2, 4)),
        "context_parallel_degree": draws.choice((1, 1, 1, 2, 4)),
    }
    if parallel["tensor_parallel_degree"] > 1:
        parallel["sequence_parallel"] = draws.choice((True, False))
    if parallel["pipeline_parallel_degree"] > 1:
        parallel |= draws.choice(
            (
                {}, {}, {"virtual_pipeline_degree": 2}, {"pipeline": "simple"}, {"pipeline": "zero_bubble"},
                {"pipeline": "zbv"}, {"pipeline": "dualpipev"},
            )
        )  # fmt: skip
    if parallel["context_parallel_degree"] > 1:
        parallel["context_parallel_method"] = draws.choice(("all_gather", "ulysses", "ring"))
    if model in WITH_EXPERTS:
        parallel["expert_parallel_degree"] = draws.choice((1, 2, 4, 8))
    parallel |= draws.choice(({}, {}, {}, {"reshard_after_forward": False}, {"shard_optimizer_state": True}))
    data = max(1, ranks // _split(parallel))
    if data > 1 and not parallel.get("shard_optimizer_state"):
        parallel["sharded_data_parallel_degree"] = draws.choice((data, data, max(1, data // 2)))
    return {key: value for key, value in parallel.items() if value != 1 or value is True}


def _split(parallel: dict[str, Any]) -> int:
    """Return the ranks that share a sequence."""
    return math.prod(parallel.get(f"{axis}_parallel_degree", 1) for axis in ("tensor", "pipeline", "context"))


def _memory(draws: random.Random) -> dict[str, Any]:
    policy = draws.choice(("none", "full", "full", "selective"))
    memory: dict[str, Any] = {"activation_checkpointing": policy}
    if policy != "none":
        memory |= draws.choice(({}, {}, {"offload_activations": True}, {"checkpoint_every": 2}))
    return memory | draws.choice(({}, {}, {}, {"offload_optimizer": True}, {"offload_parameters": True}))


def _training(draws: random.Random, parallel: dict[str, Any], ranks: int) -> dict[str, Any]:
    microbatch, stages = draws.choice((1, 1, 2, 4)), parallel.get("pipeline_parallel_degree", 1)
    count = draws.choice((1, 2)) if stages == 1 else draws.choice((stages, 2 * stages))
    rows = max(1, ranks // _split(parallel))
    return {"microbatch_size": microbatch, "sequences_per_step": microbatch * count * rows}
