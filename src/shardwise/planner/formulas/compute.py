"""Seconds of one block's and of the head's computation on one rank, and the launches a host makes for them.

For a microbatch of T tokens of length s on t tensor ranks, hidden size H, width A of all heads (most often H), key and
value width K, inner width I:

- Matrix products [m, k] x [k, n]: 2mnk / (peak · e · w · d) + bytes / bandwidth. e is what large products reach; w =
  tiles / (tiles + c·units) is the last wave's waste, with tiles of 128 x 128 over the accelerator's multiprocessors
  (NVIDIA, "Matrix Multiplication Background User's Guide", section "Wave Quantization", smoothed because libraries pick
  smaller tiles for small products); d = k / (k + k0) is what a short inner dim costs. Backward has two of each.
- Flash attention (arXiv 2205.14135, section 3.1; 2307.08691, section 3.1): 4·T·s·A/t FLOPs forward, half of them for a
  causal mask, 2.5 times as many backward, at a share of the products' rate that grows with the length of the sequence.
- Attention that writes its scores: the same FLOPs, not halved, as batched products with a short inner dim, and passes
  over T·s·heads/t scores.
- Experts in stacks: k·T rows in groups of one expert each, computed in one call, so that the last wave is wasted once.
  Where ranks share experts, the fullest gets more rows than the mean (`TrainingConfiguration.imbalance`).
- Memory-bound work: passes over [T, H] and [T, I/t], counted for operators that are not fused; torch.compile fuses
  most of them.
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
BACKWARD_LAUNCH = 0.8  # autograd's engine launches without Python between the operators
FORWARD_KERNELS = {True: 40, False: 26}  # of a block, gated (with rotary positions) or not
COMPILED = 0.45  # share of the launches that are left
ATTENTION = 0.45  # share of peak · e of flash attention on long sequences with large heads
ATTENTION_LENGTH = 256  # length at which it reaches half of that
ATTENTION_HEAD = 16  # size of a head at which it reaches half of that
SCORE_PASSES = (8.0, 8.0)  # forward and backward, without dropout
DROPOUT_SCORE_PASSES = (3.5, 3.5)
# Passes over [T, H], over [T, H/t] and over [T, I/t], forward and backward: norms and residual sums; rotary positions;
# the activation function. Layer norm is one kernel; RMS norm and rotary positions that are not fused are a dozen each,
# in fp32: a Llama of 7B gains 325 passes a block from compilation, the same on A100 and H100 (tokens/s of fms-fsdp).
PASSES = {
    # (gated, compiled)
    (False, False): ((10.0, 16.0), (2.0, 2.0), (2.0, 3.0)),
    (False, True): ((7.0, 10.0), (1.0, 1.0), (1.0, 2.0)),
    (True, False): ((70.0, 100.0), (40.0, 50.0), (8.0, 14.0)),
    (True, True): ((8.0, 12.0), (4.0, 4.0), (3.0, 5.0)),
}
EXPERT_PASSES = 6.0  # over the rows of experts, each way
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2}  # fp8: of products alone; the rest is bf16
FP8 = 1.45  # rate of products in fp8 against bf16 with scaling; torchtitan's Llama 3 8B gains 28 % a step on H100


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


@lru_cache(maxsize=256)
def rates(accelerator: Accelerator, stack: Stack, precision: str) -> Rates:
    """Rates of `accelerator` under `stack`; a dtype without a rate of its own runs at that of fp32."""
    peak = (accelerator.peak(precision) or accelerator.fp32) * 1e12 * accelerator.matmul
    products = FP8 if precision == "fp8" and accelerator.fp8 else 1.0
    bandwidth = accelerator.bandwidth * 1e9 * accelerator.memory_bound
    return Rates(
        peak * stack.matmul * products,
        peak * ATTENTION * stack.attention,
        bandwidth / stack.memory_bound,
        accelerator.units,
        BYTES[precision],
    )


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
    return forward, of_inputs + trained * of_weights


@lru_cache(maxsize=1 << 16)
def grouped_seconds(groups: float, m: float, n: int, k: int, rates: Rates) -> float:
    """Seconds of [m, k] x [k, n] for each of `groups`, in one call."""
    tiles = groups * max(1.0, m / TILE) * max(1.0, n / TILE)
    share = tiles / (tiles + WAVE * rates.units) * k / (k + INNER)
    moved = groups * (m * k + k * n + m * n) * rates.size
    return 2.0 * groups * m * n * k / (rates.flops * share) + moved / rates.bandwidth


def tokens_of(configuration: TrainingConfiguration) -> int:
    """Tokens of a microbatch on one rank."""
    return max(1, configuration.microbatch * configuration.sequence // configuration.context)


def block_work(configuration: TrainingConfiguration) -> tuple[KernelWork, KernelWork]:
    """(forward, backward) of one block without recomputation."""
    model, t = configuration.model, configuration.tensor
    speed = rates(configuration.cluster.accelerator, configuration.stack, configuration.precision)
    tokens = tokens_of(configuration)
    key_value = max(model.key_value_width // t, model.attention_width // max(1, model.heads))
    heads, inner = model.attention_width // t, model.dense_width // t
    shapes = [(model.hidden, heads + 2 * key_value), (heads, model.hidden)]
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
    forward = sum(grouped_seconds(groups, rows, out, into, speed) for into, out in shapes)
    of_inputs = sum(grouped_seconds(groups, rows, into, out, speed) for into, out in shapes)
    backward = of_inputs + configuration.trained * forward  # of weights: as many products of as many rows
    return model.expert_layers * forward, model.expert_layers * backward


def _flash(configuration: TrainingConfiguration, tokens: int, speed: Rates) -> tuple[float, float]:
    length = configuration.sequence
    width = configuration.model.attention_width
    flops = 2.0 * tokens * length * width / configuration.tensor
    head_size = width / max(1, configuration.model.heads)
    forward = flops / speed.attention * (1 + ATTENTION_LENGTH / length) * (1 + ATTENTION_HEAD / head_size)
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
    # Rows are sorted by expert, brought back, weighted and summed.
    sorting = EXPERT_PASSES * model.expert_layers * expert_rows(configuration) * model.hidden
    masks += sorting * speed.size / speed.bandwidth
    norms, rotary, activation = PASSES[model.gated, configuration.compile]
    forward, backward = (
        norm * between + turn * row / t + act * inner for norm, turn, act in zip(norms, rotary, activation)
    )
    return forward + masks, backward + masks


def kernels_of_block(configuration: TrainingConfiguration) -> float:
    """Launches of one block's forward."""
    return FORWARD_KERNELS[configuration.model.gated] * (COMPILED if configuration.compile else 1.0)


