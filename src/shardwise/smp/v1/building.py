"""The way from a script's module to the engine's ParallelModel: a script's plan, and its weights in new places."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig

from shardwise.errors import ModelError
from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED, refused
from shardwise.job.schema import MemorySection
from shardwise.model.construct import detach_weights
from shardwise.model.discover import discover
from shardwise.model.facts import ModelFacts
from shardwise.model.traced_cut import cut_by_trace
from shardwise.parallel.activation_offload import ActivationOffload
from shardwise.parallel.apply import parallelize
from shardwise.parallel.model import ParallelModel
from shardwise.parallel.transforms.checkpointing import apply_activation_checkpointing
from shardwise.plan.normalisation import SMP_MEAN
from shardwise.plan.plan import Plan, resolve
from shardwise.smp.exceptions import PartitionError
from shardwise.smp.options import make_job
from shardwise.smp.v1.config import OFFLOAD
from shardwise.smp.v1.nn.layers import DistributedEmbedding, DistributedLinear
from shardwise.smp.v1.nn.splits import common_heads, tensor_splits
from shardwise.smp.v1.requests import CheckpointRequest, requests
from shardwise.smp.v1.session import SmpSessionV1
from shardwise.training.given_model import place_weights
from shardwise.training.setup import current_world

DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class MicrobatchSize(NamedTuple):
    """Rows and positions of one microbatch of one rank."""

    rows: int
    positions: int


def microbatch_size(inputs: Mapping[str, Any]) -> MicrobatchSize:
    """Return rows and positions of the model's keyword arguments, by `input_ids` or the first tensor with both."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.dim() > 1]
    first = inputs.get("input_ids") if isinstance(inputs.get("input_ids"), Tensor) else next(iter(tensors), None)
    if first is None:
        return MicrobatchSize(1, 1)
    return MicrobatchSize(first.shape[0], first.shape[1] if first.dim() > 1 else 1)


