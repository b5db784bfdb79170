"""A script of SMP's detection kind: batches of the script's own classes that cut themselves, a dict of losses, frozen
weights, a model halved after it is wrapped, and files in which the ranks of a model join what each of them holds.

Trains, saves in between, goes on from there in a model made anew, and writes both runs' losses to SM_MODEL_DIR.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import smdistributed.modelparallel.torch as smp
import torch
import torch.distributed as dist
from smdistributed.modelparallel.torch.optimizers import FusedNovoGrad
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, KEPT, IMAGES = 6, 4, 8


class Images:
    def __init__(self, tensors: Tensor, sizes: list[tuple[int, int]]) -> None:
        self.tensors, self.sizes = tensors, sizes

    def to(self, device: Any) -> Images:
        return Images(self.tensors.to(device), self.sizes)

    def smp_slice(self, count: int, index: int, axis: int) -> Images:
        size = self.tensors.size(axis) // count
        return Images(self.tensors.narrow(axis, index * size, size), self.sizes[index * size : (index + 1) * size])


class Boxes:
    """The boxes of one image, [boxes, 4]."""

    def __init__(self, corners: Tensor) -> None:
        self.corners = corners

    def to(self, device: Any) -> Boxes:
        return Boxes(self.corners.to(device))


class Targets:
    def __init__(self, boxes: list[Boxes]) -> None:
        self.boxes = boxes

    def smp_slice(self, count: int, index: int, axis: int) -> list[Boxes]:
        size = len(self.boxes) // count
        return self.boxes[index * size : (index + 1) * size]


class Detector(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        with smp.partition(0):
            self.stem = nn.Conv2d(1, 4, 3, padding=1)
            self.body = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        with smp.partition(smp.pp_size() - 1):
            self.box = nn.Linear(8, 4)
            self.score = nn.Linear(8, 1)
        self.stem.requires_grad_(False)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, images: Any, targets: Any = None) -> Any:
        pixels = images.tensors.half()
        features = self.body(self.stem(pixels) * self.scale.view(1, -1, 1, 1)).relu().mean((2, 3))
        found, score = self.box(features).float(), self.score(features).float()
        if not self.training:
            return found
        wanted = torch.stack([boxes.corners.mean(0) for boxes in targets])
        return {"box": F.smooth_l1_loss(found, wanted), "score": F.softplus(-score).mean()}


class Masters:
    """A loss scale and fp32 copies around a torch optimizer; made when the model has been partitioned."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer, self.scale = model, optimizer, 2.0**10
        self.halves: list[Any] = []
        self.masters: list[Any] = []
        self.number_of: dict[int, int] = {}

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def make(self) -> None:
        for group in self.param_groups:
            for i, parameter in enumerate(group["params"]):
                assert parameter.type() == "torch.cuda.HalfTensor"
                master = parameter.detach().clone().float().to(torch.device("cuda")).requires_grad_()
                group["params"][i] = master
                self.halves.append(parameter)
                self.masters.append(master)
                self.number_of[id(parameter)] = id(master)

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss * self.scale)

    def update_masters(self) -> None:
        for half, master in zip(self.halves, self.masters):
            master.grad = half.grad.float() / self.scale

    def zero_grad(self) -> None:
        for parameter in [*self.halves, *self.masters]:
            parameter.grad = None

    def step(self) -> None:
        self.optimizer.step()
        for half, master in zip(self.halves, self.masters):
            half.data.copy_(master.data)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, saved: Any) -> None:
        self.optimizer.load_state_dict(saved)


@smp.step
def forward_backward(model: Any, optimizer: Any, images: Any, targets: Any) -> Any:
    losses = model(images, targets)
    optimizer.backward(sum(losses.values()))
    return losses