def _host(configuration: TrainingConfiguration) -> float:
    return kernels_of_block(configuration) * LAUNCH * configuration.stack.launch


OPTIMIZER_BYTES = 34.0  # of an element: norm and Adam's update read and write them
LOGIT_BYTES = (14.0, 12.0)  # forward: written, read and cast to fp32, log-softmax; backward: the same back


def head_work(configuration: TrainingConfiguration) -> tuple[KernelWork, KernelWork]:
    """(forward, backward) of output projection and loss."""
    model = configuration.model
    if not model.vocabulary:
        return KernelWork(), KernelWork()
    speed = rates(configuration.cluster.accelerator, configuration.stack, configuration.precision)
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
    shares = {
        "none": (0.0, 0.0, 0.0),
        "full": (1.0, 1.0, 1.0),
        "selective": (0.0, 0.0, 1.0),
        "attention": (0.0, 1.0, 0.0),
        "half": (0.5, 0.0, 1.0),
    }[configuration.checkpointing]
    matmul, attention, memory_bound = (share * part for share, part in zip(shares, forward))
    if configuration.checkpointing == "full" and configuration.stack.stops_early:
        matmul -= _last_product(configuration)
    host = forward.host if configuration.checkpointing != "none" else 0.0
    return KernelWork(matmul, attention, memory_bound, host).times(
        configuration.checkpointed * configuration.stack.recompute
    )


def _last_product(configuration: TrainingConfiguration) -> float:
    """Return the last product of a block's forward."""
    speed = rates(configuration.cluster.accelerator, configuration.stack, configuration.precision)
    inner = max(1, configuration.model.intermediate // configuration.tensor)
    return matmul_seconds(tokens_of(configuration), configuration.model.hidden, inner, speed)


def optimizer_seconds(elements: float, configuration: TrainingConfiguration) -> float:
    """A step of Adam over `elements` of this rank, once a step."""
    accelerator = configuration.cluster.accelerator
    return OPTIMIZER_BYTES * elements / (accelerator.bandwidth * 1e9 * accelerator.memory_bound)
