"""Train a diffusion model to find the noise that was added to images (arXiv 2006.11239).

cd examples && python diffusion.py [model.factory_arguments.of_diffusers=true]"""

import importlib
import sys

import torch
from torch import Tensor, nn

from shardwise import load_job, train

JOB = {
    "model": {"factory": "diffusion:model", "loss": "diffusion:squares"}, "data": {"factory": "diffusion:images"},
    "training": {"steps": 60, "sequences_per_step": 32, "microbatch_size": 8},  # which draws in forward need
    "output": "runs/diffusion",
}  # fmt: skip


class Noised(nn.Module):
    def __init__(self, denoiser: nn.Module) -> None:  # any that is called with images and times
        super().__init__()
        self.denoiser = denoiser
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-4, 0.05, 100), 0))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        noise, time = torch.randn_like(image), torch.randint(100, (len(image),), device=image.device)
        kept = self.kept[time].to(image.dtype).view(-1, 1, 1, 1)
        found = self.denoiser(kept.sqrt() * image + (1 - kept).sqrt() * noise, time)
        return getattr(found, "sample", found), noise


class Transformer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inlet, self.outlet = nn.Conv2d(1, width, 2, 2), nn.ConvTranspose2d(width, 1, 2, 2)
        layers = (nn.TransformerEncoderLayer(width, 4, 256, 0.0, batch_first=True) for _ in range(2))
        self.times, self.places, self.blocks = nn.Embedding(100, width), nn.Embedding(16, width), nn.Sequential(*layers)

    def forward(self, image: Tensor, time: Tensor) -> Tensor:
        hidden = self.inlet(image).flatten(2).transpose(1, 2) + self.places.weight + self.times(time)[:, None]
        return self.outlet(self.blocks(hidden).transpose(1, 2).unflatten(2, (4, 4)))


def model(of_diffusers: bool = False) -> nn.Module:
    if of_diffusers:
        return Noised(importlib.import_module("diffusers").UNet2DModel(8, 1, 1, block_out_channels=(32,) * 4))
    return Noised(Transformer())


def images(count: int = 512) -> list[dict[str, Tensor]]:  # of a bright row on a dark ground
    return [{"image": torch.eye(8)[number % 8].view(1, 8, 1).expand(1, 8, 8) * 2 - 1} for number in range(count)]


def squares(output, batch) -> tuple[Tensor, Tensor]:
    return ((output[0] - output[1]).square().mean((1, 2, 3)) * batch.counted).sum(), batch.counted.sum()


if __name__ == "__main__":
    print(train(load_job(JOB, sys.argv[1:])))
