"""Rules about the model: where it comes from, and what a module of `model.factory` leaves no room for."""

from __future__ import annotations

from shardwise.plan.draft import Draft, changed
from shardwise.plan.rules.checkpointing import no_checkpointing
from shardwise.plan.rules.parallel import SPLITTING_KEYS
from shardwise.plan.rules.rule import Rule, idle

SOURCES = ("model.path", "model.config", "model.factory")


def model_from_factory(d: Draft) -> bool:
    """Return whether the model is a module of `model.factory`."""
    return d.model.factory is not None


def _config_beside_path(d: Draft) -> bool:
    """Return whether fields of a config stand on top of those of a model directory."""
    return d.model.path is not None and isinstance(d.model.config, dict) and not model_from_factory(d)


def _is_users_module(d: Draft) -> bool:
    """Return whether the model's code is the user's: a factory's, or that of a script without a config."""
    return model_from_factory(d) or not d.facts.has_config


def _sums_gradients(d: Draft) -> bool:
    """Return whether ranks reduce the gradients of a parameter that they share."""
    return d.data_axis > 1 or d.parallel.tensor_parallel_degree > 1


def _makes_parameters_anew(d: Draft) -> bool:
    return d.world.size > 1 or d.compute not in ("fp32", "fp64") or d.memory.offload_parameters


