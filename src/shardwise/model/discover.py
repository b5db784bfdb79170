"""Discovers what a model is made of from its structure, never from class or module names: the ModelFacts.

Blocks are the repeated children of the heaviest list of the model, ties are parameters registered under several
names, input embeddings are what only `nn.Embedding` reads. Sizes come from the config where there is one (transformers'
`attribute_map` makes the common names work for all families) and from shapes where not. What only a forward shows
(the head, dropout, the blocks' arguments) comes from `shardwise.model.probe`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, groupby
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwise._torch_compat.modules import is_compiled
from shardwise.job.axes import Axis
from shardwise.job.capability import SUPPORTED, Capability, refused, unless
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS, ModelTask
from shardwise.model.adapter_config import adapter_settings
from shardwise.model.adapters import with_adapters
from shardwise.model.attention_support import context_capability, kernel_capability, takes_positions
from shardwise.model.build import has_dropout
from shardwise.model.class_loss import SAME, labels_of_class, labels_of_task
from shardwise.model.experts import (
    BATCHED,
    NUMBER,
    computes_grouped,
    computes_looped,
    expert_capability,
    expert_matrices,
    expert_stacks,
    holds_experts,
)
from shardwise.model.facts import BlockFacts, LatentAttention, ModelFacts, SplitForward, StageFacts
from shardwise.model.fusible import fusible
from shardwise.model.gradient_hooks import (
    GradientHook,
    definition_of,
    find_accumulate_grad_hooks,
    find_gradient_hooks,
    whole_gradient_hooks,
)
from shardwise.model.initializers import parents_that_initialize, unfilled_parameters
from shardwise.model.isolation import isolation_capability
from shardwise.model.layer_configs import largest_value
from shardwise.model.mixers import mixer_splits
from shardwise.model.modules import input_embeddings
from shardwise.model.packed_weights import with_packed_base
from shardwise.model.parameter_kinds import find_parameter_kinds
from shardwise.model.parameter_patterns import with_frozen
from shardwise.model.position_rule import PositionRule, find_position_rule
from shardwise.model.probe import (
    ROWS,
    ForwardProbe,
    arguments_to_cast,
    as_trained,
    probe_forward,
    token_inputs,
    unfit_dtypes,
)
from shardwise.model.registry import family_of
from shardwise.model.rehearsal import reads_absent_weights, rehearse_stage
from shardwise.model.routers import ADDS_LOSS, correction_biases, find_routers
from shardwise.model.split_forward import find_split_forward
from shardwise.model.stage_cut import is_inside, stage_facts, towers_of
from shardwise.model.tensor_plan import (
    FEWEST_OUTPUTS,
    attention_split,
    completed,
    gathered_splits,
    planned_part,
    sequence_capability,
    tensor_plan,
    vocabulary_parameters,
)
from shardwise.model.tensor_split import TensorSplit
from shardwise.model.user_state import user_state_kept
from shardwise.model.weight_dtypes import with_weight_dtypes

SIMILAR_NAMES = 0.5  # share of parameter names that the children of a list of blocks have in common
SMALLEST_LIST = 0.1  # a further list of blocks has at least this share of the heaviest one's parameters

HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "width")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depth")
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
HEAD_SIZE = ("head_dim", "attention_head_size", "d_kv", "kv_channels")
INTERMEDIATE = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "d_inner", "hidden_dim")
EXPERTS_OF_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")
VOCABULARY = ("vocab_size", "vocabulary_size", "n_vocab")
LENGTH = 8  # tokens of a rehearsal
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)  # means over rows, kept in buffers
FACTORY_ATTENTION = refused("a module of model.factory keeps the attention that it was built with")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "block_size")


def discover(model: nn.Module, job: Job, example: Mapping[str, Tensor] | None = None) -> ModelFacts:
    """Return the facts of `model` (parameters on meta).

    `example` holds keyword arguments for the forward of a user's module; without it a module that does not take
    `input_ids` cannot be probed, and the facts then assume the worst and say so in `probe_failure`.
    """
    hooks, example = find_gradient_hooks(model), as_trained(model, example)
    with user_state_kept(model, chain.from_iterable(hooks.values())):
        facts = _discover(model, job, example, hooks)
    facts = with_adapters(with_frozen(facts, job.model.freeze), adapter_settings(job.adapter))
    return with_weight_dtypes(with_packed_base(facts, job.adapter), job.model)


def _discover(
    model: nn.Module,
    job: Job,
    example: Mapping[str, Tensor] | None,
    hooks: Mapping[str, tuple[GradientHook, ...]],
) -> ModelFacts:
    config = _text_config(model)
    lists, forward = _probe(model, job, example)
    blocks = [name for names in lists for name in names]
    ties = find_ties(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    splits, tensor, heads_whole = _tensor_plan(model, config, forward)
    splits, mixer_outputs = _with_mixers(model, splits, tensor.ok)
    parents = parents_that_initialize(model, blocks)
    stages, pipeline = _stages(model, lists, ties, forward, example, parents)
    examined = ExaminedModel(model, tuple(map(tuple, lists)), forward, tensor, pipeline, TASKS[job.model.task])
    name = getattr(config, "model_type", None) or type(model).__name__
    family = family_of(name)
    is_pretrained = isinstance(model, PreTrainedModel)
    return ModelFacts(
        cast_arguments=_arguments_to_cast(model, job, example),
        unfit_dtypes={**unfit_dtypes(model, job.data.sequence_length), **family.unfit_dtypes},
        family=name,
        parameters=_count([model]),
        embedding_parameters=_embedding_parameters(model, ties, forward),
        blocks=tuple(BlockFacts(name, _count([model.get_submodule(name)])) for name in blocks),
        **_capabilities(examined),
        **_interface(model, job, example),
        **_forward_facts(job, forward),
        **_coupling(model, job, config, forward, example),
        adapters={},
        **_experts(model, config),
        ties=ties,
        layers=forward.block_calls or _number(config, LAYERS) or len(blocks),
        **_sizes(model, config, blocks, forward),
        buffers=tuple(name for name, _ in model.named_buffers()),
        stages=stages,
        parameter_shapes=shapes,
        tensor_splits=splits,
        mixer_outputs=mixer_outputs,
        heads_whole=heads_whole,
        vocabulary_parameters=vocabulary_parameters(model, forward.head),
        per_head_arguments=family.per_head_arguments,
        **_linear_facts(model, blocks, forward),
        fusible=fusible(model),
        attention_kernels=FACTORY_ATTENTION if job.model.factory else _kernel_capability(model, forward),
        sequence_parallel=sequence_capability(shapes, blocks, splits, len(lists) == 1 and forward.blocks_are_chain),
        block_traits=family.block,
        fp32_scores=family.attention is not None and family.attention.fp32_scores,
        gradient_hooks=tuple(hooks),
        whole_gradient_hooks=whole_gradient_hooks(model, hooks),
        accumulate_grad_hooks=find_accumulate_grad_hooks(model),
        definition=definition_of(model),
        parent_initialized=parents,
        **_transformers_start(model, ties),
        parameter_kinds=find_parameter_kinds(model),
        **({} if is_pretrained else _writes(forward)),
        frozen=frozenset(name for name, parameter in model.named_parameters() if not parameter.requires_grad),
    )


def _arguments_to_cast(model: nn.Module, job: Job, example: Mapping[str, Tensor] | None) -> tuple[str, ...]:
    """Return the float arguments of a user's module that it does not take in fp32 in 16 bits."""
    return arguments_to_cast(model, example) if job.model.factory is not None and example is not None else ()


