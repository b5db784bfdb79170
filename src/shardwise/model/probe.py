"""Learns from one forward what a model's structure does not show, without computing or allocating anything.

The forward runs in train mode on fake tensors (shapes only), so a model of any size is probed in a second. Watched are:

- the head: is the output of a plain `nn.Linear` returned as the logits, untouched? Only then can it run inside a
  chunked loss. Gemma 2's soft cap or Granite's scale come after the head and are seen as operations on its output;
- dropout: through `torch.nn.functional.dropout` outside of `nn.Dropout`, and on attention probabilities; noise;
- blocks: does each take its first argument from the one before, and do all get the same other arguments?
- which parameters a matrix product reads, tied or not.

What cannot be probed gets the cautious answer and a reason, never an exception.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from itertools import count
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise._torch_compat.tracing import FakeTensorMode, dispatch_modes_off, tree_leaves, tree_map
from shardwise.errors import ModelError
from shardwise.job.capability import SUPPORTED, Capability
from shardwise.model.attention_calls import AttentionCalls
from shardwise.model.block_numbers import BlockNumbers
from shardwise.model.chain import BlockCalls, HandedOn, activation_arguments, handed_on, is_chain, share_arguments
from shardwise.model.containers import walk
from shardwise.model.copies import deep_copy
from shardwise.model.experts import BATCHED, set_expert_implementation
from shardwise.model.facts import NO_EFFECTS, AttentionFacts, ModelFacts
from shardwise.model.fixed_values import FixedValues
from shardwise.model.forward_failures import failure_reason
from shardwise.model.gradient_hooks import definition_of
from shardwise.model.known_values import KnownValues
from shardwise.model.layer_drop import FixedScalarDraws
from shardwise.model.parameter_writes import ForwardEffects, ParameterWrites
from shardwise.model.process_numbers import process_numbers_kept
from shardwise.model.stage_cut import ExecutionOrder, graph_behind, leaves_of_graph
from shardwise.model.user_state import tensors_in, user_namespaces, user_state_kept

Result = TypeVar("Result")
Shapes = dict[tuple[str, int], tuple[int, ...]]  # of (module, number of its output)
ROWS = 13  # a prime too, and of few other lengths a divisor, so that a first dim that it divides is one of rows
MOST_ELEMENTS = 2**24  # of a model that is run on random numbers, if its forward runs on nothing else
TOKENS = {"input_ids", "decoder_input_ids"}  # arguments of a model of language
POSITIONS = 11  # a prime, so that a [.., S, S] tensor is one of attention probabilities and not a width by chance
# Where one refuses (a tensor that the constructor left on meta, a kernel for bf16 alone), the next is tried.
ATTEMPTS = (("cpu", torch.float32), ("meta", torch.float32), ("cpu", torch.bfloat16))

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout}
# Draws of random numbers that no place decides, so that ranks with the same activations would draw others.
DRAWS = {
    *(torch.rand, torch.randn, torch.randint, torch.rand_like, torch.randn_like, torch.randint_like, torch.randperm),
    *(torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, F.gumbel_softmax, F.rrelu),
    *(Tensor.normal_, Tensor.bernoulli_, Tensor.bernoulli, Tensor.exponential_, Tensor.multinomial, Tensor.random_),
    *(Tensor.geometric_, Tensor.cauchy_, Tensor.log_normal_),
}
DROPOUT_FORWARDS = {
    module_class.forward
    for module_class in (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
}
MATRIX_PRODUCTS = {
    F.linear, F.bilinear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum, torch.tensordot, torch.t,
    torch.transpose, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.t, Tensor.transpose,
    Tensor.permute, Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
}  # fmt: skip
# What mixes positions without attention: convolutions and scans of state-space models.
MIXERS = {
    torch.conv1d, torch.conv2d, nn.functional.conv1d, nn.functional.conv2d, torch.cumsum, Tensor.cumsum, torch.cumprod,
    Tensor.cumprod, torch.roll, Tensor.roll, torch.flip, Tensor.flip, torch.fft.fft, torch.fft.rfft, torch.fft.fftn,
    nn.functional.pad,
}  # fmt: skip
OF_EQUAL_DTYPES = {
    F.layer_norm, F.group_norm, F.batch_norm, F.rms_norm, F.scaled_dot_product_attention, F.conv1d, F.conv2d, F.conv3d,
    torch.conv1d, torch.conv2d, torch.conv3d,
}  # fmt: skip
# Take the form of a tensor alone, not its values; casts take values of their first argument.
FORMS = {
    torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like,
    Tensor.new_empty, Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_tensor,
}  # fmt: skip
CASTS = {Tensor.to, Tensor.type_as}
# Leave a tensor as it is; whether `contiguous` returned the tensor itself shows in the logits' identity.
LOOKS = {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "element_size", "__len__", "contiguous"}


@dataclass(frozen=True)
class ForwardProbe:
    """Findings of one forward. The defaults are the cautious answers for a model that could not be probed."""

    head: str | None = None
    head_has_bias: bool = False
    has_functional_dropout: bool = True
    has_attention_dropout: bool = True
    dropped: frozenset[tuple[int, ...]] = frozenset()  # shapes of what is dropped of
    blocks_share_arguments: bool = False
    order: ExecutionOrder | None = None
    blocks_are_chain: bool = False  # each ran once, on the output of the one before
    joined_blocks: int = 0  # of the last list, behind towers: the first ones, whose outputs are joined by theirs
    handed_on: tuple[HandedOn, Capability] = field(default_factory=lambda: (HandedOn({0: 0}), SUPPORTED))
    block_calls: int = 0  # more than there are blocks where weights are shared across depth
    scalar_draws: int = 0  # random numbers that were drawn, by which layers may be dropped
    draws_process_numbers: bool = False  # from Python's or NumPy's generator
    drops_blocks: bool = False
    matrix_parameters: frozenset[str] = frozenset()
    attention: tuple[str, ...] = ()  # modules that called transformers' AttentionInterface, one for each call
    attention_arguments: tuple[str, ...] = ()
    attention_calls: tuple[AttentionFacts, ...] = ()
    mixes_positions: bool = False  # by a convolution or a scan
    fixed_logits: int = 0  # positions of the logits, where there are not as many as tokens
    kept_logits: int = 0  # tensors of the logits' size that backward needs of what stands between head and logits
    handed_shape: tuple[int, ...] = ()  # of what the last block returns first; empty for no tensor
    tokens: int = 0  # of a sequence that the forward was given
    positions: int = 0  # of the hidden states [B, positions, H] of all blocks; 0 where they differ, or are none
    takes_outer_gradient: bool = False  # the forward takes a gradient while no block runs
    blocks_without_gradient: bool = False  # blocks run where gradients are off, as in a checkpoint with reentry
    outside_reads: tuple[str, ...] = ()  # parameters read where neither their module nor its block ran
    activation_arguments: tuple[int | str, ...] = ()  # of the blocks: positions or names of what is made from weights
    writing_blocks: tuple[str, ...] = ()  # those that write a tensor that they are given
    activation_writing_blocks: tuple[str, ...] = ()  # and that tensor was made from weights
    written_parameters: tuple[str, ...] = ()  # by the forward
    replaced_parameters: tuple[str, ...] = ()  # by others that the forward makes
    effects: ForwardEffects = NO_EFFECTS
    container_changing_blocks: tuple[str, ...] = ()  # those that change a list, a dict or an object that they are given
    changed_number: str = ""  # that a block changes and other code may read
    draws_on_activations: bool = False  # random numbers that are no dropout, uniform noise or scalar
    called_linears: tuple[str, ...] = ()  # linear layers of blocks whose parameters nothing else reads
    read_linears: frozenset[str] = frozenset()  # those that never run, because other code reads their parameters
    failure: str = ""


def probe_forward(
    model: nn.Module,
    block_lists: Sequence[Sequence[str]],
    sequence_length: int,
    example: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] = (),
) -> ForwardProbe:
    """Run the forward on `example` (keyword arguments; only shapes and dtypes count) or, without one, on tokens.

    `block_lists` are module names; with `towers` the last one alone is a chain, which they run before. The model stays
    as it is: a copy runs, for a forward may keep tensors it made. Of a user's forward that decides by values of
    tensors, only what it reads and writes is known, on two of its paths.
    """
    if example is None and "input_ids" not in inspect.signature(model.forward).parameters:
        return ForwardProbe(failure=f"{type(model).__name__}.forward has no input_ids, and there is no example batch")
    inputs = example or token_inputs(model, min(POSITIONS, sequence_length))

    def observe(draw: float, training: bool, device: str, dtype: torch.dtype) -> ForwardProbe:
        observed = copy_to_probe(model).train() if training else copy_to_probe(model)
        recorded = _RecordedForward(observed, block_lists, _positions(inputs), draw, towers)
        recorded.originals = dict(model.named_parameters())
        return recorded.run(inputs, device, dtype)

    result, failure = try_devices(partial(observe, 1.0, False))
    if result is not None and (
        result.scalar_draws or not model.training
    ):  # what drops in training may be asked before it
        fewest = try_devices(partial(observe, 0.0, True))[0]
        drops_blocks = fewest is not None and fewest.block_calls < result.block_calls
        result = replace(result, drops_blocks=drops_blocks)
    if result is None:
        failure = f"the forward of {definition_of(model)} cannot run on fake tensors: {failure}"
        result = replace(_probe_paths(model, block_lists, inputs), failure=failure)
    return result


def _probe_paths(model: nn.Module, block_lists: Sequence[Sequence[str]], inputs: Mapping[str, Tensor]) -> ForwardProbe:
    """Return what a user's forward that decides by values of tensors reads and writes; the rest stays unknown.

    Two of its paths are tried, on which all values are 0 or 1. A small model runs on random numbers if it has to.
    """
    if isinstance(model, PreTrainedModel):
        return ForwardProbe()

    def observe(value: float | None, device: str, dtype: torch.dtype) -> ForwardProbe:
        forward = _RecordedForward(copy_to_probe(model), block_lists, _positions(inputs), 1.0)
        with FixedValues(value):
            return forward.run(inputs, device, dtype, on_fakes=value is not None)

    paths = [path for value in (0.0, 1.0) if (path := try_devices(partial(observe, value))[0]) is not None]
    if not paths and sum(tensor.numel() for _, tensor in _tensors(model)) <= MOST_ELEMENTS:
        path = try_devices(partial(observe, None))[0]
        paths = [] if path is None else [path]
    return ForwardProbe(
        outside_reads=tuple(sorted({name for path in paths for name in path.outside_reads})),
        takes_outer_gradient=any(path.takes_outer_gradient for path in paths),
        writing_blocks=tuple(dict.fromkeys(name for path in paths for name in path.writing_blocks)),
        activation_writing_blocks=tuple(
            dict.fromkeys(name for path in paths for name in path.activation_writing_blocks)
        ),
        written_parameters=tuple(sorted({name for path in paths for name in path.written_parameters})),
        replaced_parameters=tuple(sorted({name for path in paths for name in path.replaced_parameters})),
        effects=reduce(ForwardEffects.joined, (path.effects for path in paths), NO_EFFECTS),
    )


def token_inputs(model: nn.Module, positions: int) -> dict[str, Tensor]:
    """Return the arguments of a language model, on the meta device."""
    tokens = torch.empty(ROWS, positions, dtype=torch.long, device="meta")
    two_sided = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return {"input_ids": tokens} | ({"decoder_input_ids": tokens} if two_sided else {})


def decodes_labels(model: nn.Module) -> bool:
    """Tell whether a model's decoder reads labels, one later; those of heads of classes are no tokens."""
    if not isinstance(model, PreTrainedModel):
        return False
    config: Any = model.config
    return bool(config.is_encoder_decoder) and bool(model.can_generate())


