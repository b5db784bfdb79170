"""ModelFacts: all that plan, planner and parallelize() know of a model, as plain data.

Made by `shardwise.model.discover` from the structure of a model on the meta device; nothing here touches torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED, Capability, refused
from shardwise.model.call_names import called_module
from shardwise.model.parameter_kinds import ParameterKinds
from shardwise.model.parameter_writes import ForwardEffects
from shardwise.model.tensor_split import TensorSplit

NO_KINDS = ParameterKinds()
NO_EFFECTS = ForwardEffects()
ENCODER, DECODER = 0, 1  # the sequences of a model of two; of any other those of DECODER
NOT_EXAMINED = refused("it was not looked at")


@dataclass(frozen=True)
class BlockFacts:
    """One repeated block (a transformer layer): its qualified name and its size.

    `parameters` counts elements. Where stages are cut from a trace, blocks are calls: a later one of the same module is
    named `name#2` and has no parameters.
    """

    name: str
    parameters: int


@dataclass(frozen=True)
class PlaceholderShape:
    """The shape of what a module would return, for its placeholder on a stage that does not hold it.

    Attributes:
        argument: position or name of the tensor, or the shape, that the output's shape follows from.
        first, end: which of its dims the output has.
        ones: dims of size 1 ahead of these.
        width: of a last dim behind them; 0 where there is none.
    """

    argument: int | str = 0
    first: int = 0
    end: int | None = None
    ones: int = 0
    width: int = 0

    def shape(self, argument_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the output's shape."""
        return (*(1,) * self.ones, *argument_shape[self.first : self.end], *((self.width,) if self.width else ()))


@dataclass(frozen=True)
class StageFacts:
    """The cut of a model into pipeline stages: between blocks that are a chain or two, else by tracing its forward.

    Attributes:
        before: modules outside of the blocks that run before them -> elements of their own parameters.
        after: those that run after them, or never.
        placeholders: shapes for those of the modules before.
        outputs: 0 where a block returns its hidden states; n where they are the first of a tuple of n.
        handed_on: what a block hands to the next: number of its output -> position or name of the argument there.
        encoder: name of the stack that runs first in a model of two, whose states go to every block of the other.
        encoder_blocks: how many blocks that stack has.
        runs: modules outside of the blocks -> numbers of the blocks with which they run.
        hidden: shape of one sample's hidden states in a module of model.factory; transformers' models have [S, H].
        order: the blocks as they run, where each runs once.
        uses: parameter -> numbers of the blocks with which it is used, where that is not the one block that holds it.
        between: block number -> elements of the parameters that are used with it, neither `before` nor `after`.
        traced: whether stages are pieces of a traced forward.
        reshapes: whether a transformers model hands on other hidden states than [B, S, H]: it fills up its windows, or
            has several streams.
        towers: modules that run before the chain and hold blocks of their own, or follow on such: of the first stage.
        tower_blocks: how many of the blocks, the first ones, are no part of the chain but of towers.
        first_blocks: how many the first stage has at least, where there are towers: theirs, those to whose outputs
            towers add (DeepStack, arXiv 2406.04334), and one more.
    """

    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    placeholders: dict[str, PlaceholderShape] = field(default_factory=dict)
    outputs: int = 0
    handed_on: dict[int, int | str] = field(default_factory=lambda: {0: 0})
    encoder: str = ""
    encoder_blocks: int = 0
    runs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    hidden: tuple[int, ...] = ()
    order: tuple[str, ...] = ()
    uses: dict[str, tuple[int, ...]] = field(default_factory=dict)
    between: dict[int, int] = field(default_factory=dict)
    traced: bool = False
    reshapes: bool = False
    towers: tuple[str, ...] = ()
    tower_blocks: int = 0
    first_blocks: int = 0

    @property
    def has_flat_boundaries(self) -> bool:
        """Tell whether one flat tensor crosses a stage's boundaries: more than hidden states [B, S, H], or others."""
        return self.traced or self.reshapes or bool(self.encoder) or len(self.handed_on) > 1