def _probe(model: nn.Module, job: Job, example: Mapping[str, Tensor] | None) -> tuple[list[list[str]], ForwardProbe]:
    """Return the lists of blocks, and what a forward has shown.

    Blocks whose forward is run without calling them (SqueezeBERT's) are none: no hook runs in which ranks gather. Nor
    are those of a tower for pictures where a job has text alone (Gemma 3's). Those of towers that run stand first.
    """
    lists, length = find_block_lists(model), job.data.sequence_length
    forward = probe_forward(model, lists, length, example)
    if forward.order is None:
        return lists, forward
    calls = forward.order.calls
    called = [names for names in lists if not set(calls).isdisjoint(names)]
    is_text = isinstance(model, PreTrainedModel) and job.model.task != "image_text_to_text"
    kept = called if is_text or not called else lists
    by_end = sorted(kept, key=lambda names: calls[-1:] == names[-1:])
    if towers := towers_of(model, by_end, calls):
        return by_end, probe_forward(model, by_end, length, example, towers)
    return (lists, forward) if kept == lists else (kept, probe_forward(model, kept, length, example))


def _with_mixers(
    model: nn.Module, splits: dict[str, TensorSplit], is_split: bool
) -> tuple[dict[str, TensorSplit], dict[str, TensorSplit]]:
    """Return `splits` with mixers of states by heads or channels, and what stood in them before."""
    if not is_split or not isinstance(model, PreTrainedModel):
        return splits, {}
    mixers = mixer_splits(model)
    inside = tuple(f"{name}." for name in mixers)
    before = {name: split for name, split in splits.items() if name.startswith(inside)}
    by_heads = {name: split for own in mixers.values() for name, split in own.items()}
    return {name: split for name, split in splits.items() if name not in before} | by_heads, before


