"""Shardwise as a library: a Job object, its plan, and a training that returns numbers.

python examples/library.py
"""

from __future__ import annotations

import sys

from shardwise import Job, load_job, train
from shardwise.commands.train import plan_job

JOB = Job(
    model={"config": {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192,
                      "num_hidden_layers": 2, "num_attention_heads": 4}},
    data={"vocabulary_size": 512, "sequence_length": 64, "max_documents": 40},
    training={"steps": 40, "sequences_per_step": 16},
    parallel={"workers": 2, "sharded_data_parallel_degree": 2},
    output="runs/library",
)  # fmt: skip


def main() -> None:
    job = load_job(JOB, sys.argv[1:])  # the same dotted keys as on the command line, e.g. --training.steps 10
    plan = plan_job(job)
    print(f"{plan.degrees['shard']} ranks share the state of the model, {plan.accumulation} microbatches a step")
    result = train(job)
    print(f"validation loss {result.validation_loss:.2f}, unigram entropy {result.unigram_entropy:.2f}")


if __name__ == "__main__":  # workers import this file; only the first process starts them
    main()
