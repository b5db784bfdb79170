"""Pre-training of GPT-2 or GPT-NeoX as a script of SMP, version 1, with its data; on a laptop with --device cpu:
shardwise run --smp-options '{"pipeline_parallel_degree": 2, "microbatches": 4}' examples/smp_gpt.py --steps 20"""

import argparse
import json
import os
import pathlib

import smdistributed.modelparallel.torch as smp
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig

LENGTH = 64


@smp.step
def train_step(model, input_ids):
    loss = model(input_ids=input_ids, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


def prepare(file):
    """This script's own bytes in rows of LENGTH, as JSON lines; rank 0 writes them, all read them."""
    if smp.rank() == 0 and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        text = pathlib.Path(__file__).read_bytes()
        rows = [list(text[at : at + LENGTH]) for at in range(0, len(text) - LENGTH, 16)]
        file.write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    smp.barrier()
    return torch.tensor([json.loads(line)["input_ids"] for line in file.read_text().splitlines()])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--neox", action="store_true", help="GPT-NeoX in the place of GPT-2")
    arguments = parser.parse_args()
    smp.init({"ddp": True})
    torch.manual_seed(1)
    rows = prepare(pathlib.Path(os.environ["SM_CHANNEL_TRAIN"], "train.json"))
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 256}
    config = GPTNeoXConfig(**sizes, intermediate_size=256) if arguments.neox else GPT2Config(**sizes)
    with smp.model_creation(tensor_parallelism=True):
        plain = AutoModelForCausalLM.from_config(config)
    model = smp.DistributedModel(plain)
    for layer in model.get_module().transformer.seq_layers:
        smp.set_activation_checkpointing(layer)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    for step in range(arguments.steps):
        picked = torch.randint(len(rows), (8 * smp.rdp_size(),)).chunk(smp.rdp_size())[smp.rdp_rank()]
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, rows[picked]).reduce_mean()
        optimizer.step()
        print(f"step {step + 1} loss {float(loss):.3f}" if smp.rank() == 0 else "", flush=True)
    smp.save_checkpoint(os.environ["SM_MODEL_DIR"], tag="model.pt", partial=False, model=model, optimizer=optimizer)


if __name__ == "__main__":
    main()
