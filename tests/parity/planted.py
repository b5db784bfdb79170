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
from shardwise.testing.faults.adapters import ADAPTER_FAULTS
from shardwise.testing.faults.axes import AXIS_FAULTS
from shardwise.testing.faults.batches import BATCH_FAULTS
from shardwise.testing.faults.experts import EXPERT_FAULTS
from shardwise.testing.faults.gradients import GRADIENT_FAULTS
from shardwise.testing.faults.patching import Fault
from shardwise.testing.faults.precision import PRECISION_FAULTS
from shardwise.testing.faults.preference import PREFERENCE_FAULTS
from shardwise.testing.faults.registry import FAULTS
from shardwise.testing.faults.rows import ROW_FAULTS
from shardwise.testing.faults.updates import UPDATE_FAULTS
from shardwise.training.setup import study
from tests.data.chats import PLAIN, byte_tokenizer, write_rows
from tests.parity.jobs import facts_of, make_job, make_module_job, span_job, tensor_job, verify_one
from tests.parity.test_experts import experts_job

TABLE = Path(__file__).with_name("planted_faults.csv")
KINDS: dict[str, dict[str, Fault]] = {
    "gradients": GRADIENT_FAULTS,
    "parallel axes": AXIS_FAULTS,
    "updates": UPDATE_FAULTS,
    "dtypes": PRECISION_FAULTS,
    "data, start, evaluation": BATCH_FAULTS,
    "experts": EXPERT_FAULTS,
    "rows, adapters and preferences": ROW_FAULTS | ADAPTER_FAULTS | PREFERENCE_FAULTS,
}
UNNAMED = ("", "unknown_gradient", "unknown_loss")  # which say where a mistake begins, not which it is
DROPOUT = 0.1
FORMATS = {"sft": "prompt_completion", "dpo": "preference"}
OBJECTIVES = tuple(FORMATS)  # of a llama
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

    @property
    def is_named(self) -> bool:
        """Return True where the cause has a name; else the diagnosis says where it begins."""
        return not any(expected.partition(":")[0] in UNNAMED for expected in self.diagnosis.split())


def planted_faults(kind: str | None = None) -> list[PlantedFault]:
    """Return the rows of the table, or those of one kind."""
    with TABLE.open() as file:
        rows = [PlantedFault(**row) for row in csv.DictReader(file)]
    return rows if kind is None else [row for row in rows if row.fault in KINDS[kind]]


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
    if family in OBJECTIVES:
        return _of_objective(corpora, family, **training)
    if family == "module":
        return make_module_job(corpora, **training)
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
    if family == "mixtral_aux":
        return tensor_job(corpora, "mixtral", tied=False, config=BALANCED, **training)
    return tensor_job(corpora, family, tied=False, **training)


def _of_objective(corpora: Path, objective: str, **sections: Any) -> Job:
    """Return a job that learns answers to sums, or to prefer one answer to another."""
    rows, tokenizer = corpora / f"{objective}.jsonl", corpora / "tokenizer"
    if not rows.exists():
        draw = random.Random(4)
        byte_tokenizer(tokenizer, PLAIN)
        write_rows(rows, [_sum_with_answers(draw, objective) for _ in range(80)])
    data = {"path": str(rows), "tokenizer": str(tokenizer), "sequence_length": 64, "format": FORMATS[objective]}
    config = {"vocab_size": 257, "max_position_embeddings": 64}
    trained = {"dpo": {"beta": 0.7}} if objective == "dpo" else {"objective": "sft"}
    sections["training"] |= trained
    return tensor_job(corpora, "llama", tied=False, config=config, data=data, **sections)


def _sum_with_answers(draw: random.Random, objective: str) -> dict[str, str]:
    a, b = draw.randrange(10), draw.randrange(10)
    prompt, answer = f"{a}+{b}?", " ".join([str(a + b)] * draw.choice([1, 1, 1, 7]))
    if objective == "sft":
        return {"prompt": prompt, "completion": answer}
    return {"prompt": prompt, "chosen": answer, "rejected": " ".join([str(abs(a - b))] * draw.choice([1, 1, 7])) + "!"}


BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
LLAMA4 = {
    "model_type": "llama4_text", "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "num_hidden_layers": 2, "intermediate_size": 13, "intermediate_size_mlp": 13, "num_local_experts": 2,
    "vocab_size": 97, "max_position_embeddings": 16, "attention_chunk_size": 8,
}  # fmt: skip


def verify_planted(job: Job, fault: str, steps: int = 2) -> VerifyReport | None:
    """Verify with a fault; run on every rank of a world.

    Tokens are cached apart from those of right jobs, and the model is studied anew: a fault may lie in either.
    """
    apart = job.data.model_copy(update={"cache_directory": f"{job.data.cache_directory}-{fault}"})
    job = job.model_copy(update={"data": apart})
    with FAULTS[fault]():
        return verify_one(job, steps, study(job))


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
    "--parallel.pipeline": ["simple", "zero_bubble", "zbv"],
    "--parallel.virtual_pipeline_degree": ["2"],
    "--parallel.reshard_after_forward": ["false"],
    "--memory.activation_checkpointing": ["full", "selective"],
    "--memory.checkpoint_every": ["2"],
    "--memory.offload_parameters": ["true"],
    "--memory.loss_chunk_tokens": ["7"],
    "--model.freeze": ["'[\".*[.]0[.].*\"]'"],
    "--model.attention": ["eager", "sdpa", "auto"],
    "--optimizer.name": ["SGD", "AdamW", "Adam", "NAdam", "RMSprop", "Adamax", "Adagrad", "RAdam", "Adadelta", "Rprop",
                         "ASGD"],
    "--optimizer.options": ["'{\"momentum\":0.9}'", "'{\"betas\":[0.8,0.9]}'", "'{\"maximize\":true}'"],
    "--optimizer.groups": ["'[{\"parameters\":[\".*bias\"],\"learning_rate\":1.0e-4}]'"],
    "--optimizer.weight_decay": ["0.0", "0.5"],
    "--optimizer.schedule": ["linear", "constant"],
    "--optimizer.clip_norm": ["0.1", "null", "100.0"],
    "--optimizer.learning_rate": ["2e-5", "1e-2"],
    "--optimizer.warmup_steps": ["0", "100"],
    "--training.label_smoothing": ["0.1"],
    "--training.z_loss": ["1e-4"],
    "--training.loss_reduction": ["sample"],
    "--training.sequences_per_step": ["5", "8"],
    "--training.microbatch_size": ["1", "2"],
    "--data.isolate_documents": ["true"],
    "--data.validation_split": ["place"],
    "--memory.offload_activations": ["true"],
    "--adapter.kind": ["lora", "dora"],
    "--adapter.dropout": ["0.1"],
}  # fmt: skip
OF_EXPERTS: dict[str, list[str]] = {
    "--parallel.expert_parallel_degree": ["2"],
    "--router.balancing_loss": ["global", "sequence", "model"],
    "--router.balancing_coefficient": ["0.1"],
    "--router.z_loss": ["1e-3"],
    "--router.bias_update_rate": ["0.1"],
}
FAMILIES = (
    *("llama", "gpt2", "module", *EXPERT_FAMILIES, *OBJECTIVES) * 2,
    *(
        "bert",
        "mixtral",
        "mixtral_aux",
        "t5",
        "qwen3",
        "llamakv1",
        "llama4",
        "bloom",
        "gemma",
        "mistral",
        "opt",
        "gptj",
        "falcon",
    ),
)


def draw_healthy(draw: random.Random, corpora: Path) -> tuple[str, str, int, Job]:
    """Draw a legal job: (family, keys, ranks, job)."""
    while True:
        family = draw.choice(FAMILIES)
        keys_of_family = HEALTHY | (OF_EXPERTS if family in EXPERT_FAMILIES else {})
        chosen = {key: draw.choice(values) for key, values in keys_of_family.items() if draw.random() < 0.15}
        if "--adapter.kind" in chosen:
            chosen["--adapter.rank"] = "3"
        chosen.setdefault("--precision.compute", draw.choice(HEALTHY["--precision.compute"]))
        keys = " ".join(f"{key} {value}" for key, value in chosen.items())
        try:
            ranks, job = planted_job(corpora, family, keys)
            resolve(job, World(ranks, "cpu", ranks), facts_of(job))
        except ShardwiseError:
            continue
        return family, keys, ranks, job