def _tensor_plan(
    model: nn.Module, config: Any, forward: ForwardProbe
) -> tuple[dict[str, TensorSplit], Capability, str]:
    """Return how modules can be split over tensor ranks, and why heads stay whole where they do.

    Heads are shared where they are counted alike in all layers, and in all of their attention. Where the plan is
    of a part, others that run, as a tower of images, have all heads: then nothing may drop, or masks would be a rank's
    own.
    """
    if forward.draws_on_activations and isinstance(model, PreTrainedModel):
        return {}, refused(f"the forward of {config.model_type} draws random numbers, others on each tensor rank"), ""
    splits, capability = tensor_plan(model)
    if getattr(config, "is_heterogeneous", False):
        capability = refused(f"the layers of {config.model_type} differ in size")
    if not isinstance(model, PreTrainedModel):
        return splits, capability, ""
    part = planned_part(model)
    heads = attention_split(splits, [name for name in forward.attention if not part or name.startswith(f"{part}.")])
    drops = forward.dropped or forward.has_attention_dropout
    if capability.ok and part and drops and _runs_beside(part, forward):
        capability = refused(
            f"the plan for {config.model_type} is of {part} alone, and elsewhere dropout has all heads"
        )
    if capability.ok and heads == "in some layers":
        capability = refused(f"the plan for {config.model_type} splits heads in some of its layers alone")
    if capability.ok:
        why = f"the plan for {config.model_type} leaves its attention whole" if heads == "nowhere" else ""
        return completed(model, splits, forward.called_linears), capability, why
    gathered = gathered_splits(model, forward.called_linears)
    if any(split.kind == "gathered" for split in gathered.values()):
        return gathered, SUPPORTED, capability.reason
    lack = forward.failure or f"its blocks call no linear layer of {FEWEST_OUTPUTS} outputs or more"
    return splits, refused(f"{capability.reason}, and {lack}"), ""


def _runs_beside(part: str, forward: ForwardProbe) -> bool:
    """Tell whether blocks or attention outside of a part of the model run, as those of a tower do for images."""
    calls = () if forward.order is None else forward.order.calls
    return any(not is_inside(name, [part]) for name in (*calls, *forward.attention))


def _transformers_start(model: nn.Module, ties: tuple[tuple[str, ...], ...]) -> dict[str, Any]:
    """Return what is known of the start of a transformers model beside its initializers."""
    if not isinstance(model, PreTrainedModel):
        return {}
    return {"constructed": unfilled_parameters(model), "tie_sources": find_tie_sources(model, ties)}


def _experts(model: nn.Module, config: Any) -> dict[str, Any]:
    """Return what is known of the experts of a model; without some, that there are none."""
    return {
        "idle_parameters": _idle_parameters(model, config),
        "experts_of_token": experts_of_token(config) or 0,
        "expert_stacks": expert_stacks(model),
        "expert_matrices": expert_matrices(model),
        "routers": find_routers(model),
        "router_biases": correction_biases(model),
        "balancing_coefficient": float(getattr(config, "router_aux_loss_coef", None) or 0.0),
        "adds_balancing_loss": _adds_balancing_loss(model),
        "experts_copied": getattr(config, "_experts_implementation", None) == BATCHED,
        "experts_grouped": computes_grouped(model),
        "experts_looped": computes_looped(model),
    }


def _adds_balancing_loss(model: nn.Module) -> bool:
    """Return whether a model would add its routers' loss to its own; one that we have built was told not to."""
    asks = isinstance(model, PreTrainedModel) and getattr(model.config, "output_router_logits", False)
    return bool(getattr(model, ADDS_LOSS, False) or asks)


def _coupling(
    model: nn.Module, job: Job, config: Any, forward: ForwardProbe, example: Mapping[str, Tensor] | None
) -> dict[str, Any]:
    """Return why rows of a microbatch may change each other's numbers; a user's module is tried for that later."""
    is_pretrained = isinstance(model, PreTrainedModel)
    norms = is_pretrained and any(isinstance(module, BATCH_NORMS) for module in model.modules())
    return {
        "drops_by_microbatch": _drops_by_microbatch(model, job, forward, example),
        "couples_rows": _takes_shares(config) or _counts_over_rows(model),
        "keeps_statistics": norms,
        "draws_numbers": is_pretrained and forward.draws_on_activations,
    }


