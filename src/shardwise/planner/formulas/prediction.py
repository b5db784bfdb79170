"""Question and answer of the planner as plain data: a TrainingConfiguration in, a Prediction out.

A TrainingConfiguration comes from a row of a table (`shardwise.planner.published.tables`), from a search, or from a
resolved Plan (`configuration_of`). `shardwise.planner.formulas.predict.predict` turns it into a Prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwise.job.axes import Axis, placed_axes, row_axes, state_axes
from shardwise.model.facts import EVERYTHING, LatentAttention, ModelFacts, Reach
from shardwise.planner.constants.hardware import GIB, Accelerator

WAITS = (*Axis, "bubble", "launch", "stalls")  # causes for which the accelerator does not compute
# Rows of the fullest rank over the mean where ranks share experts: the mean over the layers of the second half of the
# steps of examples/experts.yaml, whose eight experts four ranks would share; two would have 1.05, eight 1.29.
IMBALANCE = 1.13
STORED = 4.0  # bytes of a parameter in fp32
EIGHTY = 1.2816  # standard deviations that hold 80 % of a normal distribution


@dataclass(frozen=True)
class ModelShape:
    """A decoder in the numbers that decide its cost. `intermediate` is one up projection's width; gated MLPs have two.

    `head_size` is unset where heads share the hidden size. `positions` counts learned position embeddings. `counted`
    overrides the formula of `parameters` where it is known. `idle` counts a block's parameters of experts that a token
    does not go through; `intermediate` is then the width of all that it goes through. Of a block, `stacked` counts the
    parameters of experts that ranks can share; they are `experts` of width `expert_width`, and a token goes to
    `experts_of_token` of them, with an exchange of rows for each of `expert_stacks` in turn. These are in
    `groups_of_token` of `expert_groups` (arXiv 2412.19437, section 2.1.2). `expert_biases`: their products have biases,
    and what is multiplied is clamped (gpt-oss, arXiv 2508.10925). `reaches`: how far the calls of
    attention in a block see.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    gated: bool = False
    tied: bool = False
    positions: int = 0
    counted: int | None = None
    idle: int = 0
    head_size: int = 0
    experts: int = 0
    experts_of_token: int = 0
    expert_width: int = 0
    expert_stacks: float = 1.0
    expert_groups: int = 1
    groups_of_token: int = 1
    expert_biases: bool = False
    stacked: int = 0
    latent: LatentAttention | None = None
    reaches: tuple[Reach, ...] = EVERYTHING
    stored: float = STORED

    @cached_property
    def expert_layers(self) -> float:
        """Share of the blocks that have experts in stacks."""
        one = (3 if self.gated else 2) * self.hidden * self.expert_width * self.experts
        return min(1.0, self.stacked / one) if one else 0.0

    @cached_property
    def dense_width(self) -> int:
        """Width of a block's MLP beside its stacked experts, the mean of the blocks."""
        return max(0, round(self.intermediate - self.expert_layers * self.experts_of_token * self.expert_width))

    @cached_property
    def attention_width(self) -> int:
        """Heads times the size of a head."""
        return self.heads * self.head_size or self.hidden

    @cached_property
    def key_value_width(self) -> int:
        """Key-value heads times the size of a head."""
        return self.attention_width * self.key_value_heads // max(1, self.heads)

    def attention_products(self, tensor: int) -> list[tuple[int, int]]:
        """(inputs, outputs) of the products before and behind a block's attention, on one of `tensor` ranks."""
        if self.latent:
            return self.latent.products(self.hidden, max(1, self.heads // tensor)) * max(1, int(self.calls))
        key_value = max(self.key_value_width // tensor, self.attention_width // max(1, self.heads))
        own = self.attention_width // tensor
        return [(self.hidden, own + 2 * key_value), (own, self.hidden)]

    @cached_property
    def calls(self) -> float:
        """Calls of attention a block."""
        return sum(reach.share for reach in self.reaches)

    def attended(self, sequence: int, masked: bool = False) -> float:
        """Return the length of a sequence whose causal attention costs as much as the mean block's.

        `masked`: what does not see all computes all keys of each query, and hides some.
        """
        lengths = ((reach.share, reach.attended(sequence)) for reach in self.reaches)
        return sum(share * (2 * sequence if masked and length < sequence else length) for share, length in lengths)

    def adapter_share(self, rank: int) -> float:
        """Return the parameters of adapters of `rank` on all of a block's products, over the block's own."""
        mlp = (self.hidden, (2 if self.gated else 1) * self.dense_width), (self.dense_width, self.hidden)
        features = sum(into + out for into, out in [*self.attention_products(1), *mlp])
        return rank * features / self.layer_parameters

    @cached_property
    def layer_parameters(self) -> int:
        """Matrices of one block, and its two norms with biases of the non-gated kind; of experts all."""
        return self.active_parameters + self.idle

    @cached_property
    def active_parameters(self) -> int:
        """Parameters of a block that a token goes through."""
        attention = sum(into * out for into, out in self.attention_products(1))
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        return attention + mlp + (2 if self.gated else 9) * self.hidden + (0 if self.gated else self.intermediate)

    @cached_property
    def embedding_parameters(self) -> int:
        """Parameters of one embedding of the vocabulary."""
        return self.vocabulary * self.hidden

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model; tied embeddings once."""
        if self.counted is not None:
            return self.counted
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.positions * self.hidden
        return self.layers * self.layer_parameters + ends

    def flops_per_token(self, sequence: int) -> dict[str, float]:
        """Return the FLOPs of a token, forward and backward, by convention.

        - `8P`: 8 x parameters; attention not counted, recomputation counted (SMP's own scripts)
        - `megatron-2021`: 96 L h^2 (1 + s/6h + V/16Lh); recomputation counted (arXiv 2104.04473, section 5.1)
        - `palm`: 6 x parameters of matrix products + 12 L s h; no recomputation (arXiv 2204.02311, appendix B)
        - `megatron-2022`: 72 L h^2 (1 + s/6h + V/12Lh); no recomputation (arXiv 2205.05198, appendix A)

        Of windowed blocks s is what costs as much (`attended`). Of experts those count that a token goes through, but
        for 8P. Megatron's 12 h^2 of a block are written as the
        block's own matrices, which equals it for GPT's widths.
        """
        block, length = float(self.active_parameters), self.layers
        head = 6.0 * self.embedding_parameters
        attention = 12.0 * length * self.attended(sequence) * self.attention_width
        looked_up = self.positions * self.hidden + (0 if self.tied else self.embedding_parameters)
        return {
            "8P": 8.0 * self.parameters,
            "megatron-2021": 8.0 * length * block + attention * 4 / 3 + head,
            "palm": 6.0 * (self.parameters - length * self.idle - looked_up) + attention,
            "megatron-2022": 6.0 * length * block + attention + head,
        }

    @classmethod
    def of(cls, facts: ModelFacts, gated: bool | None = None) -> ModelShape:
        """Return the shape of discovered facts."""
        if gated is None:
            from shardwise.planner.formulas.activations import BlockKind

            gated = BlockKind.of(facts).gated
        layers = facts.layers or len(facts.blocks)
        shape = cls(
            name=facts.family,
            layers=layers,
            hidden=facts.hidden_size,
            heads=facts.attention_heads,
            key_value_heads=facts.key_value_heads or facts.attention_heads,
            intermediate=facts.intermediate_size,
            latent=facts.latent,
            reaches=facts.reaches,
            vocabulary=facts.vocabulary_size,
            gated=gated,
            tied=bool(facts.ties),
            positions=_looked_up(facts) // max(1, facts.hidden_size),
            counted=facts.parameters,
            idle=facts.idle_parameters // max(1, layers),
            head_size=facts.head_size,
            stored=_stored(facts),
            **_stacked_experts(facts, gated, layers),
        )
        return replace(shape, intermediate=_active_width(facts, shape)) if facts.idle_parameters else shape


def _stored(facts: ModelFacts) -> float:
    """Return the bytes of a parameter as it is kept, the mean of all."""
    from shardwise.planner.formulas.shapes import stored_bytes

    if not facts.frozen:
        return STORED
    sizes = {name: math.prod(shape) for name, shape in facts.parameter_shapes.items()}
    kept = sum(size * stored_bytes(facts, name, int(STORED)) for name, size in sizes.items())
    return kept / max(1, sum(sizes.values()))


def _stacked_experts(facts: ModelFacts, gated: bool, layers: int) -> dict[str, Any]:
    """Return what a shape says of experts in stacks; nothing where there are none."""
    if not facts.expert_stacks or not facts.experts_of_token:
        return {}
    number = next(iter(facts.expert_stacks.values()))
    owners = {block.name for block in facts.blocks for name in facts.expert_stacks if name.startswith(f"{block.name}.")}
    stacked = sum(math.prod(facts.parameter_shapes[name]) for name in facts.expert_parameters)
    one = stacked // max(1, len(owners))  # of a block, which may have several stacks
    return {
        "experts": number,
        "experts_of_token": facts.experts_of_token,
        "expert_width": one // ((3 if gated else 2) * facts.hidden_size * number),
        "expert_stacks": len(facts.expert_stacks) / max(1, len(owners)),
        "expert_biases": any(len(facts.parameter_shapes[name]) == 2 for name in facts.expert_parameters),
        "stacked": stacked // max(1, layers),
    }


def _looked_up(facts: ModelFacts) -> int:
    """Return the parameters of embeddings that no product reads, beside those of the vocabulary."""
    vocabulary = 0 if facts.ties else facts.vocabulary_size * facts.hidden_size
    return max(0, facts.embedding_parameters - vocabulary)


def _active_width(facts: ModelFacts, shape: ModelShape) -> int:
    """The MLP's width with which a dense block has the parameters that a token goes through in one of experts."""
    block = sum(block.parameters for block in facts.blocks) - facts.idle_parameters
    attention = sum(into * out for into, out in shape.attention_products(1))
    return max(1, (block // max(1, len(facts.blocks)) - attention) // ((3 if shape.gated else 2) * shape.hidden))


@dataclass(frozen=True)
class Fabric:
    """A kind of link: the share of its nominal bandwidth that collectives reach, and seconds of one hop.

    `exchange` is the share that rows reach on their way to experts; 0 where it is that of other collectives.
    """

    name: str
    bandwidth: float
    hop_seconds: float
    exchange: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Equal nodes. `intra`: GB/s of one accelerator, one direction; `inter`: GB/s of a whole node.

    Attributes:
        host_gb: GiB of a node's own memory, 0 where it is not known.
        cpus: virtual processors of a node, likewise; for `shardwise launch`, as the next two.
        efa: devices of AWS's Elastic Fabric Adapter on a node.
        instance: the type of instance in a cloud, or ``.
        domain: accelerators that the links join where they leave a node (72 in NVL72); 0: those of a node.
    """

    name: str
    accelerator: Accelerator
    nodes: int
    per_node: int
    intra: float
    inter: float
    link: Fabric
    fabric: Fabric
    host_gb: float = 0.0
    cpus: int = 0
    efa: int = 0
    instance: str = ""
    domain: int = 0

    @property
    def host_bytes(self) -> float:
        """Bytes of the host's memory, one accelerator's share; infinite where it is not known."""
        return self.host_gb * GIB / self.per_node if self.host_gb else math.inf

    @property
    def size(self) -> int:
        """Accelerators."""
        return self.nodes * self.per_node

    @cached_property
    def island(self) -> int:
        """Accelerators that the links of a node join: its own, or of several nodes where the links leave them."""
        most = max(self.per_node, min(self.domain, self.size))
        return max(n for n in range(self.per_node, most + 1, self.per_node) if self.size % n == 0)


@dataclass(frozen=True)
class Stack:
    """Constants of a software stack, each relative to the accelerator's or fabric's own.

    Attributes:
        matmul, attention: share of the accelerator's rate that its kernels reach.
        memory_bound: passes over memory against the count of `compute.py`.
        score_passes: passes over score matrices without flash attention, likewise.
        recompute: time of what a checkpoint runs again against that of the forward.
        launch: host time of a kernel against `compute.LAUNCH`.
        overlap: exponent of the norm that joins computation and traffic (1: one after the other; large: the longer).
        network: share of the fabric's rate.
        tensor_exposed: share of the all-gathers and reduce-scatters of tensor ranks that no product hides.
        expert_exposed: likewise of the exchanges of experts' rows.
        grouped: share of the products' rate that grouped products of experts reach.
        sorting: passes over the rows of experts against the count of `compute.py`, where no exchange sorts them.
        pipeline_wait: seconds that a host loses for each block, microbatch and tensor rank where stages lie on several
            nodes.
        stall: seconds of one wait for the whole device in a pipeline (`predict.py`).
        activations: bytes kept for backward against the count of `footprint.py`.
        gradient_copy: bytes a parameter of gradients beside those that accumulate in fp32, with several data ranks.
        pending: of the partial results of tensor ranks that a host is ahead, the share that the allocator cannot give
            out again (`footprint.py`).
        memory_gb: what else is held.
        logit_bytes: bytes of a logit while the loss turns round (`footprint.py`).
        cuts_by_cost: a pipeline's stages are cut by cost, with the head's products counted in; else blocks are shared
            out evenly.
        stops_early: recomputation of a whole block stops before its last product, whose result nobody needs.
        spread: log-standard deviation of what is measured about what is predicted, of computation.
        wait_spread: and what a step that is all traffic, launching and waiting adds to it (`Prediction.waits`).
        memory_spread: likewise of memory.
        step_factor: a measured step against the prediction by all of the above, on a machine that was measured.
        offset: scale of how far its `matmul` departs from what stands here (logarithm), before a probe of some rows.
        source: rows these were fitted on, and how well they fit.
    """

    name: str
    matmul: float = 1.0
    memory_bound: float = 1.0
    attention: float = 1.0
    score_passes: float = 1.0
    recompute: float = 1.0
    launch: float = 1.0
    overlap: float = 3.0
    network: float = 1.0
    tensor_exposed: float = 1.0
    expert_exposed: float = 1.0
    grouped: float = 0.8
    sorting: float = 1.0
    pipeline_wait: float = 0.0
    stall: float = 0.0
    activations: float = 1.0
    gradient_copy: float = 0.0
    pending: float = 0.0
    memory_gb: float = 1.0
    logit_bytes: float = 12.0
    cuts_by_cost: bool = False
    stops_early: bool = False
    spread: float = 0.1
    wait_spread: float = 0.3
    memory_spread: float = 0.06
    offset: float = 0.07
    step_factor: float = 1.0
    source: str = "not fitted"


@dataclass(frozen=True)
class TrainingConfiguration:
    """One way to train one model on one cluster. Degrees multiply to the cluster's size.

    Attributes:
        replica, shard, context, tensor, pipeline, expert: the degree of each axis, under its name.
        imbalance: rows that come to the fullest rank of those that share experts, over the mean.
        microbatch: sequences in one forward of one rank. accumulation: microbatches of a step. padding: rows of a step,
            over all ranks, that are computed and not counted.
        zero: what is sharded over the `shard` ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        placement: D (replica x shard x context), P and T in order, right-most varying fastest.
        checkpointing: `none`, `full`, `selective` (all but matrix products and attention is recomputed),
            `attention` (the attention core only, arXiv 2205.05198), `half` (as selective, and half of the products).
        gathers_float8: blocks' sharded parameters travel in a byte each.
        checkpointed: share of the blocks that checkpoint.
        keeps_expert_rows: they keep what their experts get and give, and exchange none of it again.
        selective_exchanges: under `selective` they exchange it again too.
        collectives: `nccl`, `flat`, `hierarchical`, or `smddp` (`communication.py`).
        async_tensor: tensor traffic is cut in pieces that hide behind matrix products.
        scattered_messages: tensor ranks send a part of a stage's output each, and gather it (arXiv 2104.04473,
            section 4.1).
        balanced: the pipeline's stages are cut by cost; else blocks are shared out evenly and the ends come on top.
            None: as the stack does it.
        rank_blocks: blocks of each pipeline rank where the job itself cuts the stages; else empty.
        masked: attention computes all keys of each query, and masks them.
        masks_windows: where it does not see all, likewise.
        captured: share of a block's launches that CUDA graphs make.
        fused: blocks are written with the accelerator vendor's fused kernels: norms, rotary positions, activation,
            attention, and tensor traffic in pieces beside products.
        copies_on_nodes: a row crosses the network once for all of its experts on a node.
        sorts_rows: the exchange's own kernels sort rows by expert (DeepEP; HybridEP).
        drops_rows: each expert takes a fixed number of rows, and the others are dropped; so nobody waits to be told how
            many come (arXiv 2101.03961, section 2.2).
        hides_exchange: exchanges of experts' rows run beside the computation of another microbatch, of which a pipeline
            with several stages a rank has one (arXiv 2603.07685).
        trained: share of the parameters that have gradients and optimizer state.
        reference: a preference loss's reference runs forward ahead of each step: `adapters_off`, or a `copy`.
        averages: moving averages of the weights are kept (`training.ema_decay`).
        offload_optimizer: share of the trained parameters whose optimizer state is in host memory.
        orthogonalized: bytes that a rank receives for Muon's iterations in a step, and their FLOPs.
        updates_in_backward: these are updated while the last backward runs.
        kept_every: steps between copies of the state in the hosts' memory (`checkpoint.memory_every`); 0: none.
        own_regions: tensor ranks exchange as this package does: their collectives copy what they take, and of split
            sequences backward gathers a region's input again.
        whole_in_step: a pipeline's parameters stay gathered, and its gradients whole, from a step's first microbatch to
            its last.
        kept_blocks: the last blocks, whose parameters stay gathered from their forward to their backward although
            others' are freed.
    """

    model: ModelShape
    cluster: Cluster
    stack: Stack
    sequence: int
    microbatch: int
    accumulation: int = 1
    padding: int = 0
    replica: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    virtual: int = 1
    schedule: str = "interleaved"
    sequence_parallel: bool = False
    zero: int = 3
    placement: str = "DPT"
    precision: str = "bf16"
    reduction: str = "fp32"
    gathers_float8: bool = False
    checkpointing: str = "none"
    checkpointed: float = 1.0
    keeps_expert_rows: bool = False
    selective_exchanges: bool = False
    offload_activations: bool = False
    offload_parameters: bool = False
    offload_optimizer: float = 0.0
    orthogonalized: tuple[float, float] = (0.0, 0.0)
    updates_in_backward: bool = False
    kept_every: int = 0
    flash: bool = True
    masked: bool = False
    masks_windows: bool = False
    compile: bool = False
    dropout: bool = False
    collectives: str = "nccl"
    async_tensor: bool = False
    own_regions: bool = False
    scattered_messages: bool = False
    balanced: bool | None = None
    rank_blocks: tuple[int, ...] = ()
    chunked_loss: bool = False
    reshard_after_forward: bool = True
    trained: float = 1.0
    reference: str = ""
    averages: bool = False
    kept_blocks: int = 0
    whole_in_step: bool = False
    imbalance: float = IMBALANCE
    captured: float = 0.0
    fused: bool = False
    copies_on_nodes: bool = False
    sorts_rows: bool = False
    drops_rows: bool = False
    hides_exchange: bool = False

    @property
    def expert_shards(self) -> int:
        """Ranks over which the state of one expert is sharded."""
        shards = self.degree(*state_axes())
        return shards // math.gcd(shards, self.expert)

    @property
    def cuts_by_cost(self) -> bool:
        return self.stack.cuts_by_cost if self.balanced is None else self.balanced

    @property
    def host_optimizer(self) -> bool:
        """True where parameters and optimizer state are kept, and updated, in another memory than the accelerator's."""
        return self.offload_parameters and self.cluster.accelerator.name != "CPU"

    @property
    def host_updates(self) -> float:
        """Share of the trained parameters that are updated in their host's memory (`memory.offload_optimizer`)."""
        return self.offload_optimizer if self.cluster.accelerator.name != "CPU" else 0.0

    def degree(self, *axes: Axis) -> int:
        """Return the product of the degrees of `axes`."""
        return math.prod(getattr(self, axis) for axis in axes)

    @property
    def ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.degree(*placed_axes(self.placement))

    @property
    def sequences(self) -> int:
        """Sequences of a step that count, over all ranks."""
        return self.microbatch * self.accumulation * self.degree(*row_axes()) - self.padding

    @property
    def tokens(self) -> int:
        """Tokens of a step, over all ranks."""
        return self.sequences * self.sequence


@dataclass(frozen=True)
class Prediction:
    """The forecast for a configuration. Times are seconds of one step; memory is bytes of the fullest rank.

    `seconds` by cause: matmul, attention, memory_bound, recomputation, shard, replica, tensor, context, pipeline
    (exposed traffic of each axis), bubble, launch, optimizer, offload, copies, stalls, stragglers. `memory` by cause:
    parameters, gradients, optimizer, gathered, communication, activations, working, logits, slack, pending.
    `stage_memory`: total of each pipeline rank. `interval`: 80 % of measured steps are expected between these seconds.
    """

    step_seconds: float
    seconds: dict[str, float]
    interval: tuple[float, float]
    memory: dict[str, float]
    memory_interval: tuple[float, float]
    stage_memory: tuple[float, ...]
    fits: bool  # as predicted
    may_fit: bool  # once the allocator gives back what it only kept
    tokens: int
    ranks: int
    peak_tflops: float  # of one accelerator
    flops_per_token: dict[str, float] = field(default_factory=dict)
    host_bytes: float = 0.0  # that one rank keeps in its host's memory

    @property
    def waits(self) -> float:
        """Share of the step in which the accelerator does not compute."""
        return sum(self.seconds.get(cause, 0.0) for cause in WAITS) / self.step_seconds

    @property
    def memory_bytes(self) -> float:
        """Peak of the fullest rank."""
        return max(self.stage_memory)

    @property
    def logged_memory(self) -> float:
        """Peak of the rank that trainers log: the first, which has a pipeline's first stage."""
        return self.stage_memory[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of one accelerator."""
        return self.tokens / self.step_seconds / self.ranks

    @property
    def tflops(self) -> dict[str, float]:
        """TFLOP/s of one accelerator, by FLOP convention (`ModelShape.flops_per_token`)."""
        return {name: flops * self.tokens_per_second / 1e12 for name, flops in self.flops_per_token.items()}

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, PaLM's convention."""
        return self.tflops["palm"] / self.peak_tflops
