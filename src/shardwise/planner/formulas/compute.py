"""Seconds of one block's and of the head's computation on one rank, and the launches a host makes for them.

For a microbatch of T tokens of length s on t tensor ranks, hidden size H, width A of all heads (most often H), key and
value width K, inner width I:

- Matrix products [m, k] x [k, n]: 2mnk / (peak · e · w · d) + bytes / bandwidth. e is what large products reach; w =
  tiles / (tiles + c·units) is the last wave's waste, with tiles of 128 x 128 over the accelerator's multiprocessors
  (NVIDIA, "Matrix Multiplication Background User's Guide", section "Wave Quantization", smoothed because libraries pick
  smaller tiles for small products); d = k / (k + k0) is what a short inner dim costs. Backward has two of each.
- Products in 8 or 4 bits: the accelerator's peak in them, and passes that cast operands (`FORMATS`). The head stays in
  16 bits. What they gain is less where an inner dim is short against the casting of [m, k].
- Flash attention (arXiv 2205.14135, section 3.1; 2307.08691, section 3.1): 4·T·s·A/t FLOPs forward, half of them where
  it is causal without a mask, 2.5 times as many backward, at a share of the products' rate that grows with the length
  of the sequence.
- Attention that writes its scores: the same FLOPs, not halved, as batched products with a short inner dim, and passes
  over T·s·heads/t scores.
- Experts in stacks: k·T rows in groups of one expert each, computed in one call, so that the last wave is wasted once.
  Vendors' libraries of 2025 call a product for each expert (`configuration.fused`), with casts of its own operands;
  each of these small kernels takes KERNEL besides. Where ranks share experts, the fullest gets more rows than the mean
  (`TrainingConfiguration.imbalance`).
- Memory-bound work: passes over [T, H] and [T, I/t], counted for operators that are not fused; torch.compile fuses
  most of them. Biases of experts (`BIAS_PASSES`) are added outside of grouped products.
- Launches: of a block, of its experts (`EXPERT_LAUNCH`) and of what a checkpoint runs again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from shardwise.planner.constants.hardware import Accelerator
from shardwise.planner.formulas.prediction import Stack, TrainingConfiguration

TILE = 128
WAVE = 0.35  # of a wave that the last one wastes
INNER = 64  # k0
LAUNCH = 6e-6  # seconds of a host for one kernel in eager mode
# And for one of experts: between them lie collectives, copies to the host and loops in Python over experts.
EXPERT_LAUNCH = 1e-5
BACKWARD_LAUNCH = 0.8  # autograd's engine launches without Python between the operators
FORWARD_KERNELS = {True: 40, False: 26}  # of a block, gated (with rotary positions) or not
# Of a block's router, sorting, exchanges and weighting, with the wait for the numbers of rows, in launches.
EXPERT_KERNELS = 200
GROUP_PRODUCTS = 2  # launches of one expert's part of grouped products in 16 bits
GROUP_KERNELS = 10  # of one expert's part of grouped products, whose libraries launch casts and products of each
KERNEL = 4e-6  # seconds that a kernel takes beside its work: its start, and its last blocks
GRAPH_LAUNCH = 0.02  # of the launches, what is left where a CUDA graph makes them all
COMPILED = 0.45  # share of the launches that are left
ATTENTION_LENGTH = 256  # length at which it reaches half of that
ATTENTION_HEAD = 16  # size of a head at which it reaches half of that
SCORE_PASSES = (8.0, 8.0)  # forward and backward, without dropout
DROPOUT_SCORE_PASSES = (3.5, 3.5)
# Passes over [T, H], over [T, H/t] and over [T, I/t], forward and backward: norms and residual sums; rotary positions;
# the activation function. Layer norm is one kernel; RMS norm and rotary positions that are not fused are a dozen each,
# in fp32: a Llama of 7B gains 325 passes a block from compilation, the same on A100 and H100 (tokens/s of fms-fsdp).
PASSES = {
    # (gated, compiled or fused by hand)
    (False, False): ((10.0, 16.0), (2.0, 2.0), (2.0, 3.0)),
    (False, True): ((7.0, 10.0), (1.0, 1.0), (1.0, 2.0)),
    (True, False): ((70.0, 100.0), (40.0, 50.0), (8.0, 14.0)),
    (True, True): ((8.0, 12.0), (4.0, 4.0), (3.0, 5.0)),
}
# Over the rows of experts, each way: picked, sorted by expert behind the exchange, back again, and added up; where the
# exchange's own kernels sort them, read from their buffers and written to them.
EXPERT_PASSES, SORTED_PASSES = 9.0, 4.0
# Forward and backward, where experts have biases: over the rows of [H], since the last bias is weighted like its row,
# in fp32, and added, all joined and cast back (28 bytes a number forward, 40 backward); and over those of [I], whose
# two halves are clamped, and joined again.
BIAS_PASSES = (14.0, 20.0)
CLAMP_PASSES = (8.0, 10.0)
# Of activations, parameters and their gradients; 8 and 4 bits are those of products alone.
BYTES = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2,
    **dict.fromkeys(("fp8", "fp8-row", "fp8-block", "mxfp8", "nvfp4"), 2),
}  # fmt: skip


class ProductFormat(NamedTuple):
    """Products whose operands are cast to few bits: their rate, and what the casting moves.

    `share` of what large products reach of the peak in 16 bits; `cast` bytes moved for each number of an operand: a
    pass for its largest absolute value, one to read it, and the writing of it for the products of forward and of
    backward, less what a fused producer saves.
    """

    share: float
    cast: float


# Scales of a tensor (arXiv 2209.05433), of rows, of blocks of 128 (arXiv 2412.19437, section 3.3) and of 32 numbers
# (OCP MX v1.0), and of 16 in 4 bits with random Hadamard transforms (arXiv 2509.25149, section 4).
FORMATS = {
    "fp8": ProductFormat(0.90, 4.0),
    "fp8-row": ProductFormat(0.65, 4.0),
    "fp8-block": ProductFormat(0.86, 5.0),
    "mxfp8": ProductFormat(0.88, 5.0),
    "nvfp4": ProductFormat(0.60, 8.0),
}


class KernelWork(NamedTuple):
    """Seconds on the accelerator by cause, and of the host's launches."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        return self.matmul + self.attention + self.memory_bound

    def times(self, factor: float) -> KernelWork:
        return KernelWork(*(factor * part for part in self))

    def plus(self, other: KernelWork) -> KernelWork:
        return KernelWork(*(one + two for one, two in zip(self, other)))