@dataclass(frozen=True)
class AttentionFacts:
    """One call of attention in the forward.

    Attributes:
        name: of the module.
        head_size, value_size: of queries and keys, and of values.
        window: keys that a query sees, where not all.
        chunk: length of the parts of a sequence that see only themselves, where there are such.
        bias: kind of the bias on the scores (`model.attention_choice.AttentionNeeds.bias`).
        softcap: whether scores pass a soft cap.
        dropout: whether probabilities are dropped.
    """

    name: str
    head_size: int = 0
    value_size: int = 0
    window: int | None = None
    chunk: int | None = None
    bias: str = ""
    softcap: bool = False
    dropout: bool = False


class Reach(NamedTuple):
    """Distance that some calls of attention see: `share` of them in a block; `window` and `chunk` are 0 for all."""

    share: float
    window: int = 0
    chunk: int = 0

    def attended(self, sequence: int) -> float:
        """Return the length of a sequence all of which costs as much: twice the keys of the mean query, if causal.

        A window w leaves out two triangles of s - w of the square of s, a chunk all but squares on the diagonal.
        """
        window = min(self.window or sequence, sequence)
        return min(sequence, self.chunk) if self.chunk else window * (2 - window / sequence)


EVERYTHING = (Reach(1.0),)


class LatentAttention(NamedTuple):
    """Queries, keys and values made of latent vectors (MLA, arXiv 2405.04434, section 2.1), in features.

    `query` and `key_value` are the latent ranks; 0 where queries are made of hidden states. A head's query and key have
    `plain` features and `rotary` ones with positions, its value has `value`.
    """

    query: int
    key_value: int
    plain: int
    rotary: int
    value: int

    @property
    def head_size(self) -> int:
        """Features of a head with which attention costs as much: the mean of query's and value's."""
        return (self.plain + self.rotary + self.value) // 2

    @property
    def is_uneven(self) -> bool:
        """True where a head's value has another size than its query."""
        return self.plain + self.rotary != self.value

    def products(self, hidden: int, heads: int) -> list[tuple[int, int]]:
        """(inputs, outputs) of the block's products before and behind attention, of `heads` heads."""
        return [
            (hidden, self.query + self.key_value + self.rotary),
            (self.query or hidden, heads * (self.plain + self.rotary)),
            (self.key_value, heads * (self.plain + self.value)),
            (heads * self.value, hidden),
        ]


@dataclass(frozen=True)
class CarriedState:
    """The state that a mixer hands on from one part of its rows to the next.

    Attributes:
        recurrent: shape of the state of its recurrence, of one row of a batch; None without one.
        ahead: shape [channels, positions] of what its convolution reads ahead of its rows; None without one.
    """

    recurrent: tuple[int, ...] | None
    ahead: tuple[int, ...] | None


@dataclass(frozen=True)
class GatheredModule:
    """A module of a block that is given all rows of sequences of which the block has some.

    Attributes:
        name: of the module.
        side: of the sequences: ENCODER or DECODER.
        arguments: numbers of the leaves of (args, kwargs) that are gathered.
        results: numbers of the leaves of what it returns of which the block has some rows again.
        carries: what it hands on where it runs on some rows after the other in the place of all; None: it cannot.
    """

    name: str
    side: int
    arguments: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    carries: CarriedState | None = None


@dataclass(frozen=True)
class SplitBlock:
    """A block that is given some rows of sequences.

    Attributes:
        side: of the sequences: ENCODER, or DECODER, which are those of a model without an encoder, too.
        arguments: numbers of the leaves of (args, kwargs) that have rows.
    """

    side: int
    arguments: tuple[int, ...]


