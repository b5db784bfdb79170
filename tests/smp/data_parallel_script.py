"""A script of SMDDP's first API, and what later ones ask of torch on GPUs; run by test_run.py on two CPU workers."""

import os
import sys

import smdistributed.dataparallel.torch.distributed as smddp
import torch
import torch.distributed as dist
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as SameByOtherName
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType

smddp.init_process_group()
smddp.init_process_group()
rank, local_rank = smddp.get_rank(), smddp.get_local_rank()
assert smddp.is_initialized() and SameByOtherName is DistributedDataParallel and dist.get_backend() == "smddp"
assert (smddp.get_world_size(), rank) == (2, local_rank)


def net(seed=rank):  # DDP makes rank 0's weights everybody's, FSDP shards what it finds
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 1, bias=False)


def gradient(model):
    """Of the mean of x over ranks 0 and 1, whose rows are 1 and 3."""
    model(torch.full((1, 3), 1.0 + 2.0 * rank).cuda(local_rank)).sum().backward()
    return next(model.parameters()).grad.tolist()


assert gradient(DistributedDataParallel(net().to(torch.device("cuda")), bucket_cap_mb=1)) == [[2.0, 2.0, 2.0]]
placed = torch.nn.parallel.DistributedDataParallel(net().cuda(), device_ids=[local_rank], output_device=local_rank)
assert gradient(placed) == [[2.0, 2.0, 2.0]]

total = torch.ones(1).cuda()
smddp.all_reduce(total, op=smddp.ReduceOp.SUM)
both = dist.new_group([0, 1], backend="nccl")
dist.all_reduce(total, group=both)
assert total.item() == 4 and dist.get_backend(both) == "gloo" and torch.cuda.nccl.version() == (0, 0, 0)
smddp.barrier()

sharded = FullyShardedDataParallel(net(0))
with FullyShardedDataParallel.state_dict_type(
    sharded, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
):
    whole = sharded.state_dict()
path = os.path.join(sys.argv[1], f"whole-{rank}.pt")
torch.save(whole, path)
assert sorted(torch.load(path, "cuda:0")) == sorted(whole) == ([] if rank else ["weight"])
if rank == 0:
    read = torch.load(path, map_location=lambda storage, place: storage.cuda(0))
    assert torch.equal(read["weight"], net(0).weight)
