"""The table of building habits: what each module of `tests/habits/modules.py` comes to on every layout.

A row is one habit. It is right on every layout but those that refuse it; `test_habits.py` holds both, and
`python -m tools.habits` writes the table of docs/how-to/own-module.md from here. To add a habit, write its module and
its row, run the tests of this folder and write the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Sections = dict[str, dict[str, Any]]

ONE, SHARDS, REPLICAS, ZERO_1 = "one worker", "shards", "replicas", "ZeRO-1"
STAGES, CHECKPOINTS, HALF = "stages", "checkpointing", "16 bits"

# Name of a layout -> workers and keys of the job.
LAYOUTS: dict[str, tuple[int, Sections]] = {
    ONE: (1, {}),
    SHARDS: (2, {}),
    REPLICAS: (2, {"parallel": {"sharded_data_parallel_degree": 1}}),
    ZERO_1: (2, {"parallel": {"shard_optimizer_state": True}}),
    CHECKPOINTS: (2, {"memory": {"activation_checkpointing": "full"}}),
    STAGES: (2, {"parallel": {"pipeline_parallel_degree": 2}}),
    HALF: (2, {"precision": {"compute": "bf16"}, "optimizer": {"name": "SGD"}}),  # AdamW makes rounding larger
}
SEVERAL = (SHARDS, REPLICAS, ZERO_1, CHECKPOINTS, STAGES, HALF)  # layouts of several workers


@dataclass(frozen=True)
class Habit:
    """One habit of building modules.

    Attributes:
        module: name of its class in `modules` or `keeping`.
        words: the habit, as the page says it.
        refused: layout -> pattern of the message that refuses it there.
        remedy: what to do where it is refused, for the page.
        costs: what it costs where it works, for the page.
        keys: keys of the job beside those of the layout.
        untried: layouts on which one rank alone refuses it: that ends a job, while a test's other ranks would wait.
        quick: layouts that are tried in every run of the tests, beside the first that refuses; the rest are slow tests.
        exact: largest error of a parameter in a job in fp64.
        changes: its forward, or a hook, changes what later forwards compute, for which `verify` refuses it.
    """

    module: str
    words: str
    refused: Mapping[str, str] = field(default_factory=dict)
    remedy: str = ""
    costs: str = ""
    keys: Sections = field(default_factory=dict)
    quick: tuple[str, ...] = (SHARDS,)
    untried: tuple[str, ...] = ()
    exact: float = 1e-9
    changes: bool = False

    def __str__(self) -> str:
        return self.module

    def works(self) -> list[str]:
        """Return the layouts on which it trains as in plain torch."""
        return [layout for layout in LAYOUTS if layout not in self.refused]


BUILT_ONCE = "built once on rank 0"
STAYS_GATHERED = "parameters stay gathered"
SHARED_STATISTICS = "two small messages a step"

HABITS: tuple[Habit, ...] = (
    Habit("Stack", "a list of like blocks between other layers"),
    Habit(
        "SingleLayer",
        "no blocks at all",
        refused={STAGES: "it has 0 lists of blocks", CHECKPOINTS: "repeated blocks are checkpointed"},
        remedy="one layer cannot be cut",
    ),
    Habit("KeywordBlocks", "blocks that take keyword arguments alone", quick=(CHECKPOINTS,)),
    Habit("Attending", "`nn.MultiheadAttention` and torch's Transformer layers"),
    Habit("Parametrized", "`weight_norm` and other parametrizations"),
    Habit(
        "SpectrallyNormed",
        "`spectral_norm`",
        refused={HALF: "the forward of SpectrallyNormed.*(must have the same dtype|expected scalar type)"},
        remedy="use fp32",
        costs=BUILT_ONCE,
    ),
    Habit(
        "Orthogonal",
        "`orthogonal`",
        refused={HALF: "the forward of Orthogonal.*not implemented for 'BFloat16'"},
        remedy="use fp32",
        costs=BUILT_ONCE,
    ),
    Habit("Loaded", "weights loaded in the factory", costs=BUILT_ONCE),
    Habit("RegisteredValues", "parameters registered with values"),
    Habit("Zeroed", "a constructor that changes weights (`nn.init`, `apply`)", costs=BUILT_ONCE),
    Habit("BufferOfWeights", "buffers computed from weights", costs=BUILT_ONCE),
    Habit("ParentInitialized", "`reset_parameters` that fills blocks below", costs="they are drawn whole on each rank"),
    Habit("ParentBesideBlocks", "`reset_parameters` that fills other modules below"),
    Habit("ReplacedLayer", "a layer that is replaced after `reset_parameters` above it", costs=BUILT_ONCE, quick=()),
    Habit("FilledAfterwards", "a layer that is filled anew after it", costs=BUILT_ONCE, quick=()),
    Habit(
        "BatchNormed",
        "batch norms; see `model.running_statistics`",
        refused={HALF: "the forward of BatchNormed.*expected scalar type"},
        remedy="use fp32",
        costs=SHARED_STATISTICS,
        quick=(),
    ),
    Habit(
        "BatchNormedBlocks",
        "batch norms in blocks",
        refused={HALF: "the forward of BatchNormedBlocks.*expected scalar type"},
        remedy="use fp32",
        costs=SHARED_STATISTICS,
    ),
    Habit("ScalingHooks", "`register_hook` that scales or masks", costs="the gradient is gathered"),
    Habit(
        "ClippingHook",
        "`register_hook` that does more",
        refused=dict.fromkeys((ONE, STAGES), r"last.weight of ClippingHook \(.*modules.py:\d+"),
        remedy="one microbatch on each rank",
        costs="the gradient is gathered",
        keys={"training": {"microbatch_size": 4}},
    ),
    Habit(
        "AccumulateHook",
        "`register_post_accumulate_grad_hook`",
        refused=dict.fromkeys(SEVERAL, r"last.weight of AccumulateHook \(.*modules.py:\d+"),
        remedy="`register_hook`",
        costs="one microbatch a step",
        keys={"training": {"microbatch_size": None}},
        quick=(ONE,),
    ),
    Habit("BlockHooks", "hooks on blocks", quick=(STAGES,)),
    Habit(
        "BackwardHooks",
        "`register_full_backward_hook` on blocks",
        refused={STAGES: "has a backward hook of a module, of which a trace keeps nothing"},
        remedy="`register_hook` on parameters",
        quick=(),
    ),
    Habit("Shortcut", "shortcuts past the blocks", quick=(STAGES,)),
    Habit("GradientFreeShortcut", "shortcuts from frozen layers", quick=(STAGES,)),
    Habit(
        "ReversedGradients",
        "a `torch.autograd.Function` in a forward that is no chain of blocks",
        refused={STAGES: "has the autograd function Reversal, of which a trace keeps nothing"},
        remedy="hand on one tensor from block to block",
        quick=(),
    ),
    Habit("Positions", "blocks given positions or times in fp32", quick=(HALF,)),
    Habit("Forces", "blocks that take a gradient in forward (`autograd.grad`)", quick=(CHECKPOINTS,)),
    Habit(
        "ForcesInObjects",
        "the same in a forward that computes between its blocks",
        refused={STAGES: "makes a tensor while it is traced of which torch keeps no value"},
        remedy="use no pipeline",
        quick=(),
    ),
    Habit(
        "OuterForces",
        "a module that takes a gradient through its blocks",
        refused={STAGES: "blocks.0 runs 2 times in a forward"},
        remedy="use no pipeline",
        costs=STAYS_GATHERED,
    ),
    Habit("OwnCheckpoints", "blocks that checkpoint themselves", quick=(STAGES,)),
    Habit("ReentrantCheckpoints", "the same with `use_reentrant=True`", quick=()),
    Habit("CheckpointedBlocks", "a module that checkpoints its blocks", quick=(STAGES,)),
    Habit(
        "ReentrantBlocks",
        "the same with `use_reentrant=True`",
        refused={STAGES: r"ReentrantBlocks \(.*modules.py:\d+\) runs its blocks where gradients are off"},
        remedy="`use_reentrant=False`",
        quick=(),
    ),
    Habit(
        "CollectiveForward",
        "collectives in forward",
        refused=dict.fromkeys(SEVERAL, "a forward calls torch.distributed.all_reduce"),
        untried=(STAGES,),
        remedy="a callback after the step",
        quick=(),
    ),
    Habit(
        "ImportedCollectives",
        "the same imported by name, or differentiable",
        refused=dict.fromkeys(SEVERAL, "a forward calls torch.distributed.all_reduce"),
        untried=(STAGES,),
        remedy="a callback after the step",
        quick=(),
    ),
    Habit("DataclassBlocks", "blocks that take and return a dataclass", quick=()),
    Habit("NamedTupleBlocks", "blocks that return a named tuple", quick=()),
    Habit("ModelOutputBlocks", "blocks that return transformers' objects"),
    Habit(
        "TimedStack",
        "a module given times in fp32",
        keys={"data": {"factory": "tests.habits.building:TimedRows"}},
        quick=(HALF,),
    ),
    Habit(
        "Penalized",
        "a forward that reads parameters of other modules",
        costs=STAYS_GATHERED,
    ),
    Habit("CollectedLosses", "blocks that append to a list of their caller"),
    Habit("GrowingState", "blocks that read and write a dict of their caller", quick=(CHECKPOINTS,)),
    Habit("NotedLosses", "blocks that keep losses on themselves or in an object"),
    Habit(
        "InPlace",
        "blocks that write into what they are given",
        refused=dict.fromkeys(SEVERAL, r"blocks.0 of InPlace \(.*modules.py:\d+"),
        remedy="make a new tensor: `x = x * 2`",
        quick=(ONE,),
    ),
    Habit("Scalars", "0-dim parameters", costs="every rank holds them whole"),
    Habit(
        "OddParameters",
        "frozen, empty, one-element, not contiguous or integer parameters",
        quick=(ZERO_1, STAGES),
    ),
    Habit(
        "TiedBlocks",
        "a parameter that two blocks share",
        costs=STAYS_GATHERED,
    ),
    Habit(
        "BoundedRows",
        "`nn.Embedding(max_norm=...)`",
        refused=dict.fromkeys(SEVERAL, r"words of BoundedRows \(.*modules.py:\d+\) has max_norm"),
        remedy="scale the rows in a callback after the step",
        quick=(ONE,),
        changes=True,
    ),
    Habit(
        "MovingAverages",
        "blocks that write parameters in forward (momentum encoders, clamps), `.data` too",
        refused=dict.fromkeys(
            SEVERAL, r"forward of MovingAverages \(.*modules.py:\d+\) writes the parameter blocks.0.slow"
        ),
        remedy="a callback after the step, or buffers",
        keys={
            "training": {"microbatch_size": None}
        },  # plain torch runs the forwards of a step ahead of their backwards
        quick=(),
        changes=True,
    ),
    Habit(
        "ReplacedParameters",
        "a forward that sets a parameter anew (`self.bias = nn.Parameter(...)`)",
        refused=dict.fromkeys(
            LAYOUTS,
            r"forward of ReplacedParameters \(.*modules.py:\d+\) puts a new one in place of the parameter last.bias",
        ),
        remedy="keep it in a buffer",
        quick=(),
    ),
    Habit("Recurrent", "`nn.LSTM`, `nn.GRU` and `nn.RNN`", quick=(STAGES,)),
    Habit(
        "SparseGradients",
        "`nn.Embedding(sparse=True)`",
        refused=dict.fromkeys(LAYOUTS, r"words of SparseGradients \(.*modules.py:\d+\) has sparse gradients"),
        remedy="build it with `sparse=False`",
        quick=(),
    ),
    Habit(
        "ComplexParameters",
        "complex parameters",
        refused=dict.fromkeys(SEVERAL, r"blocks.0.own of ComplexParameters \(.*modules.py:\d+\) is complex"),
        remedy="`torch.view_as_complex` of a real parameter",
        keys={"training": {"microbatch_size": None}},  # gradients of complex64 are rounded in each microbatch
        quick=(ONE,),
        exact=1e-8,  # and one rounded the other way is part of the norm by which all are clipped: 1.2e-9 with AVX2
    ),
    Habit("ComplexBuffers", "complex buffers"),
    Habit("ParameterAttributes", "attributes that are set on parameters", quick=(STAGES,)),
    Habit(
        "SubclassedParameters",
        "subclasses of `nn.Parameter`",
        refused=dict.fromkeys(LAYOUTS, r"gain of SubclassedParameters \(.*modules.py:\d+\) is of a class of its own"),
        remedy="use `nn.Parameter`, and attributes of it",
        quick=(),
    ),
    Habit(
        "ListedParameters",
        "plain lists of parameters",
        refused=dict.fromkeys(LAYOUTS, r"weights of ListedParameters \(.*modules.py:\d+\) keeps parameters"),
        remedy="`nn.ParameterList`",
        quick=(),
    ),
    Habit(
        "ReturnedParameters",
        "a loss that reads the parameters that forward returns",
        costs=STAYS_GATHERED,
        refused={STAGES: r"ReturnedParameters \(.*modules.py:\d+\) reads blocks.0"},
        remedy="`optimizer.weight_decay`, or no pipeline",
        keys={"model": {"loss": "tests.habits.modules:penalized_error"}},
    ),
    Habit("CachesInGlobals", "caches in globals, `functools.lru_cache`", quick=()),
    Habit(
        "LossesInGlobals",
        "blocks that leave losses in globals or on classes",
        refused=dict.fromkeys(SEVERAL, "leaves a tensor with a gradient in LOSSES of tests.habits.keeping"),
        remedy="hand a list to the blocks",
        quick=(),
    ),
    Habit(
        "CountedHook",
        "a `register_hook` that counts its calls",
        refused=dict.fromkeys((ONE, STAGES), "last.weight of CountedHook"),
        remedy="one microbatch on each rank",
        keys={"training": {"microbatch_size": 4}},
        quick=(),
        changes=True,
    ),
    Habit("Locked", "locks and open files as attributes", quick=()),
    Habit(
        "KeptGenerator",
        "a Python generator as an attribute",
        refused=dict.fromkeys(LAYOUTS, "rates of KeptGenerator keeps a generator"),
        remedy="keep a list and a number",
        quick=(),
    ),
    Habit(
        "ClosedOver",
        "functions that have captured a parameter",
        refused=dict.fromkeys(LAYOUTS, r"project of ClosedOver \(.*keeping.py:\d+\) keeps parameters"),
        remedy="read it from its module in forward",
        quick=(),
    ),
    Habit("PatchedForwards", "blocks whose `forward` is wrapped", quick=()),
    Habit(
        "DerivedAttribute",
        "attributes made from parameters in the constructor",
        refused=dict.fromkeys(LAYOUTS, r"start of DerivedAttribute \(.*keeping.py:\d+\) keeps a tensor made from"),
        remedy="a buffer of a clone",
        quick=(),
    ),
    Habit("DerivedNumber", "numbers made from parameters", quick=()),
    Habit("DrawnAttribute", "what the constructor draws"),
    Habit(
        "SharedMemory",
        "two parameters of one memory (by `.data =`)",
        refused=dict.fromkeys(LAYOUTS, r"first.weight and last.weight of SharedMemory \(.*keeping.py:\d+\) share"),
        remedy="assign the parameter itself",
        quick=(),
    ),
    Habit(
        "LateHook",
        "a forward that puts hooks on parameters",
        refused=dict.fromkeys(LAYOUTS, r"LateHook \(.*keeping.py:\d+\) puts a hook on the gradient of last.weight"),
        remedy="`register_hook` in the constructor",
        quick=(),
    ),
    Habit(
        "LateParameter",
        "a forward that makes parameters or layers",
        refused=dict.fromkeys(LAYOUTS, r"LateParameter \(.*keeping.py:\d+\) puts a new one .* parameter gain"),
        remedy="make them in the constructor",
        quick=(),
    ),
    Habit(
        "Unfreezing",
        "a forward that freezes or unfreezes parameters",
        refused=dict.fromkeys(SEVERAL, r"Unfreezing \(.*keeping.py:\d+\) freezes or unfreezes the parameter blocks.0"),
        remedy="`model.freeze`, or a mask by `register_hook`",
        keys={"training": {"microbatch_size": None}},
        quick=(),
        changes=True,
    ),
    Habit(
        "MarkedTensors",
        "attributes that blocks set on tensors",
        refused=dict.fromkeys(SEVERAL, r"blocks.0 of MarkedTensors \(.*keeping.py:\d+\) returns a tensor with"),
        remedy="return the value beside the tensor",
        quick=(),
    ),
    Habit(
        "StateReading",
        "`state_dict()` in forward",
        refused=dict.fromkeys(SEVERAL, r"forward of StateReading \(.*keeping.py:\d+\) calls state_dict"),
        remedy="read the parameters themselves",
        quick=(),
    ),
    Habit("WrittenOutputs", "a module that writes into what its blocks return", quick=(STAGES,)),
    Habit(
        "LateWrites",
        "`.data` that is written in a later step",
        refused=dict.fromkeys(
            (SHARDS, REPLICAS, ZERO_1, CHECKPOINTS, HALF), r"writes the parameter blocks.\d.up.weight, which is sharded"
        ),
        remedy="a callback after the step, or buffers",
        keys={"training": {"microbatch_size": None}},
        costs="one microbatch a step",
        untried=(STAGES,),
        quick=(),
        changes=True,
    ),
    Habit("FlagsBetweenBlocks", "blocks that hand on flags or numbers", quick=()),
    Habit("DetachedBetweenBlocks", "blocks given what earlier layers made, detached", quick=()),
    Habit(
        "CountingBlocks",
        "blocks that count in globals or on classes",
        refused={STAGES: "blocks.0 changes the number depth of CountedResidual, which other stages would not see"},
        remedy="count around the blocks",
        quick=(),
    ),
    Habit(
        "CountingTypes",
        "the same by `type(self)`",
        refused={STAGES: "blocks.0 changes the number depth of TypeCountedResidual"}
        | dict.fromkeys(
            (SHARDS, REPLICAS, ZERO_1, CHECKPOINTS, HALF),
            r"forward of CountingTypes \(.*keeping.py:\d+\) sets depth on type\(self\), which is another class",
        ),
        remedy="name the class",
        quick=(),
    ),
    Habit(
        "ReachedParents",
        "blocks that reach their parent by `weakref`",
        costs=STAYS_GATHERED,
        refused={STAGES: r"ReachedParents \(.*keeping.py:\d+\) reads first.weight outside"},
        remedy="give blocks the value",
        quick=(),
    ),
    Habit(
        "CountingSteps",
        "a forward that counts its calls, no chain of blocks",
        refused={STAGES: "changes the number calls of CountingSteps, of which a trace keeps one value"},
        remedy="hand on one tensor from block to block",
        keys={"training": {"microbatch_size": None}},
        quick=(),
    ),
    Habit(
        "RowsTogether",
        "rows that change each other's numbers (`x - x.mean(0)`, losses between rows)",
        refused=dict.fromkeys(SEVERAL, r"RowsTogether \(.*modules.py:\d+\) or its loss gives other numbers for rows"),
        remedy="set `training.microbatch_size`",
        keys={"training": {"microbatch_size": None}},
        quick=(),
    ),
    Habit("RowsTogether", "the same with `training.microbatch_size`"),
    Habit(
        "FrozenForAWhile",
        "parameters that are frozen for a part of the forward",
        refused={STAGES: "parameters that it freezes or unfreezes, of which a trace keeps nothing"},
        remedy="`torch.func.functional_call` with detached values",
        quick=(),
    ),
    Habit(
        "ReadStatistics",
        "buffers that a forward changes and reads (moving averages, `spectral_norm` in training)",
        refused=dict.fromkeys(
            (SHARDS, REPLICAS, ZERO_1, CHECKPOINTS, HALF),
            r"ReadStatistics \(.*modules.py:\d+\) reads, in training, buffers",
        ),
        remedy="set `model.running_statistics` yourself",
        quick=(),
        changes=True,
    ),
)