@dataclass(frozen=True)
class SplitAttention:
    """Calls of the AttentionInterface by a module that is given some rows, and gives it queries of them.

    Attributes:
        local_keys: whether keys and values are of the same rows; else they are of all.
        row_arguments: keyword arguments that have numbers for each query of whole sequences.
    """

    local_keys: bool
    row_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class SplitForward:
    """Blocks of a model on some rows of its sequences, while all ahead of them sees sequences whole.

    Attributes:
        blocks: those that run, by name.
        gathered: modules that are given all rows.
        attention: modules that call the AttentionInterface for some queries, by name.
        encoder: name of the encoder, whose output is gathered; empty for none.
        encoded: numbers of the leaves of it that are.
    """

    blocks: Mapping[str, SplitBlock]
    gathered: tuple[GatheredModule, ...] = ()
    attention: Mapping[str, SplitAttention] = field(default_factory=dict)
    encoder: str = ""
    encoded: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerAdapter:
    """The low-rank adapter of a linear layer y = W x: scaling * B A x is added (arXiv 2106.09685, section 4.1).

    Attributes:
        rank: rows of A and columns of B.
        scaling: alpha / rank, or alpha / sqrt(rank) (arXiv 2312.03732, section 3).
        dropout: probability, of the adapter's input.
        inputs, outputs: features of the layer.
        transposed: the layer's weight is [inputs, outputs].
        has_magnitude: the rows of W + scaling * B A have a trained length (DoRA, arXiv 2402.09353, section 4.1).
        experts: of a stack [experts, outputs, inputs], each with an A and a B of its own; 0 for a linear layer.
    """

    rank: int
    scaling: float
    dropout: float
    inputs: int
    outputs: int
    transposed: bool = False
    has_magnitude: bool = False
    experts: int = 0


@dataclass(frozen=True)
class BlockTraits:
    """Traits of a block that shapes of parameters do not show: what it keeps for backward, how projections lie.

    Attributes:
        relu: its MLP has ReLU.
        parallel_residual: attention and MLP read the same hidden states.
        heads_apart: rotary positions take a part of each head, or queries and keys are put together anew after them.
        projection_parts: in so many parts, one after the other, fused queries, values and keys lie.
    """

    relu: bool = False
    parallel_residual: bool = False
    heads_apart: bool = False
    projection_parts: int = 1


PLAIN_BLOCK = BlockTraits()


