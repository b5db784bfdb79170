"""Pre-training of GPT-NeoX as a script of SMP, version 2, with its data; on a laptop with --device cpu:
shardwise run --workers 2 --smp-options '{"tensor_parallel_degree": 2}' examples/smp_sharded.py --steps 20"""

import argparse
import functools
import os
import pathlib

import torch
import torch.distributed as dist
import torch.sagemaker as tsm
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.sagemaker.delayed_param import DelayedParamIniter
from torch.sagemaker.grad_norm import clip_grad_norm_
from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

LENGTH = 64


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    dist.init_process_group("nccl")
    tsm.init()
    torch.manual_seed(1)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    config = GPTNeoXConfig(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=256)
    with torch.device("meta"):
        model = tsm.transform(GPTNeoXForCausalLM(config))
    initer = DelayedParamIniter(model)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    with initer.validate_params_and_buffers_inited():
        model = FSDP(
            model, auto_wrap_policy=policy, use_orig_params=True, device_id=torch.cuda.current_device(),
            param_init_fn=initer.get_param_init_fn(), post_param_init_fn=initer.get_post_param_init_fn(),
        )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(pathlib.Path(__file__).read_bytes()))  # this script's own bytes
    ranks, mine = dist.get_world_size() // tsm.state.tp_size, dist.get_rank() // tsm.state.tp_size
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH, (8 * ranks,)).chunk(ranks)[mine]
        ids = torch.stack([text[start : start + LENGTH] for start in starts]).cuda()
        loss = model(input_ids=ids, labels=ids)["loss"]
        loss.backward()
        norm = clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step + 1} norm {norm:.3f} loss {loss.item():.3f}" if dist.get_rank() == 0 else "", flush=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
        whole = model.state_dict()
    if dist.get_rank() == 0:
        GPTNeoXForCausalLM(config).save_pretrained(os.environ["SM_MODEL_DIR"], state_dict=whole)


if __name__ == "__main__":
    main()
