"""A script of 2021's kind: its own module halves the model, and its own optimizer keeps masters and a loss scale.

Both look for CUDA's types of tensors. Trains, saves in between, goes on from there in a model made anew, and writes
both runs' losses to SM_MODEL_DIR.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import smdistributed.modelparallel.torch as smp
import torch
from smdistributed.modelparallel.torch.utils import get_distribution_axis
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, KEPT = 6, 4
HALF, FULL = "torch.cuda.HalfTensor", "torch.cuda.FloatTensor"


class Halved(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.add_module("module", model.half())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        given = [value.half() if isinstance(value, torch.cuda.FloatTensor) else value for value in inputs]
        output = self.module(*given, **named)
        return output.loss.float() if "labels" in named else output

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


class Scale:
    def __init__(self) -> None:
        self.value = 2.0**19  # the first gradients overflow

    def backward(self, model: Any, loss: Tensor) -> None:
        model.backward(loss * self.value)


class Base(ABC):
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @abstractmethod
    def step(self) -> None: ...


class Masters(Base):
    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.model, self.scale, self.halves, self.masters, self.split = model, Scale(), [], [], []
        self.overflow = False

    def make(self) -> None:
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                assert parameter.type() == HALF and parameter.is_cuda
                self.halves.append(parameter)
                self.masters.append(nn.Parameter(parameter.detach().float()))
                self.split.append(self.model.is_distributed_parameter(parameter))
                assert (get_distribution_axis(parameter) is not None) == self.split[-1]
                group["params"][i] = self.masters[-1]

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        for parameter in [*self.halves, *self.masters]:
            parameter.grad = None

    def update_masters(self, everyone: bool) -> None:
        found = torch.cuda.ByteTensor([any(not p.grad.isfinite().all() for p in self.halves)])
        group = smp.get_world_process_group() if everyone else smp.get_mp_process_group()
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group)
        self.overflow = bool(found[0])
        for half, master in zip(self.halves, self.masters):
            if half.device.type == "cpu":  # of another stage
                continue
            master.grad = half.grad.float() / self.scale.value
            assert master.grad.type() == FULL

    def norm(self, everyone: bool) -> float:
        counted = [m.grad for m, split in zip(self.masters, self.split) if split or smp.tp_rank() == 0]
        total = torch.tensor(float(sum(gradient.square().sum() for gradient in counted)), device="cuda")
        group = smp.get_world_process_group() if everyone else smp.get_mp_process_group()
        torch.distributed.all_reduce(total, group=group)
        return float(total.sqrt())

    def step(self) -> None:
        if self.overflow:
            self.scale.value /= 2
            return
        self.optimizer.step()
        for half, master in zip(self.halves, self.masters):
            if half.device.type != "cpu":
                half.data.copy_(master.data)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.optimizer.load_state_dict(saved)


@smp.step
def train_step(model: Any, optimizer: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids)
    optimizer.scale.backward(model, loss)
    return loss


def build(options: dict[str, Any]) -> tuple[Any, Any]:
    smp.init(options)
    torch.manual_seed(3)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_embd=32, n_head=4, n_layer=2, n_positions=16, vocab_size=96, **off)
    with smp.tensor_parallelism(enabled=smp.tp_size() > 1):
        module = GPT2LMHeadModel(config)
    model: Any = smp.DistributedModel(Halved(module))
    assert isinstance(model.module.module, Halved) and hasattr(model.module.module.module, "transformer")
    optimizer = smp.DistributedOptimizer(Masters(model, torch.optim.Adam(model.parameters(), lr=1e-2)))
    model.register_post_step_hook(lambda model, optimizer: optimizer.make())
    return model, optimizer


def save(model: Any, optimizer: Any, name: str, everyone: bool) -> None:
    kept = {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "scale": optimizer.scale}
    kept["masters"] = [master.cpu() for master in optimizer.masters]
    if everyone and smp.rdp_rank() == 0:
        kept["masters"] = [
            kept["masters"],
            *(smp.recv_from(i, smp.RankType.RDP_RANK) for i in range(1, smp.rdp_size())),
        ]
    elif everyone:
        smp.send(kept["masters"], 0, smp.RankType.RDP_RANK)
    if smp.rdp_rank() == 0:
        smp.save(kept, name)
    smp.barrier()


def load(model: Any, optimizer: Any, name: str, everyone: bool) -> None:
    kept = smp.load(name)
    model.load_state_dict(kept["model"])
    optimizer.scale = kept["scale"]

    def fill(model: Any, optimizer: Any) -> None:
        masters = kept["masters"][smp.rdp_rank()] if everyone else kept["masters"]
        for current, saved in zip(optimizer.masters, masters, strict=True):
            current.data.copy_(saved.data)
        optimizer.load_state_dict(kept["optimizer"])

    model.register_post_step_hook(lambda model, optimizer: model.register_post_partition_hook(fill))


def train(model: Any, optimizer: Any, steps: range, name: str = "", everyone: bool = False) -> list[float]:
    found = []
    for number in steps:
        ids = torch.randint(0, 96, (8, 16), generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad(set_grads_to_None=True)
        loss = train_step(model, optimizer, ids).reduce_mean()
        optimizer.update_masters(everyone)
        norm = optimizer.norm(everyone)
        optimizer.step()
        found.append([float(loss), norm if not optimizer.overflow else -1.0])
        if name and number + 1 == KEPT:
            save(model, optimizer, name, everyone)
    return found


def main() -> None:
    options = json.loads(sys.argv[1]) | {"ddp": True, "fp16_params": True, "_match_weights": True}
    sharded = bool(options.get("shard_optimizer_state"))
    place = Path(os.environ["SM_MODEL_DIR"])
    whole = train(*build(copy.deepcopy(options)), range(STEPS), str(place / "kept"), sharded)
    smp.state.reset()
    model, optimizer = build(options)
    load(model, optimizer, str(place / "kept"), sharded)
    rest = train(model, optimizer, range(KEPT, STEPS), everyone=sharded)
    if smp.rank() == 0:
        (place / "losses.json").write_text(json.dumps([whole, rest]))


if __name__ == "__main__":
    main()