def _counts_over_rows(model: Any) -> bool:
    """Tell whether the family's record says that rows of a microbatch change each other's numbers."""
    return isinstance(model, PreTrainedModel) and family_of(str(model.config.model_type)).couples_rows


def _takes_shares(config: Any) -> bool:
    """Tell whether the capacity of experts is a share of a microbatch's tokens, as NLLB's is."""
    return getattr(config, "moe_eval_capacity_token_fraction", None) is not None


def _drops_by_microbatch(
    model: nn.Module, job: Job, forward: ForwardProbe, example: Mapping[str, Tensor] | None
) -> bool:
    """Return whether something is dropped of what has no rows in its first dim: XLNet's hidden states, Funnel's angles.

    A model of transformers with dropout is assumed to where its forward could not be probed, and where rows have as
    many images as they like: a tower has an image in the place of a row.
    """
    if forward.order is None or job.model.task == "image_text_to_text":
        return isinstance(model, PreTrainedModel) and has_dropout(model.config)
    rows = next(map(len, example.values())) if example else ROWS
    return any(shape[0] % rows for shape in forward.dropped)


def _forward_facts(job: Job, forward: ForwardProbe) -> dict[str, Any]:
    """Return what a forward on fake tensors has shown."""
    return {
        "head": forward.head,
        "head_has_bias": forward.head_has_bias,
        "has_attention_dropout": forward.has_attention_dropout,
        "has_functional_dropout": forward.has_functional_dropout,
        "fixed_logits": forward.fixed_logits,
        "kept_logits": forward.kept_logits,
        "sample_positions": forward.positions if TASKS[job.model.task].reads_files and not forward.tokens else None,
        "drops_blocks": forward.drops_blocks,
        "blocks_share_arguments": forward.blocks_share_arguments,
        "attention_arguments": forward.attention_arguments,
        "attention": forward.attention_calls,
        "outside_reads": forward.outside_reads,
        "takes_outer_gradient": forward.takes_outer_gradient,
        "changes_numbers": bool(forward.changed_number),
        "blocks_without_gradient": forward.blocks_without_gradient,
        "activation_arguments": forward.activation_arguments,
        "probe_failure": forward.failure,
    }


def _writes(forward: ForwardProbe) -> dict[str, Any]:
    """Return what the forward of a user's module writes that it has not made."""
    return {
        "writing_blocks": forward.writing_blocks,
        "activation_writing_blocks": forward.activation_writing_blocks,
        "written_parameters": forward.written_parameters,
        "replaced_parameters": forward.replaced_parameters,
        "effects": forward.effects,
    }


