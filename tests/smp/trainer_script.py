"""transformers' Trainer, which calls SMP by itself when the environment says so; run by test_run.py."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.arange(16) % 7 + index
        return {"input_ids": ids, "labels": ids}


def main():
    torch.manual_seed(0)
    out = os.path.join(os.environ["SM_MODEL_DIR"], "trainer")
    config = GPT2Config(n_embd=24, n_head=4, n_layer=2, n_positions=16, vocab_size=97)
    for epochs in (1, 2):
        arguments = TrainingArguments(
            out,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            num_train_epochs=epochs,
            report_to=[],
            save_strategy="epoch",
            logging_steps=1,
            max_grad_norm=0,
            disable_tqdm=True,
            learning_rate=1e-2,
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Rows(), eval_dataset=Rows())
        result = trainer.train(resume_from_checkpoint=epochs > 1)
        assert trainer.is_model_parallel or "DistributedModel" in type(trainer.model_wrapped).__name__
    loss = trainer.evaluate()["eval_loss"]
    assert loss < 4.5, loss
    trainer.save_model(os.path.join(out, "last"))
    if int(os.environ["RANK"]) == 0:
        with open(os.path.join(os.environ["SM_MODEL_DIR"], "trained"), "w") as file:
            file.write(f"{result.global_step} {sorted(os.listdir(out))}")


if __name__ == "__main__":
    sys.exit(main())
