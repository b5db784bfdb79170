"""The shapes of a rank's parameters under tensor and pipeline parallelism, and its optimizer's state, from facts alone.

The same rules as `shardwise.parallel` follows when it cuts a model; a test holds the two against each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from shardwise.job.axes import Axis
from shardwise.job.optimizer_records import RECORDS
from shardwise.model.adapters import adapter_split
from shardwise.model.facts import ModelFacts
from shardwise.model.packed_weights import packed_bytes
from shardwise.model.parameter_optimizers import optimizers_of_parameters
from shardwise.model.tensor_split import chunk, chunks
from shardwise.plan.plan import Plan
from shardwise.planner.formulas.schedule import holders

KEPT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}  # of a dtype by torch's name
# State tensors as large as the parameters, by class of torch.optim with its default options.
_STATES = {
    "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Rprop": 2, "ASGD": 1, "Adagrad": 1,
    "RMSprop": 1, "SGD": 0,
}  # fmt: skip


def stored_bytes(facts: ModelFacts, name: str, master: int) -> float:
    """Return the bytes of an element of a parameter: frozen ones may be kept in a dtype of their own, or packed."""
    form = facts.packed.get(name)
    return KEPT_BYTES.get(facts.kept_dtype(name), master) if form is None else packed_bytes(form)


def local_shapes(facts: ModelFacts, plan: Plan, index: int = 0, pipeline: int = 0) -> dict[str, tuple[int, ...]]:
    """Parameter name -> its shape on tensor rank `index` of pipeline rank `pipeline`, before sharding.

    Tensor rank 0 has the largest part of everything.
    """
    shapes, own_stages = _of_tensor(facts, plan, index), set(plan.stages_of(pipeline))
    if not plan.stages:
        return shapes
    stages = holders(plan, facts)
    return {name: shape for name, shape in shapes.items() if own_stages & set(stages[name])}


def expert_shards(plan: Plan) -> int:
    """Return the ranks over which the state of one expert is sharded."""
    return plan.state_ranks // math.gcd(plan.state_ranks, plan.degrees[Axis.EXPERT])


DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "uint8": 1}


def optimizer_state_bytes(plan: Plan, facts: ModelFacts, parts: Mapping[str, tuple[int, ...]]) -> float:
    """Return the bytes of optimizer state beside trained parameters, given by name as the shapes of a rank's parts."""
    own = DTYPE_BYTES[plan.dtypes.optimizer]
    if not plan.optimizers:
        settings = plan.job.optimizer
        return _bytes_of_one(settings.name, settings.options, own, facts, parts)
    chosen = optimizers_of_parameters(facts, plan.job.optimizer)
    kinds: dict[tuple[str, str], dict[str, tuple[int, ...]]] = {}
    for name, part in parts.items():
        kinds.setdefault(chosen[name].kind, {})[name] = part
    options = {chosen[name].kind: chosen[name].options for name in parts}
    return sum(_bytes_of_one(kind[0], options[kind], own, facts, alike) for kind, alike in kinds.items())


def _bytes_of_one(
    name: str, options: Mapping[str, Any], own: int, facts: ModelFacts, parts: Mapping[str, tuple[int, ...]]
) -> float:
    """Return the same of one optimizer; `own` are the bytes of a number of its state where it says nothing else."""
    record = RECORDS.get(name)
    if record is None:
        return own * _optimizer_states(name, options) * sum(map(math.prod, parts.values()))
    kept = (record.state(options, facts.parameter_shapes[parameter], part) for parameter, part in parts.items())
    tensors = (tensor for state in kept for tensor in state.values())
    return sum(math.prod(tensor.shape) * DTYPE_BYTES.get(tensor.dtype, own) for tensor in tensors)


def _optimizer_states(name: str, options: Mapping[str, Any]) -> int:
    """State tensors as large as the parameters. Unknown classes count as Adam's two."""
    states = _STATES.get(name, 2)
    if name in ("SGD", "RMSprop") and options.get("momentum"):
        states += 1
    return states + bool(options.get("amsgrad")) + bool(options.get("centered"))


class _Same:
    """Facts as a key: of the same object, since a search asks for those of one model thousands of times."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts

    def __hash__(self) -> int:
        return id(self.facts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.facts is other.facts


def _of_tensor(facts: ModelFacts, plan: Plan, index: int) -> dict[str, tuple[int, ...]]:
    degree, experts = plan.degrees[Axis.TENSOR], plan.degrees[Axis.EXPERT]
    if degree == experts == 1:
        return facts.parameter_shapes
    chunked_loss = plan.chunked_loss and degree > 1
    return _cut_shapes(_Same(facts), degree, plan.degrees[Axis.CONTEXT], experts, chunked_loss, index)


@lru_cache(maxsize=16)
def _cut_shapes(
    model: _Same, degree: int, context: int, experts: int, chunked_loss: bool, index: int
) -> dict[str, tuple[int, ...]]:
    facts = model.facts.for_degrees(degree, context)
    shapes = {
        name: (shape[0] // experts, *shape[1:])
        if experts > 1 and name in facts.expert_parameters
        else _of_block(name, shape, facts, degree, index)
        for name, shape in facts.parameter_shapes.items()
    }
    for name in facts.vocabulary_parameters if chunked_loss else ():
        shape = facts.parameter_shapes[name]
        shapes[name] = _cut(shape, 0, [chunk(shape[0], degree, index)])
    return shapes


def local_elements(facts: ModelFacts, plan: Plan, tensor: int, shard: int, pipeline: int = 0) -> int:
    """Parameters that the rank at these coordinates holds; `shard` counts over shard x context.

    Each has one gradient element, and as many elements of optimizer state as the class keeps.
    """
    ranks, experts = plan.state_ranks if plan.needs_fsdp else 1, plan.degrees[Axis.EXPERT]
    of_expert = expert_shards(plan) if plan.needs_fsdp else 1
    total = 0
    for name, shape in local_shapes(facts, plan, tensor, pipeline).items():
        if experts > 1 and name in facts.expert_parameters:
            rows = chunk(shape[0], of_expert, shard // experts % of_expert)
        else:
            rows = chunk(shape[0], ranks, shard) if shape else slice(0, 1)
        total += (rows.stop - rows.start) * math.prod(shape[1:])
    return total


def _of_block(name: str, shape: tuple[int, ...], facts: ModelFacts, degree: int, index: int) -> tuple[int, ...]:
    module, _, leaf = name.rpartition(".")
    split = facts.tensor_splits.get(module) or adapter_split(facts, module)
    part = None if split is None else split.of(leaf)
    if part is None:
        return shape
    copies = facts.key_value_copies(degree) if part.key_value else 1
    sections, groups = part.along(shape[part.dim], degree)
    return _cut(shape, part.dim, chunks(sections, degree // copies, index // copies, groups))


def _cut(shape: tuple[int, ...], dim: int, parts: Sequence[slice]) -> tuple[int, ...]:
    return (*shape[:dim], sum(part.stop - part.start for part in parts), *shape[dim + 1 :])