def _names_statistics(d: Draft) -> bool:
    return "running_statistics" in d.job.model.model_fields_set


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("one-model", SOURCES, "a model comes from at most one of them (none: the embedded default), but for fields of "
         "a config beside a path",
         lambda d: len(changed(d.job, *SOURCES)) > 1 and not _config_beside_path(d),
         fix="keep one, or give model.config as a mapping of fields beside model.path"),
    idle("model-loss", "model.loss", "only a module of model.factory takes its loss from the job",
          lambda d: not model_from_factory(d), "set model.factory or leave it out"),
    idle("model-factory-arguments", "model.factory_arguments", "there is no model.factory to take them",
          lambda d: not model_from_factory(d), "set model.factory or leave it out"),
    Rule("read-statistics", ("model.running_statistics",),
         "buffers that a forward changes and reads depend on the microbatches that its rank has run before",
         lambda d: d.facts.reads_statistics and d.data_ranks > 1 and not _names_statistics(d),
         fix="set model.running_statistics yourself, which says how ranks that differ within a step agree after it, or "
         "use one data rank",
         because=lambda d: f"{d.facts.definition} reads, in training, buffers that its forward changes (power "
         f"iterations, moving averages), and within a step each of {d.data_ranks} data ranks changes its own"),
    idle("running-statistics", "model.running_statistics", "they are buffers, and this model has none",
          lambda d: not d.facts.buffers),
    idle("model-weights", "model.weights", "only a module of model.factory reads a file of weights",
          lambda d: not model_from_factory(d), "set model.factory, or model.path for a Hugging Face directory"),
    Rule("classes-data", ("model.task", "data.factory"), "labels that are classes come from a data.factory",
         lambda d: d.task.samples == "factory" and not model_from_factory(d) and d.data.factory is None,
         fix="set data.factory to a map-style dataset with input_ids and labels"),
    Rule("classes-context", ("model.task", "parallel.context_parallel_degree"),
         "a head of classes reads whole sequences",
         lambda d: d.task.classifies and d.parallel.context_parallel_degree > 1,
         fix="use context_parallel_degree 1"),
    Rule("classes-samples", ("model.task", "training.loss_reduction"),
         "each sample has one label, so that both are one mean",
         lambda d: d.task.classifies and d.model.task != "token_classification"
         and d.training.loss_reduction == "sample",
         fix="use loss_reduction token"),
    idle("labels", "model.labels", "only tasks of classification have classes",
         lambda d: not d.task.classifies),
    idle("factory-task", "model.task", "a module of model.factory brings its own head and loss",
          model_from_factory, "use causal_lm (which a factory ignores), or model.config"),
    idle("remote-code", "model.trust_remote_code", "only a model.path or model.config can bring code of its own",
          lambda d: d.model.path is None and d.model.config is None),
    Rule("layer-drop", SPLITTING_KEYS, "all ranks have to run the same blocks",
         lambda d: d.facts.drops_blocks and d.world.size > 1,
         fix="set the layerdrop fields of the model's config to 0, or use one rank",
         because=lambda d: f"{d.facts.family} drops blocks at random (LayerDrop), and each rank would drop others"),
    Rule("gradient-hooks", ("training.gradient_accumulation", "precision.compute"),
         "a hook on a gradient that does more than scale it is given that of one microbatch, not scaled in turn",
         lambda d: d.facts.whole_gradient_hooks and (d.accumulation.value > 1 or d.compute == "fp16"),
         fix="use one microbatch on each rank (training.microbatch_size) and another dtype than fp16, or a hook that "
         "scales or masks",
         because=lambda d: f"the hook on {d.facts.whole_gradient_hooks[0]} of {d.facts.definition} does more than "
         f"scale or mask its gradient, and a step has {d.accumulation.value} microbatches on each rank, in "
         f"{d.compute}"),
    Rule("accumulate-grad-hooks",
         ("parallel.workers", "training.gradient_accumulation", "precision.compute", "memory.offload_parameters"),
         "a hook of register_post_accumulate_grad_hook is called where one rank has all of a gradient at once",
         lambda d: d.facts.accumulate_grad_hooks and (_makes_parameters_anew(d) or d.accumulation.value > 1),
         fix="use one worker, one microbatch (training.microbatch_size), precision.compute fp32 or fp64 and no "
         "offload_parameters, or register_hook",
         because=lambda d: f"{d.facts.accumulate_grad_hooks[0]} of {d.facts.definition} has a hook of "
         "register_post_accumulate_grad_hook, which would see a part of its gradient: ranks share parameters or "
         f"samples, a step has {d.accumulation.value} microbatches, or parameters are gathered in another dtype or "
         "from the host"),
    Rule("written-activations", ("parallel.workers", "precision.compute", "memory.offload_parameters"),
         "FSDP2 lets no block write into what was made from weights outside of it",
         lambda d: d.facts.activation_writing_blocks and _makes_parameters_anew(d),
         fix="let the block make a new tensor (h = h * 2, not h *= 2), or use one worker, precision.compute fp32 or "
         "fp64 and no offload_parameters",
         because=lambda d: f"{d.facts.activation_writing_blocks[0]} of {d.facts.definition} writes into a tensor that "
         "it is given and that was made from weights"),
    Rule("max-norm", ("parallel.workers", "precision.compute", "memory.offload_parameters"),
         "an embedding with max_norm writes its weight in forward, and what is written into a gathered copy is lost",
         lambda d: d.facts.parameter_kinds.bounded and _makes_parameters_anew(d),
         fix="scale rows in a callback after the step, or use one worker, precision.compute fp32 or fp64 and no "
         "offload_parameters",
         because=lambda d: f"{d.facts.parameter_kinds.bounded[0]} of {d.facts.definition} has max_norm"),
    Rule("written-parameters", ("parallel.workers", "precision.compute", "memory.offload_parameters"),
         "what a forward writes into a gathered copy of a parameter is lost",
         lambda d: d.facts.written_parameters and _makes_parameters_anew(d),
         fix="keep what the forward writes in a buffer, change the parameter in a callback after the step, or use one "
         "worker, precision.compute fp32 or fp64 and no offload_parameters",
         because=lambda d: f"the forward of {d.facts.definition} writes the parameter {d.facts.written_parameters[0]}"),
    Rule("replaced-parameters", ("model.factory",),
         "the optimizer and what is saved have the parameters with which a module was built",
         lambda d: d.facts.replaced_parameters and _is_users_module(d),
         fix="let the forward keep what it makes in a buffer, or change the parameter in a callback after the step",
         because=lambda d: f"the forward of {d.facts.definition} puts a new one in place of the parameter "
         f"{d.facts.replaced_parameters[0]}"),
    Rule("refrozen-parameters", ("parallel.workers", "precision.compute", "memory.offload_parameters"),
         "what is sharded and reduced is fixed at the start",
         lambda d: d.facts.effects.refrozen and _makes_parameters_anew(d),
         fix="freeze it at the start (model.freeze, or requires_grad_ in the constructor), mask its gradient by "
         "register_hook, or use one worker, precision.compute fp32 or fp64 and no offload_parameters",
         because=lambda d: f"the forward of {d.facts.definition} freezes or unfreezes the parameter "
         f"{d.facts.effects.refrozen[0]}"),
    Rule("late-hooks", ("parallel.workers", "training.gradient_accumulation", "precision.compute",
                        "memory.offload_parameters"),
         "hooks on gradients are known at the start, so that each is called once a step with the whole gradient",
         lambda d: d.facts.effects.hooked and (_makes_parameters_anew(d) or d.accumulation.value > 1),
         fix="call register_hook in the constructor",
         because=lambda d: f"the forward of {d.facts.definition} puts a hook on the gradient of "
         f"{d.facts.effects.hooked[0]}"),
    Rule("state-in-forward", ("parallel.workers", "precision.compute", "memory.offload_parameters"),
         "FSDP2 gives a state dict of sharded parameters, and shards those that are gathered",
         lambda d: d.facts.effects.saves_state and _makes_parameters_anew(d),
         fix="read the parameters themselves (get_parameter, named_parameters), or use one worker, precision.compute "
         "fp32 or fp64 and no offload_parameters",
         because=lambda d: f"the forward of {d.facts.definition} calls state_dict"),
    Rule("marked-tensors", ("parallel.workers", "precision.compute", "memory.offload_parameters",
                            "memory.activation_checkpointing"),
         "FSDP2, checkpointing and stages hand on tensors made anew, which have no attributes",
         lambda d: d.facts.effects.marking_block and (_makes_parameters_anew(d) or not no_checkpointing(d)),
         fix="return the value beside the tensor, or use one worker, precision.compute fp32 or fp64, no "
         "offload_parameters and no activation_checkpointing",
         because=lambda d: f"{d.facts.effects.marking_block} of {d.facts.definition} returns a tensor with attributes"),
    Rule("global-tensors", ("parallel.workers", "precision.compute", "memory.offload_parameters"),
         "backward finds the parameters gathered where it comes by what a block returned, or keeps on itself or in "
         "arguments",
         lambda d: d.facts.effects.global_tensor and _makes_parameters_anew(d),
         fix="hand a list to the blocks, keep the tensor on the block, or use one worker, precision.compute fp32 or "
         "fp64 and no offload_parameters",
         because=lambda d: f"a block of {d.facts.definition} leaves a tensor with a gradient in "
         f"{d.facts.effects.global_tensor}"),
    Rule("derived-attributes", ("model.factory",),
         "parameters get their values after the constructor, and what was made from them before has none",
         lambda d: d.facts.parameter_kinds.derived and _is_users_module(d),
         fix="compute it in forward, or register a buffer of a clone",
         because=lambda d: f"{d.facts.parameter_kinds.derived[0]} of {d.facts.definition} keeps a tensor made from "
         "parameters"),
    Rule("overlapping-parameters", ("model.factory",),
         "each parameter and buffer gets memory of its own",
         lambda d: d.facts.parameter_kinds.overlapping and _is_users_module(d),
         fix="tie parameters by assigning the parameter itself (head.weight = embedding.weight), and clone what a "
         "buffer keeps",
         because=lambda d: "{} and {} of {} share memory".format(*d.facts.parameter_kinds.overlapping[0],
                                                                 d.facts.definition)),
    Rule("complex-parameters", ("parallel.workers", "precision.compute", "memory.offload_parameters"),
         "complex parameters keep their dtype, and FSDP2 shards real ones alone",
         lambda d: d.facts.parameter_kinds.complex and _makes_parameters_anew(d),
         fix="keep real and imaginary parts in a real parameter (torch.view_as_complex in forward), or use one worker, "
         "precision.compute fp32 or fp64 and no offload_parameters",
         because=lambda d: f"{d.facts.parameter_kinds.complex[0]} of {d.facts.definition} is complex"),
    Rule("stored-dtypes", ("model.factory",), "a checkpoint holds tensors of safetensors' dtypes, none in float8",
         lambda d: d.facts.parameter_kinds.unstored,
         fix="use another dtype, or persistent=False for a buffer that the constructor makes",
         because=lambda d: "{0} of {2} is of {1}".format(*d.facts.parameter_kinds.unstored[0], d.facts.definition)),
    Rule("sparse-gradients", ("model.factory",),
         "optimizers, the gradient norm and reductions take dense gradients",
         lambda d: d.facts.parameter_kinds.sparse and (model_from_factory(d) or _sums_gradients(d)),
         fix="build the embedding with sparse=False",
         because=lambda d: f"{d.facts.parameter_kinds.sparse[0]} of {d.facts.definition} has sparse gradients"),
    Rule("parameter-classes", ("model.factory",), "a parameter is made anew when it gets its storage, as a plain one",
         lambda d: d.facts.parameter_kinds.subclassed and _is_users_module(d),
         fix="use nn.Parameter; attributes that are set on it are kept",
         because=lambda d: f"{d.facts.parameter_kinds.subclassed[0]} of {d.facts.definition} is of a class of its own"),
    Rule("listed-parameters", ("model.factory",),
         "parameters are made anew when they get their storage, and what is kept of them elsewhere is not",
         lambda d: d.facts.parameter_kinds.listed and _is_users_module(d),
         fix="keep them in an nn.ParameterList (modules in an nn.ModuleList), or read them from their module in "
         "forward",
         because=lambda d: f"{d.facts.parameter_kinds.listed[0]} of {d.facts.definition} keeps parameters"),
    Rule("written-arguments", ("memory.activation_checkpointing",),
         "a checkpointed block runs twice, and would start from what it has written",
         lambda d: d.facts.writing_blocks and not no_checkpointing(d),
         fix="let the block make a new tensor, or use none",
         because=lambda d: f"{d.facts.writing_blocks[0]} of {d.facts.definition} writes into a tensor that it is "
         "given"),
)
# fmt: on