@dataclass(frozen=True)
class ModelFacts:
    """Structure and sizes of one model, and what can be done with it.

    Names are qualified module or parameter names of the unmodified model. Sizes are in elements. A field that does not
    apply (a user's own module without attention) is 0 or None.
    """

    family: str  # transformers' model_type, or the class name of a user's module
    parameters: int  # tied parameters counted once
    embedding_parameters: int  # input embeddings (positions included) that no matrix product reads
    blocks: tuple[BlockFacts, ...]
    capabilities: Mapping[Axis, Capability]  # of every axis; read by `supports`
    takes_token_ids: bool = True  # its forward is called with `input_ids` alone, all else follows
    returns_logits: bool = True  # its output has `logits`, of which the job takes the loss
    # Where labels that it is given stand: at the `same` place as their logits, or at the `next`, their own token's;
    # `other`: its class takes another loss of them than we do.
    given_labels: str = "same"
    computes_own_loss: bool = False  # its forward takes labels and returns the loss, unless the job has one
    classifies: bool = False  # its labels are classes, of samples or of tokens
    generates_text: bool = True  # a causal language model of it continues a prompt
    has_config: bool = True  # it has a config of transformers, which checkpoints and exports hold
    idle_parameters: int = 0  # of experts, those that a token does not go through
    experts_of_token: int = 0  # to how many experts a token goes
    expert_stacks: dict[str, int] = field(default_factory=dict)  # module name -> experts that it holds in stacks
    expert_matrices: tuple[str, ...] = ()  # parameters of these modules that are [experts, outputs, inputs]
    routers: dict[str, tuple[str, int]] = field(default_factory=dict)  # of stacks: router, number of its logits
    router_biases: dict[str, str] = field(default_factory=dict)  # of stacks: buffer that corrects the router's scores
    balancing_coefficient: float = 0.0  # of the loss that balances experts, in the config
    adds_balancing_loss: bool = False  # the model's own loss has it
    experts_copied: bool = False  # experts' weights are copied for each token that goes to them (batched_mm)
    experts_grouped: bool = False  # some are computed by grouped products (grouped_mm)
    experts_looped: bool = False  # some are computed one after the other (eager) that could be grouped
    ties: tuple[tuple[str, ...], ...] = ()  # groups of parameter names that share one storage
    tie_sources: dict[str, str] = field(default_factory=dict)  # first name of a tie -> that whose initializer counts
    hidden_size: int = 0
    layers: int = 0
    attention_heads: int = 0
    key_value_heads: int = 0
    head_size: int = 0  # of one head's query, key, value and result, the mean where values differ
    latent: LatentAttention | None = None  # by which queries, keys and values are made
    intermediate_size: int = 0
    vocabulary_size: int = 0
    max_positions: int | None = None
    fixed_logits: int = 0  # positions of the logits, where these are not those of the tokens (Perceiver)
    kept_logits: int = 0  # tensors of their size that autograd keeps between head and logits, as of a soft cap
    # Positions of a sample of files that has no tokens, in all blocks; 0: they are not known, None: it has tokens.
    sample_positions: int | None = None
    padding_position: int | None = None  # id of padding, behind which positions are counted, as RoBERTa counts them
    split_forward: SplitForward | None = None  # by which context ranks run its blocks, where inputs cannot be split
    documents_apart: Capability = SUPPORTED  # whether a mask of attention keeps documents of a sequence apart
    sliding_window: int | None = None  # how far back attention sees, where some block's does not see everything
    head: str | None = None  # module name of the output projection, when its output is the model's last operation
    head_has_bias: bool = False
    has_attention_dropout: bool = False
    has_functional_dropout: bool = False  # calls functional dropout outside of nn.Dropout, or draws uniform noise
    drops_blocks: bool = False  # at random, in training: LayerDrop
    blocks_share_arguments: bool = True  # every block is called with the same keyword arguments
    buffers: tuple[str, ...] = ()
    tensor_splits: dict[str, TensorSplit] = field(default_factory=dict)  # module name -> how it can be split
    mixer_outputs: dict[str, TensorSplit] = field(default_factory=dict)  # those of `mixers` where ranks share no heads
    heads_whole: str = ""  # why each tensor rank has all heads of attention; empty where they are split
    vocabulary_parameters: tuple[str, ...] = ()  # of input embeddings and head, where ranks can share their rows
    attention_arguments: tuple[str, ...] = ()  # what attention is given beside tensors, scale and dropout
    per_head_arguments: tuple[str, ...] = ()  # of its attention modules, made for all heads
    attention: tuple[AttentionFacts, ...] = ()  # calls of attention, in order
    fusible: dict[str, str] = field(default_factory=dict)  # module name -> which of Liger's kernels can compute it
    linears: dict[str, tuple[int, int]] = field(default_factory=dict)  # of blocks: name -> (inputs, outputs)
    read_linears: frozenset[str] = frozenset()  # others, whose weights the forward reads without calling them
    transposed_linears: frozenset[str] = frozenset()  # those of them whose weight is [inputs, outputs]: Conv1D
    attention_kernels: Capability = NOT_EXAMINED  # whether kernels of this project compute its attention
    stages: StageFacts = field(default_factory=StageFacts)
    gradient_hooks: tuple[str, ...] = ()  # parameters with hooks on their gradients
    whole_gradient_hooks: tuple[str, ...] = ()  # those whose hooks have to be given the whole gradient at once
    accumulate_grad_hooks: tuple[str, ...] = ()  # parameters with hooks for when a gradient is accumulated
    definition: str = ""  # the class of a user's module, with its file and line
    parent_initialized: dict[str, tuple[str, ...]] = field(default_factory=dict)  # module -> others' that it fills
    constructed: tuple[str, ...] = ()  # parameters of transformers' models whose constructors give them their values
    outside_reads: tuple[str, ...] = ()  # parameters of a user's module that are read while their owner does not run
    parameter_kinds: ParameterKinds = NO_KINDS  # parameters and embeddings that some layouts refuse
    writing_blocks: tuple[str, ...] = ()  # blocks of a user's module that write a tensor that they are given
    activation_writing_blocks: tuple[str, ...] = ()  # and that tensor was made from weights
    written_parameters: tuple[str, ...] = ()  # of a user's module, by its forward
    replaced_parameters: tuple[str, ...] = ()  # of a user's module, by others that its forward makes
    effects: ForwardEffects = NO_EFFECTS  # of a user's module, beside those
    takes_outer_gradient: bool = False  # a user's forward takes a gradient through its blocks
    couples_rows: bool = False  # rows of a microbatch change each other's numbers in the forward or its loss
    drops_by_microbatch: bool = False  # dropout depends on the rows together: they are not in the first dim
    keeps_statistics: bool = False  # a user's module takes statistics of rows together, and keeps them in buffers
    reads_statistics: bool = False  # and its forward in training reads what it keeps there
    draws_numbers: bool = False  # the forward draws random numbers other than those of dropout
    coupling_untried: str = ""  # why that was not found out, as a clause about the module
    changes_numbers: bool = False  # a user's blocks change numbers that other code may read
    blocks_without_gradient: bool = False  # a user's blocks run where gradients are off: checkpoints with reentry
    cast_arguments: tuple[str, ...] = ()  # of a user's module, float ones that it cannot take in fp32 in 16 bits
    unfit_dtypes: Mapping[str, str] = field(default_factory=dict)  # fp64, bf16 (for fp16 too) -> why transformers' own
    # code does not train in it, as a clause about that code
    activation_arguments: tuple[int | str, ...] = ()  # of the blocks, positions or names: what is made from weights
    sequence_parallel: Capability = SUPPORTED  # whether tensor ranks can share the sequence, where tensors are split
    block_traits: BlockTraits = PLAIN_BLOCK
    fp32_scores: bool = False  # its eager attention multiplies queries and keys in fp32 in every compute dtype
    parameter_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # in order; ties once, first name
    adapters: dict[str, LayerAdapter] = field(default_factory=dict)  # linear layer -> its adapter
    frozen: frozenset[str] = frozenset()  # parameters that are not trained, of those in parameter_shapes
    packed: dict[str, str] = field(default_factory=dict)  # frozen weight -> its form in 4 or 8 bits, `nf4` or `int8`
    weight_dtypes: dict[str, str] = field(default_factory=dict)  # parameter -> torch's name of the dtype in which it
    # is written, and kept where it is frozen; empty for a job without model.dtype
    unread_weights: tuple[str, ...] = ()  # tensors in the files of model.path that the model has no place for
    probe_failure: str = (
        ""  # why the forward could not be probed; head, dropout and arguments are then assumed the worst
    )

    def supports(self, axis: Axis) -> Capability:
        """Answer whether ranks can be spread along `axis`."""
        return self.capabilities[axis]

    def with_capabilities(self, answers: Mapping[Axis, Capability]) -> ModelFacts:
        """Return these facts with other answers for some axes."""
        return replace(self, capabilities={**self.capabilities, **answers})

    @cached_property
    def attention_alike(self) -> tuple[int, ...]:
        """The first layer that differs in nothing but its name, for each layer of `attention`; by number."""
        first: dict[AttentionFacts, int] = {}
        return tuple(first.setdefault(replace(layer, name=""), n) for n, layer in enumerate(self.attention))

    @cached_property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of `parameter_shapes` that are not frozen."""
        return {name: shape for name, shape in self.parameter_shapes.items() if name not in self.frozen}

    @cached_property
    def trained_parameters(self) -> int:
        """Elements of the parameters that are not frozen."""
        return self.parameters - sum(math.prod(self.parameter_shapes[name]) for name in self.frozen)

    def kept_dtype(self, name: str) -> str:
        """Return torch's name of the dtype of a parameter that is not converted to the masters'; else empty.

        A packed one is unpacked to the masters'.
        """
        if name in self.packed:
            return ""
        own = self.parameter_kinds.kept_dtypes.get(name, "")
        return own or (self.weight_dtypes.get(name, "") if name in self.frozen else "")

    @cached_property
    def base_shapes(self) -> dict[str, tuple[int, ...]]:
        """Those of `parameter_shapes` that are of the model itself, and not of its adapters."""
        layers = tuple(f"{name}.lora_" for name in self.adapters)
        return {name: shape for name, shape in self.parameter_shapes.items() if not name.startswith(layers or "\0")}

    def names_of(self, parameter: str) -> tuple[str, ...]:
        """Return all names of a parameter, of which ties have several; the first is that of `parameter_shapes`."""
        return next((group for group in self.ties if parameter in group), (parameter,))

    @property
    def own_attention_arguments(self) -> tuple[str, ...]:
        """Those of `attention_arguments` that cannot be cut as keys are; attention of whole rows alone knows them."""
        return tuple(name for name in self.attention_arguments if name != "key_bias")

    @cached_property
    def grouped_features(self) -> tuple[int, ...]:
        """Inner features of the experts that grouped products compute, each size once."""
        names = [name for name, split in self.tensor_splits.items() if split.grouped]
        return tuple(sorted({self.parameter_shapes[f"{name}.down_proj"][-1] for name in names}))

    def splits_beside_experts(self, degree: int) -> dict[str, TensorSplit]:
        """Return `tensor_splits`, without the experts where `degree` ranks share those: they stay whole then."""
        if degree == 1:
            return self.tensor_splits
        return {name: split for name, split in self.tensor_splits.items() if split.kind != "experts"}

    def stacked_parameters(self, stack: str) -> list[str]:
        """Return the names of the parameters of a stack of experts."""
        return [name for name in self.parameter_shapes if name.startswith(f"{stack}.")]

    @cached_property
    def expert_parameters(self) -> frozenset[str]:
        """Names of the parameters of all stacks of experts."""
        return frozenset(name for stack in self.expert_stacks for name in self.stacked_parameters(stack))

    @cached_property
    def key_values_apart(self) -> bool:
        """Tell whether some module makes keys or values alone."""
        return any(split.key_value for split in self.tensor_splits.values())

    @cached_property
    def fewest_gathered(self) -> int:
        """Output features of the smallest layer whose outputs are gathered; 0 where there is none."""
        gathered = {name: split.dim for name, split in self.tensor_splits.items() if split.kind == "gathered"}
        return min((self.parameter_shapes[f"{name}.weight"][dim] for name, dim in gathered.items()), default=0)

    @cached_property
    def shared_parts(self) -> int:
        """Parts in which tensor ranks can share a module of all heads; 0 where there is none."""
        return max((split.shared for split in self.tensor_splits.values() if not split.sizes), default=0)

    def for_degrees(self, tensor: int, context: int) -> ModelFacts:
        """Return these facts, with `mixers` by the outputs of their layers where such ranks cannot share their heads.

        A state that context ranks hand on is of all heads.
        """
        whole = [name for name, mixer in self.mixers.items() if context > 1 or not mixer.shares_heads(tensor)]
        return self.with_whole_mixers(whole) if tensor > 1 and whole else self

    def with_whole_mixers(self, whole: Collection[str]) -> ModelFacts:
        """Return these facts, with the mixers `whole` by the outputs of their layers."""
        inside = tuple(f"{name}." for name in whole)
        kept = {n: split for n, split in self.tensor_splits.items() if n not in whole and not n.startswith(inside)}
        gathered = {n: split for n, split in self.mixer_outputs.items() if n.startswith(inside)}
        why = refused("mixers of states are split by outputs, and what stands between is whole")
        return replace(self, tensor_splits=kept | gathered, sequence_parallel=why)

    @cached_property
    def mixers(self) -> dict[str, TensorSplit]:
        """Mixers of states that tensor ranks share by heads or channels, by name."""
        return {name: split for name, split in self.tensor_splits.items() if split.kind == "mixer"}

    @cached_property
    def block_of(self) -> dict[str, str]:
        """Parameter name -> name of the block that holds it; those outside of the blocks are left out."""
        holders = ((name, self._block_holding(name)) for name in self.parameter_shapes)
        return {name: block for name, block in holders if block}

    def _block_holding(self, name: str) -> str:
        """Return the block that holds a parameter, by any of its names; empty outside of the blocks."""
        parts = name.split(".")
        prefixes = (".".join(parts[:end]) for end in range(1, len(parts)))
        return next((prefix for prefix in prefixes if prefix in self._block_names), "")

    @cached_property
    def _block_names(self) -> frozenset[str]:
        return frozenset(block.name for block in self.blocks)

    @cached_property
    def unit_blocks(self) -> tuple[str, ...]:
        """The blocks that can be sharded as units of their own: their parameters are theirs and read by them alone."""
        # An outer gradient runs through the blocks before their forward is over; a traced forward calls none of them.
        if self.takes_outer_gradient or self.stages.traced:
            return ()
        of_root = {self._block_holding(name) for name in self.outside_reads}
        for group in self.ties:
            holders = {self._block_holding(name) for name in group}
            of_root |= holders if len(holders) > 1 else set()
        return tuple(block.name for block in self.blocks if block.name not in of_root)

    @property
    def rows_together(self) -> bool:
        """True where a row's numbers depend on the rows that are with it in a microbatch."""
        return self.couples_rows or self.drops_by_microbatch or self.draws_numbers

    @property
    def counting(self) -> tuple[str, ...]:
        """Modules by which functional dropout is counted: the blocks, and the stack of an encoder, for stages of the
        decoder do not run it and what follows it has to count alike."""
        modules = dict.fromkeys(called_module(block.name) for block in self.blocks)
        return *modules, *((self.stages.encoder,) if self.stages.encoder else ())

    @property
    def may_draw(self) -> bool:
        """Tell whether the forward draws random numbers by itself, as far as that is known."""
        return self.draws_numbers or bool(self.coupling_untried)

    @property
    def chunkable_head(self) -> bool:
        """Tell whether the output projection can run inside the loss, so that logits never exist whole."""
        return self.head is not None

    @property
    def attention_width(self) -> int:
        """Heads times the size of one: the hidden size unless a config sets the heads' apart (Qwen3, Gemma)."""
        return self.attention_heads * self.head_size or self.hidden_size

    @property
    def key_value_width(self) -> int:
        """Key-value heads times the size of one."""
        return self.attention_width * self.key_value_heads // self.attention_heads if self.attention_heads else 0

    def key_value_copies(self, degree: int) -> int:
        """Return how many of `degree` tensor ranks hold the same key-value head; 1 where there are as many heads."""
        return max(1, degree // self.key_value_heads) if self.key_value_heads else 1

    @cached_property
    def reaches(self) -> tuple[Reach, ...]:
        """Return how far the calls of attention in blocks see; one call that sees all where none is known."""
        calls = [call for call in self.attention if any(call.name.startswith(f"{b.name}.") for b in self.blocks)]
        alike = Counter((call.window or 0, call.chunk or 0) for call in calls)
        return tuple(Reach(n / len(self.blocks), *limits) for limits, n in sorted(alike.items())) or EVERYTHING

    def limited_share(self, sequence: int) -> float:
        """Return the share of the calls of attention that do not see all of a sequence."""
        limited = sum(reach.share for reach in self.reaches if reach.attended(sequence) < sequence)
        return limited / sum(reach.share for reach in self.reaches)

    def attended(self, sequence: int) -> float:
        """Return the length of a sequence that a block's attention costs as much as, the mean of the blocks."""
        return sum(reach.share * reach.attended(sequence) for reach in self.reaches)

    def positions(self, sequence_length: int) -> int:
        """Return the positions of a sample in the blocks: of tokens as many as there are, of an image those of one."""
        return self.sample_positions or sequence_length

    def model_flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs of forward and backward for one token: 6·P + 12·L·s·h; 4·P + 2·T where only T of P are trained.

        P counts the parameters that take part in matrix products (all but input embeddings that are only looked up, and
        of experts those that a token goes to); s is the sequence length and h the heads times the size of one, most
        often the hidden size (PaLM, arXiv 2204.02311, appendix B). Of a windowed block s is what costs as much
        (`attended`). No recomputation.
        """
        multiplied = self.parameters - self.embedding_parameters - self.idle_parameters
        return (
            4.0 * multiplied
            + 2.0 * min(multiplied, self.trained_parameters)
            + 12.0 * self.layers * self.attended(sequence_length) * self.attention_width
        )

    def smp_flops_per_token(self) -> float:
        """SMP's published convention: 8·P for one token, all parameters, recomputation assumed."""
        return 8.0 * self.parameters