def build() -> tuple[Any, Any, Any]:
    smp.init()
    torch.manual_seed(3)
    model = smp.DistributedModel(Detector())
    model.half()
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    groups: list[Any] = [
        {"params": [value for name, value in trained if "bias" not in name], "weight_decay": 1e-2},
        {"params": [value for name, value in trained if "bias" in name], "lr": 2e-2, "weight_decay": 0.0},
    ]
    plain = FusedNovoGrad(
        groups, 1e-2, betas=(0.9, 0.5), eps=1e-7, grad_averaging=False, init_zero=False, reg_inside_moment=True,
        bias_correction=True,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    optimizer = smp.DistributedOptimizer(Masters(model, plain))
    assert isinstance(optimizer, Masters)
    model.register_post_partition_hook(lambda model, optimizer: optimizer.make())
    return model, optimizer, schedule


def save(model: Any, optimizer: Any, schedule: Any, name: str, partial: bool) -> None:
    if smp.dp_rank() == 0:
        number_of, redefined = optimizer._param_id_to_index(), optimizer.redefined_params
        held = model.virtual_named_parameters() if redefined else model.named_parameters()
        names = {number_of[optimizer.number_of[id(value)]]: name for name, value in held}
        kept: dict[str, Any] = {"schedule": schedule.state_dict(), "names": names}
        masters = [master.cpu() for master in optimizer.masters]
        if partial:
            kept |= {"model": model.local_state_dict(), "optimizer": optimizer.local_state_dict(), "masters": masters}
        else:
            kept |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            kept["names"] = {k: v for each in smp.allgather(names, smp.MP_GROUP) for k, v in each.items()}
            kept["masters"] = [tensor for each in smp.allgather(masters, smp.MP_GROUP) for tensor in each]
        smp.save(kept, name, partial)
    smp.barrier()


def load(model: Any, schedule: Any, name: str) -> None:
    kept = smp.load(name, partial=True)
    model.load_state_dict(kept["model"])
    schedule.load_state_dict(kept["schedule"])

    def fill(model: Any, optimizer: Any) -> None:
        optimizer.load_state_dict(kept["optimizer"])
        for master, saved in zip(optimizer.masters, kept["masters"], strict=True):
            master.data.copy_(saved.data)

    model.register_post_partition_hook(fill)


def batch(number: int) -> tuple[Images, list[Boxes]]:
    generator = torch.Generator().manual_seed(number)
    pixels = torch.rand(IMAGES, 1, 8, 8, generator=generator)
    corners = [torch.rand(1 + i % 3, 4, generator=generator) for i in range(IMAGES)]
    mine = slice(smp.dp_rank() * IMAGES // smp.dp_size(), (smp.dp_rank() + 1) * IMAGES // smp.dp_size())
    return Images(pixels[mine], [(8, 8)] * (mine.stop - mine.start)), [Boxes(each) for each in corners[mine]]


def train(model: Any, optimizer: Any, schedule: Any, steps: range, place: Path | None = None) -> list[list[float]]:
    found, device = [], torch.device("cuda", smp.local_rank())
    model.train()
    for number in steps:
        images, boxes = batch(number)
        targets = Targets([each.to(device) for each in boxes])
        losses = forward_backward(model, optimizer, images.to(device), targets)
        total = torch.stack([losses[name].reduce_mean() for name in sorted(losses)])
        dist.reduce(total, dst=dist.get_global_rank(smp.get_dp_process_group(), 0), group=smp.get_dp_process_group())
        optimizer.update_masters()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append([float(value) / smp.dp_size() for value in total])
        if place and number + 1 == KEPT:
            save(model, optimizer, schedule, str(place / "partial"), True)
            save(model, optimizer, schedule, str(place / "whole"), False)
    return found


def main() -> None:
    place = Path(os.environ["SM_MODEL_DIR"])
    whole = train(*build(), range(STEPS), place)
    smp.state.reset()
    model, optimizer, schedule = build()
    load(model, schedule, str(place / "partial"))
    rest = train(model, optimizer, schedule, range(KEPT, STEPS))
    if smp.rank() == 0:
        smp.broadcast(torch.tensor(1), smp.WORLD)
        (place / "losses.json").write_text(json.dumps([whole, rest]))
    elif smp.size() > 1:
        assert int(smp.recv_from(0, smp.RankType.WORLD_RANK)) == 1


if __name__ == "__main__":
    main()