class Rates(NamedTuple):
    """The rates of one accelerator under one stack."""

    flops: float  # of large matrix products
    attention: float  # of flash attention on long sequences
    bandwidth: float  # bytes of element-wise work
    units: int
    size: int  # bytes of a number
    cast: float = 0.0  # bytes moved to cast a number of a product's operand


@lru_cache(maxsize=256)
def rates(accelerator: Accelerator, stack: Stack, precision: str, fused: bool = False) -> Rates:
    """Rates of `accelerator` under `stack`; a dtype without a rate of its own runs at that of fp32."""
    usual = accelerator.peak(precision) or accelerator.fp32
    peak = usual * 1e12 * accelerator.matmul
    casts = FORMATS[precision] if precision in FORMATS and accelerator.fp8 else ProductFormat(1.0, 0.0)
    products = accelerator.product_peak(precision) / usual * casts.share
    bandwidth = accelerator.bandwidth * 1e9 * accelerator.memory_bound
    return Rates(
        peak * stack.matmul * max(1.0, products),
        peak * (accelerator.fused_attention if fused else accelerator.attention) * stack.attention,
        bandwidth / stack.memory_bound,
        accelerator.units,
        BYTES[precision],
        casts.cast,
    )


def wide_rates(configuration: TrainingConfiguration) -> Rates:
    """Return the rates of products that stay in 16 bits where others have fewer."""
    precision = configuration.precision
    wide = "bf16" if precision in FORMATS else precision
    return rates(configuration.cluster.accelerator, configuration.stack, wide)


@lru_cache(maxsize=1 << 16)
def matmul_seconds(m: int, n: int, k: int, rates: Rates) -> float:
    """Seconds of [m, k] x [k, n]."""
    tiles = max(1.0, m / TILE) * max(1.0, n / TILE)
    share = tiles / (tiles + WAVE * rates.units) * k / (k + INNER)
    moved = (m * k + k * n + m * n) * rates.size
    return 2.0 * m * n * k / (rates.flops * share) + moved / rates.bandwidth