def on_meta(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `inputs` with their tensors on meta, to see the shapes that a forward gives."""
    return {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in inputs.items()}


def build_parallel_model(session: SmpSessionV1, module: nn.Module, inputs: Mapping[str, Any]) -> ParallelModel:
    """Distribute `module`, in place, as the configuration asks; weights and buffers are those of rank 0. Collective.

    Args:
        session: the session of this process.
        module: the script's model, the same on every rank.
        inputs: keyword arguments of its first forward.

    Raises:
        LegalityError: the configuration asks for what this model cannot do.
        ModelError: a parameter has no value and no initializer.
        PartitionError: a module to be checkpointed lies on several stages, where the script has placed them.
    """
    for inner in module.modules():  # an encoder-decoder's stacks have configs of their own
        config = getattr(inner, "config", None)
        if isinstance(config, PreTrainedConfig):
            config.use_cache = False
    weights = detach_weights(module)
    shape = microbatch_size(inputs)
    values = session.cfg.job_keys | {
        "training.microbatch_size": shape.rows,
        "training.gradient_accumulation": int(session.cfg.microbatches),
        "data.sequence_length": max(1, shape.positions),
        "parallel.device": session.device.type,
    }
    values.setdefault("precision.compute", _dtype_of(weights))
    facts = _facts(session, module, values, inputs)
    whole_rows = session.layout.size(Axis.TENSOR) > 1 and not facts.sequence_parallel.ok
    if whole_rows and values.pop("parallel.sequence_parallel", False):
        _say(f"smp_options: optimize='memory' has no effect here: {facts.sequence_parallel.reason}.")
    values |= _partition(session, module, facts) if session.layout.size(Axis.PIPELINE) > 1 else {}
    values, apart = _settle_checkpointing(session, module, facts, values)
    plan = replace(
        resolve(make_job(values), current_world(session.device), facts), chunked_loss=False, normalisation=SMP_MEAN.name
    )
    _say_partition(plan)
    _checkpoint_each(session, module, _on_one_stage(session, module, apart, plan))
    parallel = parallelize(module, plan, session.layout, facts, session.device)
    place_weights(parallel, weights, _agreed_seed())
    return parallel


# ---- weights


def _agreed_seed() -> int:
    """Return rank 0's seed, for what the script has created without values."""
    seed = torch.tensor([torch.initial_seed() & ((1 << 62) - 1)])
    dist.broadcast(seed, 0)
    return int(seed)


def _dtype_of(weights: Mapping[str, Tensor]) -> str:
    dtypes = {value.dtype for value in weights.values() if value.is_floating_point()}
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    if widest not in DTYPES:
        raise ModelError(f"the model's parameters are {widest}; use one of {', '.join(map(str, DTYPES))}")
    return DTYPES[widest]


def _facts(session: SmpSessionV1, module: nn.Module, values: dict[str, Any], inputs: Mapping[str, Any]) -> ModelFacts:
    """Return the facts of the model.

    A script's own module is cut into stages like any other: between its blocks, or by tracing it.
    """
    length, example = values["data.sequence_length"], {n: v for n, v in inputs.items() if isinstance(v, Tensor)}
    session.tracing = True
    published = isinstance(getattr(module, "config", None), PreTrainedConfig)  # whose inputs are known
    facts = discover(module, make_job({"data.sequence_length": length}), None if published else example)
    if session.layout.size(Axis.PIPELINE) > 1:
        facts = _untraceable(facts, inputs) or cut_by_trace(module, facts, length, example)
    session.tracing = False
    splits = tensor_splits(module)
    unsplit = not published and not facts.supports(Axis.TENSOR).ok and _has_whole_layers(module)
    if splits or unsplit:
        whole = "layers of smp.nn hand whole activations to one another"
        facts = facts.with_capabilities({Axis.TENSOR: SUPPORTED})
        facts = replace(facts, tensor_splits=splits, vocabulary_parameters=(), sequence_parallel=refused(whole))
        if not facts.attention_heads:  # a script's own model has no config that says them
            facts = replace(facts, attention_heads=common_heads(module), key_value_heads=common_heads(module))
    if unsplit and not splits and session.layout.size(Axis.TENSOR) > 1:
        _say(f"nothing of {facts.family} is split: nn.Linear and nn.Embedding under tensor parallelism are whole on "
             "every tensor rank, which work on the rows of all.")  # fmt: skip
    # A script's own step takes the loss.
    return replace(facts, computes_own_loss=False) if facts.supports(Axis.PIPELINE).ok else facts


def _has_whole_layers(module: nn.Module) -> bool:
    """Tell if a script's own model has layers by themselves under tensor parallelism, as SMP distributes them."""
    return any(
        isinstance(inner, (DistributedLinear, DistributedEmbedding))
        or (isinstance(inner, (nn.Linear, nn.Embedding)) and requests.tensor.get(inner) is not None)
        for inner in module.modules()
    )


def _untraceable(facts: ModelFacts, inputs: Mapping[str, Any]) -> ModelFacts | None:
    """Return `facts` that name an argument of the forward with which tracing cuts no stages, if there is one."""
    known = (Tensor, bool, int, float, str, type(None))
    name = next((name for name, value in inputs.items() if not isinstance(value, known)), None)
    if name is None or facts.supports(Axis.PIPELINE).ok:
        return None
    refusal = (
        f"the argument {name!r} of the forward is of class {type(inputs[name]).__name__}; stages of {facts.family}, "
        "which is no chain of blocks, are cut with tensors and plain values as arguments"
    )
    return facts.with_capabilities({Axis.PIPELINE: refused(refusal)})


# ---- stages


def _partition(session: SmpSessionV1, module: nn.Module, facts: ModelFacts) -> dict[str, Any]:
    """Return the blocks' stages, as the script or its contexts put them."""
    if session.cfg.auto_partition:
        return {}
    asked = {name: requests.partitions[inner] for name, inner in module.named_modules() if inner in requests.partitions}
    placed: dict[str, int] = {}
    for block in facts.blocks:
        above = [name for name in asked if name == block.name or block.name.startswith(f"{name}.")]
        if above:
            placed[block.name] = asked[max(above, key=len)]
    return {"parallel.partition": placed, "parallel.default_partition": int(session.cfg.default_partition)}


def _say_partition(plan: Plan) -> None:
    if plan.stages and dist.get_rank() == 0:
        print("Partition assignments:", file=sys.stderr)
        for stage, blocks in enumerate(plan.stages):
            print(f"  stage {stage}: {', '.join(blocks)}", file=sys.stderr)


# ---- checkpointing


def _settle_checkpointing(
    session: SmpSessionV1, module: nn.Module, facts: ModelFacts, values: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, CheckpointRequest]]:
    """Let the engine checkpoint all blocks; return what is to be put around some of them, or other modules, by name."""
    values = {key: value for key, value in values.items() if key not in OFFLOAD}
    asked = {
        name: requests.checkpointing[inner] for name, inner in module.named_modules() if inner in requests.checkpointing
    }
    offload = bool(session.cfg.offload_activations)
    if asked and facts.stages.traced:
        _say("smp.set_activation_checkpointing has no effect: stages of this model are cut from its traced forward, "
             "which has operators and no modules.")  # fmt: skip
        return values, {}
    names = [block.name for block in facts.blocks]
    strategies = {_strategy(name, asked) for name in names}
    if names and None not in strategies and len(strategies) == 1:
        values |= {"memory.activation_checkpointing": "full", "memory.checkpoint_strategy": strategies.pop()}
        if offload:
            values["memory.offload_activations"] = True
            values["memory.activation_loading_horizon"] = int(session.cfg.activation_loading_horizon)
        return values, {}
    if not asked:
        if offload:
            _say("offload_activations has no effect: smp.set_activation_checkpointing was not called.")
        return values, {}
    return values, asked