def _interface(model: nn.Module, job: Job, example: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """Return what a model takes and returns; of a user's module nothing is known but that it has a loss."""
    is_pretrained = isinstance(model, PreTrainedModel)
    return {
        "takes_token_ids": is_pretrained,
        "returns_logits": is_pretrained,
        "computes_own_loss": not is_pretrained,
        "generates_text": is_pretrained,
        "has_config": is_pretrained,
        "given_labels": _given_labels(model, job, example),
        "classifies": TASKS[job.model.task].classifies,
    }


def _given_labels(model: nn.Module, job: Job, example: Mapping[str, Tensor] | None) -> str:
    """Return where labels stand that the user gives; classes are asked where the job says that there are some."""
    if not isinstance(model, PreTrainedModel):
        return SAME
    if job.model.factory is not None or job.data.factory is not None:
        return labels_of_class(model, job, example)
    return labels_of_task(model, job)


@dataclass(frozen=True)
class ExaminedModel:
    """A model and what is known of it before it is asked which axes it supports.

    Attributes:
        lists: names of the repeated blocks.
        forward: findings of its forward.
        tensor, pipeline: answers that came with the tensor splits and with the stages.
        task: the job's.
    """

    model: nn.Module
    lists: tuple[tuple[str, ...], ...]
    forward: ForwardProbe
    tensor: Capability
    pipeline: Capability
    task: ModelTask

    @property
    def blocks(self) -> tuple[str, ...]:
        """The names of all blocks."""
        return tuple(chain.from_iterable(self.lists))

    @cached_property
    def split_inputs(self) -> Capability:
        """The answer whether its inputs can be split over context ranks."""
        return _split_inputs(self)

    @cached_property
    def split_forward(self) -> tuple[SplitForward | None, str]:
        """The way in which its blocks run on rows, where its inputs cannot be split, or None and why there is none."""
        return _split_forward(self)

    @cached_property
    def position_rule(self) -> PositionRule | None:
        """The rule by which a transformers model counts positions, where it is told them; None where it has another."""
        if not isinstance(self.model, PreTrainedModel) or not takes_positions(self.model):
            return None
        return find_position_rule(self.model, self.blocks[0])


def _capabilities(examined: ExaminedModel) -> dict[str, Any]:
    """Return the answer for every axis, and what context ranks have to know of positions."""
    capabilities = {axis: answer(examined) for axis, answer in AXIS_CAPABILITIES.items()}
    rule = examined.position_rule if examined.split_inputs.ok else None
    return {
        "capabilities": capabilities,
        "padding_position": None if rule is None else rule.padding,
        "split_forward": examined.split_forward[0],
        "documents_apart": _isolation_capability(examined),
    }


def _isolation_capability(examined: ExaminedModel) -> Capability:
    mixes = examined.forward.mixes_positions
    return isolation_capability(examined.model, examined.split_inputs, examined.split_forward[0], mixes)


def _any_model(examined: ExaminedModel) -> Capability:
    return SUPPORTED


def _context_capability(examined: ExaminedModel) -> Capability:
    if examined.split_inputs.ok or examined.split_forward[0] is not None:
        return SUPPORTED
    return refused(examined.split_forward[1] or examined.split_inputs.reason)


def _split_inputs(examined: ExaminedModel) -> Capability:
    if examined.task.whole_sequences:
        return refused(examined.task.whole_sequences)
    forward = examined.forward
    capability = context_capability(
        examined.model,
        examined.blocks,
        forward.attention,
        forward.mixes_positions,
        forward.failure,
        forward.attention_arguments,
    )
    if capability.ok and takes_positions(examined.model) and examined.position_rule is None:
        return refused("it counts positions by a rule of its own, or looks at whole sequences ahead of its blocks")
    if capability.ok and forward.draws_on_activations:
        return refused("its forward draws random numbers for all tokens of a microbatch together")
    return capability


def _split_forward(examined: ExaminedModel) -> tuple[SplitForward | None, str]:
    forward, model = examined.forward, examined.model
    if examined.split_inputs.ok or forward.failure or not isinstance(model, PreTrainedModel):
        return None, ""
    if examined.task.whole_sequences:
        return None, examined.task.whole_sequences
    if forward.draws_on_activations:
        return None, "its forward draws random numbers for all tokens of a microbatch together"
    if _takes_shares(model.config):
        return None, "its experts take a share of a microbatch's tokens"
    return find_split_forward(model, examined.lists, _number(model.config.get_text_config(), POSITIONS))


AXIS_CAPABILITIES: dict[Axis, Callable[[ExaminedModel], Capability]] = {
    Axis.REPLICA: _any_model,
    Axis.SHARD: _any_model,
    Axis.CONTEXT: _context_capability,
    Axis.TENSOR: lambda examined: examined.tensor,
    Axis.PIPELINE: lambda examined: examined.pipeline,
    Axis.EXPERT: lambda examined: expert_capability(examined.model, examined.blocks),
}


def _kernel_capability(model: nn.Module, forward: ForwardProbe) -> Capability:
    return kernel_capability(model, len(forward.attention_calls), forward.attention_arguments, forward.failure)


def _linear_facts(model: nn.Module, blocks: Iterable[str], forward: ForwardProbe) -> dict[str, Any]:
    """Return what is known of plain linear layers."""
    linears = _linears(model, blocks)
    return {
        "linears": {name: sizes for name, sizes in linears.items() if name not in forward.read_linears},
        "read_linears": forward.read_linears,
        "transposed_linears": frozenset(name for name, module in model.named_modules() if type(module) is Conv1D),
    }


def _linears(model: nn.Module, blocks: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Return (inputs, outputs) of plain linear layers inside of blocks, not of classes with a forward of their own."""
    linears = {}
    for block in blocks:
        for name, module in model.get_submodule(block).named_modules(prefix=block):
            if type(module) is nn.Linear:
                linears[name] = (module.in_features, module.out_features)
            elif type(module) is Conv1D:
                linears[name] = (module.nx, module.nf)
    return linears


def _stages(
    model: nn.Module,
    lists: list[list[str]],
    ties: tuple[tuple[str, ...], ...],
    forward: ForwardProbe,
    example: Mapping[str, Tensor] | None,
    parents: Mapping[str, Sequence[str]],
) -> tuple[StageFacts, Capability]:
    """Return how the model is cut into stages, and whether it can be."""
    if forward.order is None:
        return StageFacts(), unless(forward.failure)
    stages, capability = stage_facts(
        model, lists, ties, forward.order, forward.blocks_are_chain, forward.handed_on, forward.joined_blocks
    )
    stages = replace(stages, reshapes=isinstance(model, PreTrainedModel) and _reshapes(model, forward))
    obstacle = next(_stage_obstacles(model, lists, forward, parents, capability.ok), "")
    if obstacle:
        return StageFacts(order=forward.order.call_names), refused(obstacle)
    if stages.encoder:  # MVP adds to what its head returns
        example = token_inputs(model, LENGTH)
    elif isinstance(model, PreTrainedModel):
        failure = reads_absent_weights(model, lists[-1], stages, example) if capability.ok else ""
        if not failure:
            return stages, capability
        reason = f"its forward reads weights outside of its blocks, which other stages do not hold: {failure}"
        return StageFacts(order=forward.order.call_names), refused(reason)
    if not capability.ok or example is None:
        return replace(stages, hidden=()), capability  # it was shown tokens of some length, and takes any
    blocks = [name for names in lists for name in names]
    return replace(stages, order=forward.order.call_names), rehearse_stage(model, blocks, stages, example)


def _reshapes(model: nn.Module, forward: ForwardProbe) -> bool:
    """Tell whether blocks hand on other hidden states than [B, S, H], of tokens or of patches."""
    shape, hidden = forward.handed_shape, _number(_text_config(model), HIDDEN)
    return len(shape) != 3 or shape[1] != (forward.tokens or shape[1]) or shape[2] != (hidden or shape[2])


# --- blocks ----------------------------------------------------------------------------------------------------------


def _stage_obstacles(
    model: nn.Module,
    lists: list[list[str]],
    forward: ForwardProbe,
    parents: Mapping[str, Sequence[str]],
    can_be_cut: bool,
) -> Iterator[str]:
    """Yield what is in the way of stages; of a model that cannot be cut anyway, what no other cut would mend."""
    is_users = not isinstance(model, PreTrainedModel)
    own = definition_of(model)
    if forward.draws_process_numbers and is_users:
        yield f"{own} draws numbers from Python's or NumPy's generator, and each stage its own"
    if forward.blocks_without_gradient and is_users:
        yield f"{own} runs its blocks where gradients are off; checkpoint with use_reentrant=False"
    if not can_be_cut:
        return
    compiled = next((name for names in lists for name in names if is_compiled(model.get_submodule(name))), None)
    if compiled is not None:
        yield f"{compiled} is compiled by torch.compile, which keeps the layers that a stage leaves out"
    if forward.takes_outer_gradient:
        yield f"{own} takes a gradient through its blocks"
    if forward.outside_reads:
        name = forward.outside_reads[0]
        yield f"{own} reads {name} outside of the module that owns it, which another stage may hold"
    inside = tuple(f"{name}." for names in lists for name in names)
    reaching = next((parent for parent in parents if any(name.startswith(inside) for name in parents[parent])), None)
    if reaching is not None:  # a stage has nothing of other stages' blocks that could be filled
        yield f"the initializer of {definition_of(model.get_submodule(reaching))} fills parameters of its blocks"
    changing = forward.writing_blocks + forward.container_changing_blocks
    if changing and is_users:
        block = definition_of(model.get_submodule(changing[0]))
        yield f"{block} changes what it is given, in place, which blocks on other stages would not see"
    if forward.changed_number:
        yield f"{forward.changed_number}, which other stages would not see"


def find_block_lists(model: nn.Module) -> list[list[str]]:
    """Return the module names of the repeated blocks, one list for each container that holds such, in module order."""
    containers = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            children = _repeated_children(module)
            containers[name] = {f"{name}.{key}" if name else key: child for key, child in children.items()}
    containers = {name: children for name, children in containers.items() if _count(children.values())}
    # Blocks are modules of modules; a list of bare layers (heads, codebooks) counts only where there is nothing better.
    composite = {name: children for name, children in containers.items() if _are_composite(children.values())}
    bare = {name: children for name, children in containers.items() if len(children) > 1}
    lists = _outermost(composite or bare)
    heaviest = max((_count(children.values()) for children in lists.values()), default=0)
    heavy = [children for children in lists.values() if _count(children.values()) >= SMALLEST_LIST * heaviest]
    return [[name for block in children.items() for name in _called_modules(*block)] for children in heavy]


def _called_modules(name: str, block: nn.Module) -> list[str]:
    """Return the block's name, or for a bare list, or a bare `nn.Module`, the names of what is in it.

    A model of `for attend, feed in layers` never calls the lists, so that nothing can be done around them.
    """
    if not isinstance(block, (nn.ModuleList, nn.ModuleDict)) and type(block) is not nn.Module:
        return [name] if _count([block]) else []
    return [inner for key, child in block.named_children() for inner in _called_modules(f"{name}.{key}", child)]


def _repeated_children(container: nn.Module) -> dict[str, nn.Module]:
    """Return the children that repeat: all of them, or in a sequence of other things the longest run of one class."""
    children = dict(container.named_children())
    classes = [type(child) for child in children.values()]
    if _is_repeated(children.values()):
        return children
    # Hybrids (attention beside state-space layers) keep several classes in one list, each more than once.
    if isinstance(container, nn.ModuleList) and len(set(classes)) < len(classes) and _are_composite(children.values()):
        return children
    if not isinstance(container, nn.Sequential):
        return {}
    runs = [dict(run) for _, run in groupby(children.items(), key=lambda item: type(item[1]))]
    longest = max(runs, key=lambda run: len(run), default={})
    return longest if len(longest) > 1 and _are_composite(longest.values()) and _is_repeated(longest.values()) else {}


def _is_repeated(children: Collection[nn.Module]) -> bool:
    """Tell whether all are of one class and mostly share their parameter names."""
    if len({type(child) for child in children}) != 1:
        return False
    names = [{name for name, _ in child.named_parameters(remove_duplicate=False)} for child in children]
    counts = Counter(name for child_names in names for name in child_names)
    common = {name for name, count in counts.items() if count > len(names) / 2}
    return bool(common) and all(
        len(child_names & common) >= SIMILAR_NAMES * len(child_names | common) for child_names in names
    )


def _are_composite(children: Iterable[nn.Module]) -> bool:
    return all(any(child.children()) for child in children)


def _outermost(lists: dict[str, dict[str, nn.Module]]) -> dict[str, dict[str, nn.Module]]:
    """Drop lists inside another one's blocks; a list of one that merely wraps a longer list gives way to it."""

    kept = {
        name: children
        for name, children in lists.items()
        if len(children) > 1 or not any(is_inside(inner, children) and len(lists[inner]) > 1 for inner in lists)
    }
    return {
        name: children for name, children in kept.items() if not any(is_inside(name, outer) for outer in kept.values())
    }


# --- parameters ------------------------------------------------------------------------------------------------------


def find_ties(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that are one parameter, the first name of `named_parameters()` first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def find_tie_sources(model: PreTrainedModel, ties: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    """Return first name of a tie -> the name whose tensor the others are set to; those where it is another name."""
    targets = set(model.all_tied_weights_keys)
    sources = {group[0]: [name for name in group if name not in targets] for group in ties}
    return {first: names[0] for first, names in sources.items() if len(names) == 1 and names[0] != first}


def _embedding_parameters(model: nn.Module, ties: tuple[tuple[str, ...], ...], forward: ForwardProbe) -> int:
    """Return how many elements are only looked up: owned by embeddings alone, and read by no matrix product."""
    owners: dict[str, list[nn.Module]] = {}
    first = {name: group[0] for group in ties for name in group}
    sizes = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = first.get(name, name)
        owners.setdefault(key, []).append(model.get_submodule(name.rpartition(".")[0]))
        sizes[key] = parameter.numel()
    return sum(
        sizes[name]
        for name, modules in owners.items()
        if name not in forward.matrix_parameters
        and all(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in modules)
    )


def _count(modules: Iterable[nn.Module]) -> int:
    """Return the elements of all parameters of `modules`, each parameter once."""
    return sum({id(p): p.numel() for module in modules for p in module.parameters()}.values())


# --- sizes -----------------------------------------------------------------------------------------------------------


def _text_config(model: nn.Module) -> Any:
    """Return the config that describes the language model (a part of the config of a multi-modal model), or None."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _sizes(model: nn.Module, config: Any, blocks: list[str], forward: ForwardProbe) -> dict[str, Any]:
    """Return the size fields of ModelFacts: what the config says, else what the shapes tell, else 0."""
    block = model.get_submodule(blocks[0]) if blocks else None
    embedding = max(_embeddings(model), key=lambda module: module.weight.numel(), default=None)
    hidden = _number(config, HIDDEN) or _observed_width(forward) or _width(block, embedding)
    heads = _number(config, HEADS) or 0
    return {
        "hidden_size": hidden,
        "attention_heads": heads,
        "key_value_heads": _key_value_heads(config, heads),
        "head_size": _head_size(config, forward) or (hidden // heads if heads else 0),
        "latent": _latent(config),
        "intermediate_size": _number(config, INTERMEDIATE) or _intermediate(block, hidden),
        "vocabulary_size": _number(config, VOCABULARY) or (embedding.num_embeddings if embedding is not None else 0),
        "max_positions": _max_positions(model, config),
        "sliding_window": _number(config, ("sliding_window",)),
    }


def _head_size(config: Any, forward: ForwardProbe) -> int:
    """Return the size of the first call of attention, else what the config says, else 0."""
    for call in forward.attention_calls:
        return (call.head_size + call.value_size) // 2
    return _number(config, HEAD_SIZE) or 0


def _latent(config: Any) -> LatentAttention | None:
    """Return the sizes of latent attention; None where the config has no rank of keys and values."""
    query, key_value, plain, rotary, value = (_number(config, (name,)) or 0 for name in LATENT)
    return LatentAttention(query, key_value, plain, rotary, value) if key_value and value else None


def _number(config: Any, names: Iterable[str]) -> int | None:
    """Return the first of `names` that the config has as a positive integer."""
    values = (largest_value(config, name) for name in names)
    return next(
        (value for value in values if isinstance(value, int) and not isinstance(value, bool) and value > 0), None
    )


def _embeddings(model: nn.Module) -> list[nn.Embedding]:
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


def _key_value_heads(config: Any, heads: int) -> int:
    # One key-value head, whatever num_kv_heads says, except in the newer kind of layer that a config may ask for.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    return _number(config, KEY_VALUE_HEADS) or heads


def _observed_width(forward: ForwardProbe) -> int:
    """Return the width of the hidden states [B, S, H] that all blocks have returned; 0 where they are others."""
    shapes = [] if forward.order is None else [*forward.order.hidden]
    return shapes[0][-1] if len(shapes) == 1 and len(shapes[0]) == 3 else 0


def _width(block: nn.Module | None, embedding: nn.Embedding | None) -> int:
    """Return the commonest length of a block's vectors (norms and output biases), else the width of the embedding."""
    lengths = Counter(p.shape[0] for p in block.parameters() if p.dim() == 1) if block is not None else Counter()
    if lengths:
        return lengths.most_common(1)[0][0]
    return embedding.embedding_dim if embedding is not None else 0


def _intermediate(block: nn.Module | None, hidden: int) -> int:
    """Return the widest m that a block goes to and comes back from: it has weights [m, hidden] and [hidden, m]."""
    if block is None:
        return 0
    shapes = {tuple(parameter.shape) for parameter in block.parameters() if parameter.dim() == 2}
    return max((rows for rows, columns in shapes if columns == hidden != rows and (hidden, rows) in shapes), default=0)


def experts_of_token(config: Any) -> int | None:
    """Return to how many experts a token goes; DBRX says it of its MLPs."""
    return _number(config, EXPERTS_OF_TOKEN) or _number(getattr(config, "ffn_config", None), EXPERTS_OF_TOKEN)


def _idle_parameters(model: nn.Module, config: Any) -> int:
    """Return how many parameters of stacked experts a token does not go through."""
    chosen = experts_of_token(config)
    if chosen is None:
        return 0
    idle = 0
    for module in filter(holds_experts, model.modules()):
        number = getattr(module, NUMBER, None) or max(map(len, module.parameters()), default=1)
        idle += _count([module]) // number * max(0, number - chosen)
    return idle


def _max_positions(model: nn.Module, config: Any) -> int | None:
    """Return the longest sequence; a position table with a padding row starts counting behind it."""
    positions = _number(config, POSITIONS)
    if positions is None:
        return None
    words = input_embeddings(model) if isinstance(model, PreTrainedModel) else None
    tables = [module for module in _embeddings(model) if module.num_embeddings == positions and module is not words]
    padding = [module.padding_idx for module in tables if module.padding_idx is not None]
    return positions - padding[0] - 1 if padding else positions
