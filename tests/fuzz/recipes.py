"""Drawn modules: a seed gives the habits of a module, the layout, the optimizer and the batches that train it."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.job.schema import Job
from tests.fuzz import parts
from tests.habits import keeping, modules
from tests.habits.building import POSITIONS, WIDTH, Residual, Stack
from tests.habits.table import HALF, LAYOUTS, SEVERAL, Sections
from tests.habits.trial import CLIP, make_job

# How blocks are called: one in a module.
CALLS: tuple[type[Stack], ...] = (
    Stack, modules.KeywordBlocks, modules.Positions, modules.CollectedLosses, modules.GrowingState,
    modules.NotedLosses, parts.Tuples, parts.Dicts, parts.Objects, parts.Skipping, parts.EarlyExit, parts.Backwards,
    parts.Repeated, parts.OtherMethods, parts.Caches, parts.DenselyConnected, parts.Split,
    keeping.WrittenOutputs, modules.GradientFreeShortcut,
)  # fmt: skip
# Everything else: up to MOST of them in a module.
HABITS: tuple[type[Stack], ...] = (
    modules.Attending, modules.ScalingHooks, modules.ClippingHook, modules.AccumulateHook, modules.BlockHooks,
    modules.Penalized, modules.Parametrized, modules.Loaded, modules.RegisteredValues, modules.Zeroed,
    modules.ParentInitialized, modules.ParentBesideBlocks, modules.SpectrallyNormed, modules.Orthogonal,
    modules.BufferOfWeights, modules.InPlace,
    modules.Scalars, modules.OddParameters, modules.TiedBlocks, modules.LookedUp, modules.BoundedRows,
    modules.SparseGradients, modules.ComplexParameters,
    modules.BatchNormed, modules.BatchNormedBlocks, parts.LayerNormed, parts.Convolved, parts.Embedded,
    parts.Recurrent, parts.DroppingNothing, parts.CountingBuffers, parts.CheckpointsItself, parts.ReentersItself,
    parts.SecondOrder, modules.ParameterAttributes, modules.SubclassedParameters, modules.ListedParameters,
    parts.ListsOfParameters, parts.Unused, parts.TiedEnds,
    parts.SharedLayer, parts.CopiedBlocks, parts.FrozenBlock, parts.FrozenLayers, parts.FrozenRows,
    parts.NeighbourReading, parts.OwnPenalty, parts.WeightReading, parts.DrawnByHand, parts.Clamped,
    parts.WithoutGradients, parts.ConditionalExperts, modules.BackwardHooks, modules.Shortcut,
    modules.ReplacedParameters, keeping.CachesInGlobals, keeping.LossesInGlobals, keeping.CountedHook, keeping.Locked,
    keeping.ClosedOver, keeping.PatchedForwards, keeping.DerivedAttribute, keeping.SharedMemory, keeping.LateHook,
    keeping.LateParameter, keeping.MarkedTensors, keeping.StateReading, keeping.CountingSteps,
    keeping.DerivedNumber, keeping.DerivedBesideValues, keeping.SharedBesideValues, keeping.DrawnAttribute,
)  # fmt: skip
MOST = 4

OFFLOADED, HYBRID, STAGES_AND_SHARDS = "offload", "shards and replicas", "stages and shards"
MORE_LAYOUTS: dict[str, tuple[int, Sections]] = {
    OFFLOADED: (2, {"memory": {"activation_checkpointing": "full", "offload_activations": True}}),
    HYBRID: (4, {"parallel": {"sharded_data_parallel_degree": 2}}),
    STAGES_AND_SHARDS: (4, {"parallel": {"pipeline_parallel_degree": 2}}),
}
EVERY_LAYOUT = LAYOUTS | MORE_LAYOUTS
PAIRS = [*SEVERAL, OFFLOADED]  # layouts of two workers
RARE = [*(set(EVERY_LAYOUT) - set(PAIRS))]
STEADY = {"eps": 1e-6}  # with AdamW's own, gradients that are nothing but rounding would move parameters by 1e-9
OPTIMIZERS: list[dict[str, Any]] = [
    {"name": "AdamW", "clip_norm": CLIP, "options": STEADY},
    {"name": "AdamW", "clip_norm": None, "options": STEADY},
    {"name": "SGD", "clip_norm": CLIP},  # without it large updates make rounding larger
    {"name": "SGD", "clip_norm": CLIP, "options": {"momentum": 0.9}},
]


@dataclass(frozen=True)
class Recipe:
    """What a seed gives.

    Attributes:
        call: how blocks are called, a class of CALLS.
        habits: classes of HABITS; the first are outermost.
        layout: a key of EVERY_LAYOUT.
        sections: keys of the job beside those of the layout.
    """

    seed: int
    call: str
    habits: tuple[str, ...]
    layout: str
    sections: Sections

    @property
    def workers(self) -> int:
        return EVERY_LAYOUT[self.layout][0]

    def __str__(self) -> str:
        return f"seed {self.seed}: {' + '.join((self.call, *self.habits))} as {self.layout}, {self.sections}"


def draw(seed: int) -> Recipe:
    """Return the recipe of a seed: the first of its draws that plain torch can train."""
    source = random.Random(seed)
    while True:
        recipe = _draw_any(seed, source)
        if _trains_in_torch(recipe):
            return recipe


def _draw_any(seed: int, source: random.Random) -> Recipe:
    habits = source.sample(HABITS, source.randint(1, MOST))
    layout = source.choice(PAIRS if source.random() < 0.9 else sorted(RARE))
    sections: Sections = {
        "training": {"microbatch_size": source.choice([1, 2, 4]), "sequences_per_step": source.choice([8, 8, 7])},
        "optimizer": source.choice(OPTIMIZERS),
    }
    return Recipe(seed, source.choice(CALLS).__name__, tuple(habit.__name__ for habit in habits), layout, sections)


def job_of(recipe: Recipe, directory: str) -> Job:
    """Return the job that trains the module of a recipe."""
    sections = deepcopy(recipe.sections)
    for name, values in EVERY_LAYOUT[recipe.layout][1].items():
        sections[name] = {**sections.get(name, {}), **values}
    if recipe.layout == HALF:  # its optimizer is SGD
        sections["optimizer"]["clip_norm"] = CLIP
        sections["optimizer"].get("options", {}).pop("eps", None)
    # Gradients of complex64 are rounded in each microbatch; plain torch has no backward of several with clamps.
    if {modules.ComplexParameters.__name__, parts.Clamped.__name__} & set(recipe.habits):
        sections["training"]["microbatch_size"] = None
    sections["model"] = {
        "factory": "tests.fuzz.recipes:build",
        "factory_arguments": {"call": recipe.call, "habits": list(recipe.habits)},
    }
    return make_job(directory, "Stack", sections)


def build(call: str, habits: list[str]) -> nn.Module:
    """Return a module with all the habits: it inherits from each, and its blocks from the blocks of each."""
    stacks = [_named(name) for name in (call, *habits)]
    blocks = [stack.block for stack in stacks if stack.block is not Residual]
    block = type("DrawnResidual", tuple(dict.fromkeys(blocks)) or (Residual,), {"__module__": __name__})
    bases = tuple(stack for stack in dict.fromkeys(stacks) if stack is not Stack) or (Stack,)
    module: nn.Module = type("Drawn", bases, {"block": block, "__module__": __name__})()
    names = dict(module.named_parameters())  # each under its first name
    computed = [name for stack in stacks for name in getattr(stack, "computed", ())]
    module.computed = tuple(name for name in computed if name in names)
    return module


def _named(name: str) -> type[Stack]:
    found: type[Stack] = getattr(parts, name, None) or getattr(modules, name, None) or getattr(keeping, name)
    return found


def _trains_in_torch(recipe: Recipe) -> bool:
    """Return whether torch alone builds the module and takes it forward and backward."""
    dtype = torch.bfloat16 if recipe.layout == HALF else torch.float64
    try:
        module = build(recipe.call, list(recipe.habits)).to(dtype)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(torch.float64 if dtype == torch.float64 else torch.float32)
        output = module(torch.randn(2, POSITIONS, WIDTH).to(dtype))
        output.square().sum().backward()
    except Exception:
        return False
    return bool(torch.isfinite(output).all())