def _on_one_stage(
    session: SmpSessionV1, module: nn.Module, asked: Mapping[str, CheckpointRequest], plan: Plan
) -> list[str]:
    """Return `asked` without what lies on several stages: a note where these are cut automatically, else an error."""
    kept = []
    for name in asked:
        inner = module.get_submodule(name)
        alone = not isinstance(inner, (nn.Sequential, nn.ModuleList))
        parts = [name] if alone else [f"{name}.{child}" for child, _ in inner.named_children()]
        over = {part: stages for part in parts if len(stages := _stages(part, plan)) > 1}
        if not over:
            kept.append(name)
        for part, stages in over.items():
            text = f"smp.set_activation_checkpointing: {part or 'the model'} lies on stages {stages}"
            if not session.cfg.auto_partition:
                raise PartitionError(f"{text}; checkpoint modules that are on one stage, such as its blocks")
            _say(f"{text}: it is not checkpointed.")
    return kept


def _stages(name: str, plan: Plan) -> list[int]:
    prefix = f"{name}." if name else ""
    return [
        stage
        for stage, blocks in enumerate(plan.stages)
        if any(block == name or block.startswith(prefix) for block in blocks)
    ]


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"note: {text}", file=sys.stderr)


def _strategy(block: str, asked: Mapping[str, CheckpointRequest]) -> str | None:
    if block in asked:
        return "each"
    container = block.rpartition(".")[0]
    return asked[container].strategy if container in asked else None


def _checkpoint_each(session: SmpSessionV1, module: nn.Module, asked: Sequence[str]) -> None:
    """Checkpoint the children of containers, and other modules themselves."""
    memory, offload = MemorySection(activation_checkpointing="full"), bool(session.cfg.offload_activations)
    horizon = int(session.cfg.activation_loading_horizon)
    for name in asked:
        inner = module.get_submodule(name)
        alone = not isinstance(inner, (nn.Sequential, nn.ModuleList))
        units: Sequence[nn.Module] = [inner] if alone else list(inner.children())
        apply_activation_checkpointing(
            [[unit] for unit in units], memory, ActivationOffload(session.device, horizon) if offload else None
        )
