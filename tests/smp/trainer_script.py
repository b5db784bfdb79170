"""A script of transformers' Trainer, with nothing of SMP in it: train, evaluate, save, resume.

`trainer_script.py DIRECTORY STEPS ROWS [resume]`, ROWS a batch and rank; losses go to DIRECTORY/result.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, count: int, seed: int) -> None:
        self.rows = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    directory, steps, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(1)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0,
                        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)  # fmt: skip
    arguments = TrainingArguments(
        directory, per_device_train_batch_size=rows, per_device_eval_batch_size=rows, max_steps=steps, save_steps=2,
        logging_steps=1, learning_rate=1e-2, max_grad_norm=0.5, lr_scheduler_type="constant", report_to=[], seed=1,
    )  # fmt: skip
    trainer = Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Rows(64, 1), eval_dataset=Rows(10, 2),
        compute_metrics=lambda found: {"count": len(found.predictions)},
    )  # fmt: skip
    trainer.model_accepts_loss_kwargs = False  # else it counts first labels, which nothing predicts
    trainer.train(resume_from_checkpoint=True if sys.argv[4:] else None)
    found = trainer.evaluate()
    if arguments.should_save:
        logged = [[entry["loss"], entry["grad_norm"]] for entry in trainer.state.log_history if "loss" in entry]
        result = {"losses": logged, "evaluated": found["eval_loss"], "count": found["eval_count"]}
        (Path(directory) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
