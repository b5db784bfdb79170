"""The peers of `parallelism_cpu`: the same GPT-NeoX, split by hand with torch's building blocks, or by transformers.

Every builder gets (workload, directory of the saved model, rank, world) inside a worker whose Gloo group exists, and
returns one step on the whole batch: forward, backward, fused AdamW. The loss that a step returns is that of all ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from benchmarks.harness import Contender, Step
from benchmarks.workload import Workload, parameter_groups, token_ids

TENSOR = Contender(
    "torch parallelize_module", "benchmarks.parallelism_peers:tensor", "torch",
    "column and row styles by layer, vocabulary-parallel embedding, head and loss",
)  # fmt: skip
NATIVE = Contender(
    "transformers tp_plan", "benchmarks.parallelism_peers:native", "accelerate", 'from_pretrained(tp_plan="auto")'
)
PIPELINE = Contender(
    "torch pipelining", "benchmarks.parallelism_peers:pipeline", "torch", "a stage a rank, cut by hand, Schedule1F1B"
)
CONTEXT = Contender(
    "torch, attention by hand", "benchmarks.parallelism_peers:context", "torch",
    "keys and values gathered, zig-zag order, fully_shard on every block and the root",
)  # fmt: skip
ULYSSES = Contender(
    "torch, heads exchanged by hand", "benchmarks.parallelism_peers:ulysses", "torch",
    "all-to-all of heads for rows and back, fully_shard on every block and the root",
)  # fmt: skip
SHARD = Contender("torch fully_shard", "benchmarks.parallelism_peers:shard", "torch", "every block and the root")


def save_model(workload: Workload, directory: Path) -> None:
    """Draw the weights of a GPT-NeoX once and save them, with the config, where every contender loads them from."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = GPTNeoXConfig(
        vocab_size=workload.vocabulary,
        max_position_embeddings=workload.sequence,
        hidden_size=workload.width,
        intermediate_size=4 * workload.width,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(workload.seed)
    GPTNeoXForCausalLM(config).save_pretrained(directory)


def load_model(directory: Path, **more: Any) -> Any:
    """The model of `save_model` in fp32 with SDPA attention, in training mode."""
    from transformers import GPTNeoXForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = GPTNeoXForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa", **more)
    return model.train()