def as_trained(model: nn.Module, example: Mapping[str, Tensor] | None) -> Mapping[str, Tensor] | None:
    """Return the keyword arguments of a forward in training: of transformers' models the loss is taken outside.

    Their labels are then read by a decoder alone. With labels they would compute a loss, which reads logits.
    """
    if example is None or "labels" not in example or not isinstance(model, PreTrainedModel):
        return example
    inputs = {name: value for name, value in example.items() if name != "labels"}
    if decodes_labels(model) and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = example["labels"].clamp(min=0)
    return inputs


def try_devices(run: Callable[[str, torch.dtype], Result]) -> tuple[Result | None, str]:
    """Return what `run` gives on the first of ATTEMPTS that works, or None and why the first of them did not."""
    failure = ""
    for device, dtype in ATTEMPTS:
        try:
            return run(device, dtype), ""
        except Exception as error:  # any code may run in a model's forward
            failure = failure or failure_reason(error)
    return None, failure


def shapes_handed_on(model: nn.Module, facts: ModelFacts, inputs: Mapping[str, Any]) -> Shapes:
    """Return the shapes of what blocks hand on and of what an encoder returns, in a forward of `inputs`.

    Args:
        model: uncut; it stays as it is.
        inputs: keyword arguments; of tensors shapes and dtypes count.

    Raises:
        ModelError: the forward cannot run on fake tensors.
    """
    shapes: Shapes = {}
    recorded, stages = copy_to_probe(model), facts.stages

    def record(name: str, numbers: Iterable[int], module: nn.Module, args: Any, output: Any) -> None:
        for number in numbers:
            value = output if isinstance(output, Tensor) else output[number]
            shapes[name, number] = tuple(value.shape)

    for block in facts.blocks[stages.tower_blocks :]:
        recorded.get_submodule(block.name).register_forward_hook(partial(record, block.name, stages.handed_on))
    if stages.encoder:
        recorded.get_submodule(stages.encoder).register_forward_hook(partial(record, stages.encoder, (0,)))
    with user_state_kept(model):
        failure = try_devices(partial(run_on_fakes, recorded, inputs))[1]
    if failure:
        raise ModelError(
            f"what travels between the stages of {facts.family} cannot be told for this batch: {failure}; use "
            "pipeline_parallel_degree 1"
        )
    return shapes


