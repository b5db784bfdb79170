"""A script as SMP's users write them; run by test_run.py, unchanged, on workers of `shardwise run --device cpu`."""

import os
import sys

import smdistributed.dataparallel.torch.torch_smddp
import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel import __version__
from smdistributed.modelparallel.torch.nn import FusedLayerNorm
from transformers import GPT2Config, GPT2LMHeadModel


@smp.step
def train_step(model, input_ids, attention_mask):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step()
def test_step(model, input_ids):
    out = model(input_ids=input_ids, labels=input_ids)
    return out["loss"], float(out["loss"].item())


def main():
    smp.init({"ddp": True, "microbatches": 2})
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")
    pinned = torch.zeros(2, pin_memory=True).pin_memory().cuda(non_blocking=True)
    drawn = torch.rand(2, device=device, generator=torch.Generator(device="cuda").manual_seed(1))
    assert (
        isinstance(torch.Generator(), torch.Generator)
        and drawn.new_tensor([1.0], device=device).device == pinned.device
    )
    assert pinned.type(torch.cuda.HalfTensor).dtype == torch.half and torch.cuda.Stream().query()
    torch.cuda.set_rng_state(torch.cuda.get_rng_state())
    torch.cuda.nvtx.range_end(torch.cuda.nvtx.range_start("here"))
    assert torch.cuda.is_available() and torch.cuda.device_count() == 2 and isinstance(device, torch.device)
    assert smdistributed.modelparallel.__version__ == __version__ and isinstance(FusedLayerNorm, type)
    assert torch.distributed.get_backend() in ("shardwise", "gloo")
    assert smp.pp_size() == int(sys.argv[1]) and smp.state.cfg.microbatches == 4
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=24, n_head=4, n_layer=2, n_positions=16, vocab_size=97)).cuda()
    model = smp.DistributedModel(model)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), dynamic_loss_args={})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    rows = torch.utils.data.DataLoader([torch.ones(16, dtype=torch.long)] * 8, batch_size=8, num_workers=1)
    ids = next(iter(rows)).to(device) if smp.pp_rank() == 0 else torch.Tensor(8, 0)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=True)
        loss = train_step(model, ids, torch.ones_like(ids)).reduce_mean()
        torch.cuda.synchronize()
        optimizer.step()
        schedule.step()
    model = model.eval()
    with torch.no_grad():
        losses, numbers = test_step(model, ids)
    assert losses.reduce_mean() < loss and len(numbers) == 4
    assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1]
    if smp.rank() == 0:
        with open(os.path.join(os.environ["SM_MODEL_DIR"], "done"), "w") as file:
            file.write(f"{os.environ['SM_CHANNEL_TRAIN']} {smp.size()}")


if __name__ == "__main__":
    main()