def make_optimizer(model: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """Fused AdamW; its kernel takes DTensors or plain tensors, so each kind is a group of its own."""
    groups = [
        {**group, "params": [p for p in group["params"] if isinstance(p, DTensor) == split]}
        for group in parameter_groups(model, workload)
        for split in (True, False)
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=workload.learning_rate, fused=True)


def next_tokens(ids: Tensor) -> Tensor:
    """Labels aligned with the outputs; the last position has none."""
    labels = torch.full_like(ids, -100)
    labels[:, :-1] = ids[:, 1:]
    return labels


def tensor(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """`parallelize_module` as torch's tutorial has it, with `loss_parallel`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,))
    model = load_model(directory)
    base, head = model.base_model_prefix, _head_name(model)
    plan: dict[str, Any] = {
        f"{base}.embed_in": RowwiseParallel(input_layouts=Replicate()),
        head: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(workload.layers):
        block = f"{base}.layers.{index}"
        for name in ("attention.query_key_value", "mlp.dense_h_to_4h"):
            plan[f"{block}.{name}"] = ColwiseParallel()
        for name in ("attention.dense", "mlp.dense_4h_to_h"):
            plan[f"{block}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    optimizer = make_optimizer(model, workload)
    ids = token_ids(workload, 0)
    labels = next_tokens(ids).flatten()

    def step() -> Tensor:
        with loss_parallel():
            loss = F.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return step


def native(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """transformers' own tensor parallelism."""
    model = load_model(directory, tp_plan="auto")
    optimizer = make_optimizer(model, workload)
    ids = token_ids(workload, 0)

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


class HandCut(nn.Module):
    """One stage of the model, written out: embedding on the first, norm and head on the last."""

    def __init__(self, model: Any, rank: int, world: int) -> None:
        super().__init__()
        base = getattr(model, model.base_model_prefix)
        each = len(base.layers) // world
        self.layers = base.layers[rank * each : (rank + 1) * each]
        self.rotary = base.rotary_emb
        self.embed = base.embed_in if rank == 0 else None
        self.norm = base.final_layer_norm if rank == world - 1 else None
        self.head = model.get_submodule(_head_name(model)) if rank == world - 1 else None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.embed is None else self.embed(hidden)
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        tables = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            output = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=tables)
            hidden = output[0] if isinstance(output, tuple) else output
        if self.norm is None or self.head is None:
            return hidden
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def pipeline(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """`torch.distributed.pipelining` on stages cut by hand; a microbatch is one sequence."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage_module = HandCut(load_model(directory), rank, world)
    optimizer = make_optimizer(stage_module, workload)
    ids = token_ids(workload, 0)
    labels = next_tokens(ids)
    counted = int((labels != -100).sum())

    def loss_of(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / counted

    schedule = Schedule1F1B(
        PipelineStage(stage_module, rank, world, torch.device("cpu")), workload.batch, loss_of, scale_grads=False
    )

    def step() -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids, return_outputs=False)
        elif rank == world - 1:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        else:
            schedule.step(return_outputs=False)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.broadcast(total, world - 1)
        return total

    return step


class GatherRows(torch.autograd.Function):
    """[B, h, S/c, d] of each rank -> [B, h, S, d]; backward sums the parts of the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        parts = [part.contiguous() for part in gradients[0].chunk(dist.get_world_size(), 2)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts)
        return mine


class Exchange(torch.autograd.Function):
    """Shares dim `out` among the ranks and takes the others' parts of dim `back`; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, out: int, back: int) -> Tensor:
        ctx.dims = out, back
        sent = torch.stack(values.chunk(dist.get_world_size(), out))
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        return torch.cat(got.unbind(), back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        out, back = ctx.dims
        return Exchange.apply(gradients[0], back, out), None, None


def context(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """Each rank has chunks r and 2c - 1 - r of every sequence; its queries see all keys that are not ahead."""
    chunks = torch.arange(workload.sequence).chunk(2 * world)
    order = [torch.cat([chunks[each], chunks[2 * world - 1 - each]]) for each in range(world)]
    mine, everyone = order[rank], torch.cat(order)
    visible = mine.unsqueeze(1) >= everyone

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> tuple[Tensor, None]:
        keys, values = GatherRows.apply(key), GatherRows.apply(value)
        out = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=more.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    return _of_parts(workload, directory, world, mine, attend)


def ulysses(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """Each rank has a run of every sequence; for attention it has all rows of its share of the heads."""
    mine = torch.arange(workload.sequence).chunk(world)[rank]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> tuple[Tensor, None]:
        whole = Exchange.apply(torch.stack([query, key, value]), 2, 3)  # [3, B, h, S/c, d] -> [3, B, h/c, S, d]
        out = F.scaled_dot_product_attention(*whole, is_causal=True, scale=more.get("scaling"))
        rows: Tensor = Exchange.apply(out, 2, 1)
        return rows.transpose(1, 2).contiguous(), None

    return _of_parts(workload, directory, world, mine, attend)


def _of_parts(workload: Workload, directory: Path, world: int, mine: Tensor, attend: Any) -> Step:
    """One step on the positions `mine` of every sequence, with `attend` for attention."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AttentionInterface

    AttentionInterface.register("by_hand", attend)
    mesh = init_device_mesh("cpu", (world,))
    model = load_model(directory)
    model.set_attn_implementation("by_hand")
    for block in getattr(model, model.base_model_prefix).layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=workload.reshard)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model, workload)
    ids = token_ids(workload, 0)
    labels = next_tokens(ids)[:, mine].flatten()
    counted = workload.batch * (workload.sequence - 1)
    part, positions = ids[:, mine], mine.unsqueeze(0)

    def step() -> Tensor:
        logits = model(input_ids=part, position_ids=positions).logits.flatten(0, 1)
        loss = F.cross_entropy(logits, labels, reduction="sum") / counted * world  # fully_shard takes the mean
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def shard(workload: Workload, directory: Path, rank: int, world: int) -> Step:
    """`fully_shard` on each block and on the root; every rank takes its share of the batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    model = load_model(directory)
    for block in getattr(model, model.base_model_prefix).layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=workload.reshard)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model, workload)
    ids = token_ids(workload, 0).chunk(world)[rank]

    def step() -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def _head_name(model: Any) -> str:
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)