def _linears(shapes: list[tuple[int, int]], tokens: int, rates: Rates, trained: float = 1.0) -> tuple[float, float]:
    """(forward, backward) of linears of (inputs, outputs) features, of which the share `trained` has gradients."""
    forward = sum(matmul_seconds(tokens, out, into, rates) for into, out in shapes)
    of_inputs = sum(matmul_seconds(tokens, into, out, rates) for into, out in shapes)
    of_weights = sum(matmul_seconds(into, out, tokens, rates) for into, out in shapes)
    cast = tokens * rates.cast / rates.bandwidth
    forward += cast * sum(into for into, _ in shapes)
    return forward, of_inputs + trained * of_weights + cast * sum(out for _, out in shapes)


@lru_cache(maxsize=1 << 16)
def grouped_seconds(groups: float, m: float, n: int, k: int, rates: Rates, calls: float = 1.0) -> float:
    """Seconds of [m, k] x [k, n] for each of `groups`, which share `calls`."""
    tiles = groups / calls * max(1.0, m / TILE) * max(1.0, n / TILE)
    share = tiles / (tiles + WAVE * rates.units) * k / (k + INNER)
    moved = groups * (m * k + k * n + m * n) * rates.size
    return 2.0 * groups * m * n * k / (rates.flops * share) + moved / rates.bandwidth


