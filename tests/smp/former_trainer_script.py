"""A script of transformers 4's time with tensor parallelism: names and arguments that are gone, dropout on.

`former_trainer_script.py --directory DIRECTORY --evaluation_strategy steps ...`; what was logged, by step, and the
learning rate, of a field of the script's own, go to DIRECTORY/result.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import smdistributed.modelparallel.torch as smp
import torch
from datasets import load_metric
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    is_torch_tpu_available,
    set_seed,
)
from transformers.utils import send_example_telemetry

from tests.smp.trainer_script import Rows


@dataclass
class Arguments(TrainingArguments):
    directory: str = field(default="", metadata={"help": "where checkpoints and results go"})
    lr: float = field(default=1e-2, metadata={"help": "of the optimizer"})


def _saved_model(directory: Path) -> str:
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0)
    if smp.rank() == 0 and not directory.exists():
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    smp.barrier()
    return str(directory)


def main() -> None:
    parser: Any = HfArgumentParser(Arguments)  # type: ignore[arg-type]
    (args,) = parser.parse_args_into_dataclasses()
    args.output_dir, args.learning_rate = args.directory, args.lr
    send_example_telemetry("former", args)
    accuracy = load_metric("accuracy")  # not computed: it would be downloaded
    assert accuracy is not None and not is_torch_tpu_available() and args.eval_strategy == "steps"
    directory = Path(args.directory)
    smp.init()
    set_seed(args.seed)
    path = _saved_model(directory.parent / "model")
    model = AutoModelForCausalLM.from_pretrained(path, from_tf=False, use_auth_token=None)
    smp.set_tensor_parallelism(model)
    trainer: Any = Trainer(
        model=model, args=args, train_dataset=Rows(64, 1), eval_dataset=Rows(8, 2), tokenizer=None
    )  # fmt: skip
    last = sorted(directory.glob("checkpoint-*"))[-1:] if not args.overwrite_output_dir else []
    trainer.train(resume_from_checkpoint=str(last[0]) if last else None)
    trainer.save_model()
    if args.should_save:
        logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
        evaluated = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
        found = {step: [entry["loss"], entry["grad_norm"], evaluated.get(step, 0)] for step, entry in logged.items()}
        (directory / "result.json").write_text(json.dumps({"steps": found, "lr": args.lr}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