def units_in_order(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the smallest modules that together hold all parameters and run once each, in that order.

    They take the place of blocks in a model where nothing repeats. Empty where the model itself is the smallest, or
    cannot run.

    Args:
        inputs: keyword arguments of the forward; of tensors shapes and dtypes count.
    """
    calls: list[str] = []
    recorded = copy_to_probe(model)
    for name, module in recorded.named_modules():
        module.register_forward_pre_hook(partial(lambda name, module, args: calls.append(name), name))

    def run(device: str, dtype: torch.dtype) -> None:
        calls.clear()
        run_on_fakes(recorded, inputs, device, dtype)

    if try_devices(run)[1]:
        return ()
    units = _smallest(model, "", calls)
    return () if units == [""] else tuple(sorted(units, key=calls.index))


def _smallest(module: nn.Module, name: str, calls: Sequence[str]) -> list[str]:
    children = {
        f"{name}.{key}" if name else key: child for key, child in module.named_children() if _holds_parameters(child)
    }
    holds_some = any(True for _ in module.parameters(recurse=False))
    if holds_some or not children or any(calls.count(child) != 1 for child in children):
        return [name]
    return [unit for key, child in children.items() for unit in _smallest(child, key, calls)]


def _holds_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def parameters_without_gradient(model: nn.Module, inputs: Mapping[str, Any]) -> frozenset[str]:
    """Return trained parameters from which no differentiable way leads to the output, such as those behind an argmax.

    None where the model cannot run.
    """
    recorded, missed = copy_to_probe(model), set[str]()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def begin(module: nn.Module, args: Any) -> None:
        for name, fake in module.named_parameters():
            fake.requires_grad_(name in trained)

    def end(module: nn.Module, args: Any, output: Any) -> None:
        reached = leaves_of_graph(getattr(output, "logits", output))
        missed.update(name for name, fake in module.named_parameters() if name in trained and id(fake) not in reached)

    recorded.register_forward_pre_hook(begin)
    recorded.register_forward_hook(end)
    with user_state_kept(model):
        try_devices(lambda device, dtype: run_on_fakes(recorded, inputs, device, dtype))
    return frozenset(missed)


def arguments_to_cast(model: nn.Module, inputs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the float arguments that the forward does not take in fp32 where its parameters are in 16 bits.

    Args:
        inputs: keyword arguments; of tensors shapes and dtypes count.
    """
    floats = [name for name, value in inputs.items() if isinstance(value, Tensor) and value.is_floating_point()]

    def takes(kept: Collection[str]) -> bool:
        try:
            with _EqualDtypes():
                run_on_fakes(copy_to_probe(model), inputs, "cpu", torch.bfloat16, kept)
        except Exception:  # any code may run in a model's forward
            return False
        return True

    if not floats or takes(floats):
        return ()
    kept = [name for name in floats if takes([name])]
    return tuple(floats if not takes(kept) else (name for name in floats if name not in kept))


def unfit_dtypes(model: nn.Module, sequence_length: int) -> dict[str, str]:
    """Return those of `fp64` and `bf16` in which the forward of a transformers model multiplies unlike dtypes -> why.

    transformers keeps some weights in fp32 whatever the dtype of the others. Most forwards cast them all the same; one
    that casts what it multiplies them by alone needs them in fp32. Models that keep none are not run.
    """
    if not getattr(model, "_keep_in_fp32_modules_strict", None):
        return {}
    inputs = token_inputs(model, min(POSITIONS, sequence_length))

    def is_unfit(dtype: torch.dtype) -> bool:
        try:
            with _EqualDtypes():
                run_on_fakes(copy_to_probe(model), inputs, "cpu", dtype)
        except _UnlikeDtypesError:
            return True
        except Exception:  # any code may run in a model's forward, and not all of it on fake tensors
            return False
        return False

    reason = "keeps some weights in fp32 and multiplies them by what it has cast to fp32, which fails"
    return {name: reason for name, dtype in (("fp64", torch.float64), ("bf16", torch.bfloat16)) if is_unfit(dtype)}


class _UnlikeDtypesError(RuntimeError):
    """A product of several float dtypes."""


class _EqualDtypes(TorchFunctionMode):
    """Refuse products, norms and attention of tensors of several float dtypes, as kernels do; fake ones do not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in MATRIX_PRODUCTS | OF_EQUAL_DTYPES:
            tensors = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
            if len({tensor.dtype for tensor in tensors if tensor.is_floating_point()}) > 1:
                raise _UnlikeDtypesError(f"{func.__name__} of several float dtypes")
        return func(*args, **(kwargs or {}))


class FakeRun(NamedTuple):
    """A forward on fake tensors: what it has returned, and the values that are known of its tensors."""

    output: Any
    known: KnownValues


def run_on_fakes(
    model: nn.Module,
    inputs: Mapping[str, Any],
    device: str,
    dtype: torch.dtype,
    kept: Collection[str] = (),
    watching: AbstractContextManager[Any] | None = None,
) -> FakeRun:
    """Run the forward on fake tensors, inside `watching`; floats are of `dtype`, and of arguments `kept` of fp32."""
    with _fakes(assumes=isinstance(model, PreTrainedModel)) as known:
        state = fake_state(model, device, dtype)
        arguments = {
            name: _fake(value, device, torch.float32 if name in kept else dtype) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        _assume_inputs(known, model, inputs, arguments)
        with watching or nullcontext():
            return FakeRun(torch.func.functional_call(model, state, (), arguments), known)


def output_on_fakes(module: nn.Module, arguments: tuple[Any, Any], dtype: torch.dtype) -> Any:
    """Return what a part of a transformers model gives on fake tensors, whose floats are of `dtype`.

    Args:
        arguments: positional and keyword arguments, whose tensors have values that the forward may read.
    """
    with _fakes(assumes=True) as known:

        def faked(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            fake = _fake(leaf, "cpu", dtype)
            known.assume(fake, partial(_value_of, leaf, fake.dtype))
            return fake

        args, kwargs = tree_map(faked, arguments)
        return torch.func.functional_call(module, fake_state(module, "cpu", dtype), args, kwargs)


@contextmanager
def _fakes(assumes: bool) -> Iterator[KnownValues]:
    """Let tensors that are made here be fake ones."""
    with (
        _quiet(),
        FakeTensorMode(allow_non_fake_inputs=True),
        KnownValues(assumes=assumes) as known,
        torch.random.fork_rng(devices=[]),
        FixedScalarDraws(),
    ):
        yield known


def fake_state(module: nn.Module, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return fake tensors for the parameters and buffers of a module, by name; under FakeTensorMode."""
    return {name: _fake(tensor, device, dtype) for name, tensor in _tensors(module)}


def _assume_inputs(
    known: KnownValues, model: nn.Module, inputs: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    """Let a forward of transformers read its inputs: an example's are real, and tokens alone are those of a text."""
    for name, argument in arguments.items() if known.assumes else ():
        if isinstance(given := inputs[name], Tensor) and not given.is_meta:
            known.assume(argument, partial(_value_of, given, argument.dtype))
        elif name in TOKENS:
            known.assume(argument, partial(_sample_tokens, model, argument.shape))


def _value_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    with dispatch_modes_off():
        return tensor.detach().to("cpu", dtype)


def _sample_tokens(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return ids of rows that hold no special token but the one that ends a text, in the last place."""
    config: Any = model.config
    config = config.get_text_config()
    special = {value for name, value in config.to_dict().items() if name.endswith("token_id") and value is not None}
    with dispatch_modes_off():
        ids = torch.full(tuple(shape), next(number for number in count() if number not in special))
        if isinstance(last := getattr(config, "eos_token_id", None), int):
            ids[:, -1] = last
    return ids


def operations_of(model: nn.Module, inputs: Mapping[str, Any]) -> int:
    """Return how many multiplications and additions matrix products of a forward take; 0 if it needs values.

    Args:
        inputs: keyword arguments; of tensors shapes and dtypes count.
    """
    counted = FlopCounterMode(display=False)
    try:
        with user_state_kept(model):
            run_on_fakes(copy_to_probe(model), inputs, "cpu", torch.float32, watching=counted)
    except Exception:  # any code may run in a model's forward
        return 0
    return int(counted.get_total_flops())


def _positions(inputs: Mapping[str, Tensor]) -> int:
    """Return the sequence length S of the inputs: dim 1 of the first that has one."""
    return next((tensor.shape[1] for tensor in inputs.values() if tensor.dim() > 1), 0)


def copy_to_probe(model: nn.Module) -> nn.Module:
    """Return a copy of the module tree that shares the buffers, which may be large; the probe never reads them.

    Its experts, if it has some, are computed in the one way of transformers' whose shapes do not depend on the routing
    and whose widths may be any.
    """
    copied = deep_copy(model, model.buffers())
    for name, parameter in copied.named_parameters():
        vars(parameter).update(vars(model.get_parameter(name)))  # torch's copies have no attributes
    set_expert_implementation(copied, BATCHED)
    return copied


class _RecordedForward:
    """One run of the forward of `model` with hooks on head, dropout modules and blocks; the model is used up."""

    def __init__(
        self,
        model: nn.Module,
        block_lists: Sequence[Sequence[str]],
        positions: int,
        draw: float,
        towers: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.blocks = [[BlockCalls(name) for name in names] for names in block_lists]
        self.head_name, self.head = _plain_head(model)
        self.has_towers = bool(towers)
        self.order = ExecutionOrder(model, block_lists, towers)
        self.functions = _FunctionCalls(positions, self.order)
        self.originals: Mapping[str, Tensor] = {}  # which code reaches past the copy, by a weak reference or a global
        self.writes = ParameterWrites()
        model.register_forward_hook(self.writes.record_end)
        self.namespaces = user_namespaces(model.modules())
        self.known_globals = tensors_in(self.namespaces)
        self.global_tensor = ""
        self.numbers = BlockNumbers(model, ())
        self.draws = FixedScalarDraws(draw)
        self.draws_process_numbers = False
        self.attention = AttentionCalls()
        self.tokens = 0  # of a sequence that has logits, where the forward is given tokens
        for block in (block for blocks in self.blocks for block in blocks):
            model.get_submodule(block.name).register_forward_pre_hook(block.record_arguments, with_kwargs=True)
            model.get_submodule(block.name).register_forward_hook(block.record_output)
            model.get_submodule(block.name).register_forward_hook(self._record_globals)
        for module in model.modules():
            if type(module).forward in DROPOUT_FORWARDS:
                module.register_forward_pre_hook(self.functions.enter_module)
                module.register_forward_hook(self.functions.leave_module)
        if not isinstance(model, PreTrainedModel):
            self.functions.watch_owners(model, [name for names in block_lists for name in names])
            self.numbers = BlockNumbers(model, [name for names in block_lists for name in names])
        else:
            self.functions.watch_linears(model, [name for names in block_lists for name in names])
        if self.head is not None:
            self.head.register_forward_hook(self.functions.record_head)

    def run(self, inputs: Mapping[str, Tensor], device: str, dtype: torch.dtype, on_fakes: bool = True) -> ForwardProbe:
        """Run the forward, on fake tensors or else on random numbers, and return what was seen."""
        make = _fake if on_fakes else _drawn
        # What a decoder reads beside sound or images says nothing of the positions of its encoder.
        ids = inputs.get("decoder_input_ids", inputs["input_ids"]) if "input_ids" in inputs else None
        self.tokens = 0 if ids is None else ids.shape[1]
        known = KnownValues(assumes=isinstance(self.model, PreTrainedModel))
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            if on_fakes:
                stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
                stack.enter_context(known)
            state = {name: make(tensor, device, dtype) for name, tensor in self.model.named_buffers()}
            for name, parameter in self.model.named_parameters():  # a bias on scores may have a gradient
                state[name] = nn.Parameter(make(parameter, device, dtype), parameter.requires_grad)
                vars(state[name]).update(vars(parameter))
            given = {name: make(tensor, device, dtype) for name, tensor in inputs.items()}
            _assume_inputs(known, self.model, inputs, given)
            self.functions.names = {id(tensor): name for name, tensor in (*self.originals.items(), *state.items())}
            self.writes.watch({name: state[name] for name, _ in self.model.named_parameters()})
            stack.enter_context(self.writes)
            stack.enter_context(self.writes.calls_recorded())
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.enter_context(self.functions)
            stack.enter_context(self.draws)
            stack.enter_context(self.attention.recorded())
            were_drawn = stack.enter_context(process_numbers_kept())
            output = torch.func.functional_call(self.model, state, (), given)
            self.draws_process_numbers = were_drawn()
        return self._result(output)

    def _fixed_logits(self, logits: Any) -> int:
        """Return the positions of logits [B, positions, classes], where there are not as many as tokens; else 0."""
        has_positions = isinstance(logits, Tensor) and logits.dim() == 3 and self.tokens
        return logits.shape[1] if has_positions and logits.shape[1] != self.tokens else 0

    def _kept_logits(self, logits: Any) -> int:
        """Return how many tensors of the size of the logits autograd keeps behind the head, as of a soft cap's tanh."""
        of_head = self.functions.logits
        if len(of_head) != 1 or not isinstance(logits, Tensor):
            return 0
        nodes = list(graph_behind(logits, [of_head[0].grad_fn]))
        saved = (getattr(node, name) for node in nodes for name in dir(node) if name.startswith("_saved_"))
        return sum(isinstance(tensor, Tensor) and tensor.numel() == logits.numel() for tensor in saved)

    def _record_globals(self, module: nn.Module, args: Any, output: Any) -> None:
        tensors = tensors_in(self.namespaces)
        left = (where for key, where in tensors.items() if key not in self.known_globals)
        self.global_tensor = self.global_tensor or next(left, "")

    def _result(self, output: Any) -> ForwardProbe:
        self.order.end_forward(output)
        functions = self.functions
        # What is returned is read by the loss, while no module runs.
        functions.outside_reads |= {
            functions.names.get(id(value), "") for value in walk(output)
        } & functions.owners.keys()
        blocks = [block for blocks in self.blocks for block in blocks]
        shapes = [tuple(getattr(block.outputs[0], "shape", ())) for block in blocks]
        handed_shape = shapes[-1] if shapes else ()
        logits = getattr(output, "logits", None)
        names = {id(module): name for name, module in self.model.named_modules()}
        is_users = not isinstance(self.model, PreTrainedModel)
        are_written = is_users and any(block.is_written_into for block in blocks)
        is_last = len(functions.logits) == 1 and logits is functions.logits[0] and not functions.logits_used
        return ForwardProbe(
            head=self.head_name if is_last else None,
            head_has_bias=is_last and self.head is not None and self.head.bias is not None,
            has_functional_dropout=functions.functional_dropout,
            has_attention_dropout=functions.attention_dropout,
            dropped=frozenset(functions.dropped),
            order=self.order,
            **self._chain_facts(are_written),
            block_calls=sum(len(block.calls) for blocks in self.blocks for block in blocks),
            scalar_draws=self.draws.count,
            draws_process_numbers=self.draws_process_numbers,
            matrix_parameters=frozenset(functions.matrix_parameters),
            attention=tuple(names.get(id(module), "") for module in self.attention.modules),
            attention_arguments=tuple(sorted(self.attention.arguments)),
            attention_calls=tuple(
                replace(call, name=names.get(id(module), ""))
                for call, module in zip(self.attention.calls, self.attention.modules, strict=True)
            ),
            mixes_positions=functions.mixes_positions,
            fixed_logits=self._fixed_logits(logits),
            kept_logits=self._kept_logits(logits),
            handed_shape=handed_shape,
            tokens=self.tokens,
            positions=handed_shape[1] if len(handed_shape) == 3 and len(set(shapes)) == 1 else 0,
            outside_reads=tuple(sorted(functions.outside_reads)),
            takes_outer_gradient=functions.takes_outer_gradient,
            blocks_without_gradient=any(block.without_gradient for blocks in self.blocks for block in blocks),
            activation_arguments=activation_arguments(blocks),
            writing_blocks=tuple(block.name for block in blocks if block.writes_tensor),
            activation_writing_blocks=tuple(block.name for block in blocks if block.writes_activation),
            written_parameters=self.writes.written(),
            replaced_parameters=self.writes.replaced,
            effects=ForwardEffects(
                self.writes.refrozen,
                self.writes.hooked,
                self.writes.saves_state,
                next((block.name for block in blocks if block.marks_tensor), ""),
                self.global_tensor,
            ),
            container_changing_blocks=tuple(block.name for block in blocks if block.changes_container),
            changed_number=self.numbers.changed,
            draws_on_activations=functions.draws_on_activations,
            called_linears=functions.called_linears(),
            read_linears=frozenset(functions.read_elsewhere - functions.called),
        )

    def _chain_facts(self, are_written: bool) -> dict[str, Any]:
        """Return what blocks take from one another; nothing of those whose results are written into between them."""
        joined = _joined(self.blocks[-1]) if self.has_towers else 0
        chains = [self.blocks[-1][joined:]] if self.has_towers else self.blocks
        are_chain = not are_written and all(is_chain(blocks) for blocks in chains)
        all_trained = all(parameter.requires_grad for parameter in self.model.parameters())
        return {
            "blocks_share_arguments": not are_written
            and all(is_chain(blocks) and share_arguments(blocks) for blocks in self.blocks),
            "blocks_are_chain": are_chain,
            "joined_blocks": joined,
            "handed_on": handed_on(chains, self.order.encoded, all_trained) if are_chain else ({0: 0}, SUPPORTED),
        }


def _joined(blocks: Sequence[BlockCalls]) -> int:
    """Return the fewest blocks without which the others are a chain; none where two of them are not."""
    return next((first for first in range(len(blocks) - 1) if is_chain(blocks[first:])), 0)


class _FunctionCalls(TorchFunctionMode):
    """A mode that records what the forward does by torch's functions."""

    def __init__(self, positions: int, order: ExecutionOrder) -> None:
        super().__init__()
        self.positions = positions
        self.order = order
        self.names: dict[int, str] = {}
        self.logits: list[Any] = []
        self.logits_used = False
        self.functional_dropout = False
        self.attention_dropout = False
        self.dropped: set[tuple[int, ...]] = set()
        self.mixes_positions = False
        self.matrix_parameters: set[str] = set()
        self._inside_module = 0
        self.active: list[str] = []  # modules whose forward runs
        self.owners: dict[str, tuple[str, ...]] = {}  # parameter -> modules or blocks one of which should run
        self.outside_reads: set[str] = set()
        self.blocks: tuple[str, ...] = ()
        self.takes_outer_gradient = False
        self.draws_on_activations = False
        self.linears: dict[str, str] = {}  # parameter -> its linear layer
        self.called: set[str] = set()  # linear layers
        self.read_elsewhere: set[str] = set()  # those whose parameters were read while they did not run
        self.running = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            self._record_dropout(*_dropout_arguments(*args, **kwargs))
        elif func is Tensor.uniform_:
            self.functional_dropout = True  # noise on activations
        elif func is F.scaled_dot_product_attention:
            self.attention_dropout |= _attention_dropout(*args, **kwargs) > 0
        elif func in MATRIX_PRODUCTS:
            self.matrix_parameters |= {self.names[id(x)] for x in tree_leaves([args, kwargs]) if id(x) in self.names}
        elif func in MIXERS:
            self.mixes_positions |= any(isinstance(x, Tensor) and x.dim() > 2 for x in args[:1])
        if func is torch.autograd.grad or func is Tensor.backward:
            self.takes_outer_gradient |= not set(self.blocks) & set(self.active)
        if self.logits and getattr(func, "__name__", "") not in LOOKS:
            self.logits_used |= any(leaf is self.logits[-1] for leaf in tree_leaves([args, kwargs]))
        result = func(*args, **kwargs)
        self.draws_on_activations |= func in DRAWS and isinstance(result, Tensor) and result.dim() > 0
        if func not in FORMS:
            sources = args[:1] if func in CASTS else [args, kwargs]
            self.order.follow(tree_leaves(sources), args[0] if func is Tensor.__setitem__ else result)
        # An attribute that is a tensor, such as `.data` or `.T`, is a read; a shape is not.
        if self.owners and (getattr(func, "__name__", "") not in LOOKS or isinstance(result, Tensor)):
            names = {self.names.get(id(leaf), "") for leaf in tree_leaves([args, kwargs])} & self.owners.keys()
            self.outside_reads |= {name for name in names if not set(self.owners[name]) & set(self.active)}
        if self.linears and (getattr(func, "__name__", "") not in LOOKS or isinstance(result, Tensor)):
            read = (self.linears.get(self.names.get(id(leaf), "")) for leaf in tree_leaves([args, kwargs]))
            self.read_elsewhere |= {name for name in read if name is not None and name != self.running}
        return result

    def _record_dropout(self, tensor: Tensor, probability: float, training: bool) -> None:
        if not training or probability == 0:
            return
        self.functional_dropout |= self._inside_module == 0
        self.dropped.add(tuple(tensor.shape))
        square = tensor.shape[-2:] == (self.positions, self.positions)
        self.attention_dropout |= square and (tensor.dim() == 4 or (tensor.dim() == 3 and tensor.shape[0] != ROWS))

    def enter_module(self, module: nn.Module, args: Any) -> None:
        self._inside_module += 1

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside_module -= 1

    def watch_owners(self, model: nn.Module, blocks: Iterable[str]) -> None:
        """Record which parameters are read while neither their module nor its block runs."""
        self.blocks = tuple(blocks)
        inside = {block: f"{block}." for block in self.blocks}
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for aliases in names.values():
            in_block = [next((b for b, prefix in inside.items() if name.startswith(prefix)), "") for name in aliases]
            self.owners[aliases[0]] = tuple(
                block or name.rpartition(".")[0] for name, block in zip(aliases, in_block, strict=True)
            )
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(lambda name, module, args: self.active.append(name), name))
            module.register_forward_hook(self._leave)

    def watch_linears(self, model: nn.Module, blocks: Iterable[str]) -> None:
        """Record which linear layers of blocks run, and which have a parameter that other code reads, or a tied one."""
        counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        inside = tuple(f"{block}." for block in blocks)
        for name, module in model.named_modules():
            if type(module) in (nn.Linear, Conv1D) and name.startswith(inside):
                own = dict(module.named_parameters(recurse=False))
                if all(counts[id(parameter)] == 1 for parameter in own.values()):
                    self.linears |= {f"{name}.{leaf}": name for leaf in own}
                    module.register_forward_pre_hook(partial(self._enter_linear, name))
                    module.register_forward_hook(self._leave_linear)

    def _enter_linear(self, name: str, module: nn.Module, args: Any) -> None:
        self.running = name
        self.called.add(name)

    def _leave_linear(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running = ""

    def called_linears(self) -> tuple[str, ...]:
        """Return the linear layers that run and whose parameters are read by nothing else, in the model's order."""
        return tuple(name for name in dict.fromkeys(self.linears.values()) if name in self.called - self.read_elsewhere)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.active.pop()

    def record_head(self, module: nn.Module, args: Any, output: Any) -> None:
        self.logits.append(output)


def _plain_head(model: nn.Module) -> tuple[str | None, nn.Linear | None]:
    """Return name and module of the output projection, if it is exactly an nn.Linear."""
    getter = getattr(model, "get_output_embeddings", None)
    head = getter() if callable(getter) else None
    if type(head) is not nn.Linear:
        return None, None
    return next((name for name, module in model.named_modules() if module is head), None), head


def _dropout_arguments(input: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Any:
    return input, p, training


def _attention_dropout(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> float:
    return dropout_p


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _fake(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """Return a tensor of the same shape, and with the same attributes, without storage; under FakeTensorMode."""
    fake_dtype = dtype if tensor.is_floating_point() else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=fake_dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        vars(fake).update(vars(tensor))
    return fake


def _drawn(tensor: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """Return random numbers in the form of a tensor; zeros where they are no floating ones."""
    drawn = _fake(tensor, device, dtype)
    if drawn.is_floating_point() or drawn.is_complex():
        return drawn.normal_(generator=torch.Generator(device).manual_seed(tensor.numel()))
    return drawn.zero_()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's traceback for each operation without a fake version; the probe reports it in a sentence."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