def tokens_of(configuration: TrainingConfiguration) -> int:
    """Tokens of a microbatch on one rank."""
    return max(1, configuration.microbatch * configuration.sequence // configuration.context)


def checkpoint_bytes(configuration: TrainingConfiguration) -> float:
    """Return the bytes of a checkpointed block's input on one rank, of which tensor ranks that share the sequence have
    a part each."""
    row = float(tokens_of(configuration) * configuration.model.hidden * BYTES[configuration.precision])
    return row / configuration.tensor if configuration.sequence_parallel else row


def block_work(configuration: TrainingConfiguration) -> tuple[KernelWork, KernelWork]:
    """(forward, backward) of one block without recomputation."""
    model, t = configuration.model, configuration.tensor
    speed = rates(configuration.cluster.accelerator, configuration.stack, configuration.precision, configuration.fused)
    tokens = tokens_of(configuration)
    inner = model.dense_width // t
    shapes = model.attention_products(t)
    if inner or not model.stacked:
        shapes += [(model.hidden, max(1, inner) * (2 if model.gated else 1)), (max(1, inner), model.hidden)]
    experts = _experts(configuration, speed)
    products = [
        dense + grouped
        for dense, grouped in zip(_linears(shapes, tokens, speed, configuration.trained), experts, strict=True)
    ]
    scores = _flash(configuration, tokens, speed) if configuration.flash else _scores(configuration, tokens, speed)
    passes = _passes(configuration, tokens, speed)
    host = _host(configuration)
    return (
        KernelWork(products[0], scores[0], passes[0], host),
        KernelWork(products[1], scores[1], passes[1], BACKWARD_LAUNCH * 2 * host),
    )


def expert_rows(configuration: TrainingConfiguration) -> float:
    """Rows of a microbatch that the experts of the fullest rank compute in one block."""
    rows = float(configuration.model.experts_of_token * tokens_of(configuration))
    return rows if configuration.expert == 1 else rows / configuration.tensor * configuration.imbalance


def _experts(configuration: TrainingConfiguration, speed: Rates) -> tuple[float, float]:
    """(forward, backward) of the grouped products of stacked experts, the mean of the blocks."""
    model = configuration.model
    if not model.stacked:
        return 0.0, 0.0
    groups = model.experts / configuration.expert
    rows = expert_rows(configuration) / groups
    inner = model.expert_width if configuration.expert > 1 else max(1, model.expert_width // configuration.tensor)
    shapes = [(model.hidden, inner * (2 if model.gated else 1)), (inner, model.hidden)]
    speed = speed._replace(flops=speed.flops * configuration.stack.grouped)
    calls = groups if configuration.fused else 1.0
    forward = sum(grouped_seconds(groups, rows, out, into, speed, calls) for into, out in shapes)
    of_inputs = sum(grouped_seconds(groups, rows, into, out, speed, calls) for into, out in shapes)
    backward = of_inputs + configuration.trained * forward  # of weights: as many products of as many rows
    cast = groups * rows * speed.cast / speed.bandwidth
    forward += cast * sum(into for into, _ in shapes)
    backward += cast * sum(out for _, out in shapes)
    starts = KERNEL * group_kernels(configuration) * calls
    return model.expert_layers * (forward + starts), model.expert_layers * (backward + 2 * starts)


def group_kernels(configuration: TrainingConfiguration) -> int:
    """Return the launches of one expert's forward."""
    casts = configuration.precision in FORMATS and configuration.cluster.accelerator.fp8
    return GROUP_KERNELS if casts else GROUP_PRODUCTS


def _flash(configuration: TrainingConfiguration, tokens: int, speed: Rates) -> tuple[float, float]:
    model, sequence = configuration.model, configuration.sequence
    whole = 2.0 * model.calls * sequence  # where nothing is causal
    length = whole if configuration.masked else model.attended(sequence, configuration.masks_windows)
    flops = 2.0 * tokens * length * model.attention_width / configuration.tensor
    head_size = model.attention_width / max(1, model.heads)
    short = ATTENTION_LENGTH / min(sequence, length / model.calls)
    forward = flops / speed.attention * (1 + short) * (1 + ATTENTION_HEAD / head_size)
    return forward, 2.5 * forward


def _scores(configuration: TrainingConfiguration, tokens: int, speed: Rates) -> tuple[float, float]:
    model, t = configuration.model, configuration.tensor
    heads = max(1, model.heads // t)
    elements = float(tokens * configuration.sequence * heads)
    head_size = model.attention_width // max(1, model.heads)
    products = 4.0 * elements * head_size / speed.flops * (1 + INNER / head_size)
    score_pass = elements * speed.size / speed.bandwidth * configuration.stack.score_passes
    dropped = DROPOUT_SCORE_PASSES if configuration.dropout else (0.0, 0.0)
    forward, backward = (passes + more for passes, more in zip(SCORE_PASSES, dropped))
    return products + forward * score_pass, 2 * products + backward * score_pass


def _passes(configuration: TrainingConfiguration, tokens: int, speed: Rates) -> tuple[float, float]:
    model, t = configuration.model, configuration.tensor
    row = tokens * model.hidden * speed.size / speed.bandwidth
    between = row / t if configuration.sequence_parallel else row
    inner = tokens * model.intermediate / t * speed.size / speed.bandwidth
    masks = 3.0 * between if configuration.dropout else 0.0
    norms, rotary, activation = PASSES[model.gated, configuration.compile or configuration.fused]
    copies = _region_copies(configuration)
    of_rows = _row_passes(configuration, speed)
    forward, backward = (
        norm * between + turn * row / t + act * inner + copied * row + moved
        for norm, turn, act, copied, moved in zip(norms, rotary, activation, copies, of_rows)
    )
    return forward + masks, backward + masks


def _row_passes(configuration: TrainingConfiguration, speed: Rates) -> tuple[float, float]:
    """(forward, backward) of what moves the rows of experts, the mean of the blocks.

    Rows are sorted by expert, brought back, weighted and summed; some have biases added.
    """
    model = configuration.model
    sorting = SORTED_PASSES if configuration.sorts_rows else EXPERT_PASSES * configuration.stack.sorting
    rows = model.expert_layers * expert_rows(configuration) * speed.size / speed.bandwidth
    forward, backward = (
        (sorting + model.expert_biases * bias) * model.hidden + model.expert_biases * clamp * model.expert_width
        for bias, clamp in zip(BIAS_PASSES, CLAMP_PASSES)
    )
    return rows * forward, rows * backward


def _region_copies(configuration: TrainingConfiguration) -> tuple[float, float]:
    """Return the passes over [T, H], forward and backward, that copy what tensor ranks exchange.

    An all-reduce takes a copy. Of several sequences each rank's positions are brought together for the two all-gathers
    and two reduce-scatters each way, and for the two that backward makes again.
    """
    if configuration.tensor == 1 or not configuration.own_regions:
        return 0.0, 0.0
    if not configuration.sequence_parallel:
        return 4.0, 4.0
    return (8.0, 12.0) if configuration.microbatch > 1 else (0.0, 0.0)


def kernels_of_block(configuration: TrainingConfiguration) -> float:
    """Launches of one block's forward."""
    return sum(_launches(configuration))


def _launches(configuration: TrainingConfiguration) -> tuple[float, float]:
    """(launches of a block's forward without its experts, those of its experts) that no CUDA graph makes."""
    model = configuration.model
    left = max(GRAPH_LAUNCH, 1.0 - configuration.captured)
    dense = FORWARD_KERNELS[model.gated] * (COMPILED if configuration.compile or configuration.fused else 1.0)
    of_groups = group_kernels(configuration) * model.experts / configuration.expert
    return left * dense, left * model.expert_layers * (EXPERT_KERNELS + of_groups)


def _host(configuration: TrainingConfiguration, experts: bool = True) -> float:
    """Return the seconds of a host for a block's forward, with or without its `experts`."""
    dense, of_experts = _launches(configuration)
    return (dense * LAUNCH + experts * of_experts * EXPERT_LAUNCH) * configuration.stack.launch


# Shares of a block's forward that a checkpoint runs again. Norms and activation are a quarter of the launches,
# attention is a tenth; who keeps half of the products asks about every operator.
AGAIN = {
    "none": KernelWork(0.0, 0.0, 0.0, 0.0),
    "full": KernelWork(1.0, 1.0, 1.0, 1.0),
    "selective": KernelWork(0.0, 0.0, 1.0, 0.25),
    "attention": KernelWork(0.0, 1.0, 0.0, 0.1),
    "half": KernelWork(0.5, 0.0, 1.0, 1.0),
}
OPTIMIZER_BYTES = 34.0  # of an element: norm and Adam's update read and write them
LOGIT_BYTES = (14.0, 12.0)  # forward: written, read and cast to fp32, log-softmax; backward: the same back


def head_work(configuration: TrainingConfiguration) -> tuple[KernelWork, KernelWork]:
    """(forward, backward) of output projection and loss."""
    model = configuration.model
    if not model.vocabulary:
        return KernelWork(), KernelWork()
    speed = wide_rates(configuration)
    tokens, vocabulary = tokens_of(configuration), max(1, model.vocabulary // configuration.tensor)
    forward, backward = _linears([(model.hidden, vocabulary)], tokens, speed, configuration.trained)
    logits = tokens * vocabulary / speed.bandwidth
    host = 12 * LAUNCH * configuration.stack.launch
    return (
        KernelWork(forward, 0.0, LOGIT_BYTES[0] * logits, host),
        KernelWork(backward, 0.0, LOGIT_BYTES[1] * logits, host),
    )


def recomputed_work(configuration: TrainingConfiguration, forward: KernelWork) -> KernelWork:
    """Return what a checkpointed block does again in its backward, given its forward.

    torch.utils.checkpoint without reentrant backward stops, since torch 2.1, once all that backward needs is there.
    """
    again = AGAIN[configuration.checkpointing]
    work = KernelWork(*(share * part for share, part in zip(again, forward)))
    if configuration.checkpointing == "full" and configuration.stack.stops_early:
        work = work._replace(matmul=work.matmul - _last_product(configuration))
    if configuration.checkpointing in ("selective", "attention"):  # which leave experts alone
        work = work._replace(host=again.host * _host(configuration, experts=False))
    return work.times(configuration.checkpointed * configuration.stack.recompute)


def _last_product(configuration: TrainingConfiguration) -> float:
    """Return the last product of a block's forward."""
    speed = rates(configuration.cluster.accelerator, configuration.stack, configuration.precision)
    inner = max(1, configuration.model.intermediate // configuration.tensor)
    return matmul_seconds(tokens_of(configuration), configuration.model.hidden, inner, speed)


def optimizer_seconds(elements: float, configuration: TrainingConfiguration) -> float:
    """A step of Adam over `elements` of this rank, once a step."""
    accelerator = configuration.cluster.accelerator
    return OPTIMIZER_BYTES * elements / (accelerator.bandwidth * 1e9 * accelerator.memory_bound)
