"""A script one of whose ranks ends while the other saves; run by test_run.py."""

import sys

import smdistributed.modelparallel.torch as smp
import torch

smp.init({"ddp": True})
smp.DistributedModel(torch.nn.Linear(2, 2))
if smp.rank() == 0:
    smp.save_checkpoint(sys.argv[1], tag="alone")
