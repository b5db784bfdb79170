"""The oracle: the same training in one process with nothing of ours in it, to which `shardwise verify` compares.

The model is the untouched one of transformers (or the user's), built whole on the CPU; gradients are torch autograd's
of cross-entropy on whole logits; the update is torch.optim's default implementation, or a plain one of the oracle's
own, after torch's own clipping. Data, masking, dropout, weight-decay groups and schedule are written again from their
definitions. Nothing is imported from parallel, kernels, collectives or training (a test looks), so that one mistake
cannot stand on both sides.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from shardwise._torch_compat.autograd import backward_under_modes
from shardwise.data.batch import Batch, can_be_ignored
from shardwise.job.objects import load_object
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.optimizers import optimizer_class
from shardwise.job.schema import Job
from shardwise.job.tasks import TASKS
from shardwise.model.adapter_config import adapter_settings
from shardwise.model.build import load_config
from shardwise.model.construct import drawing_from
from shardwise.model.replacements import mend_batch_norms
from shardwise.testing.comparison import in_double
from shardwise.testing.oracle_adapters import adapt, scaled_twice
from shardwise.testing.oracle_data import NOT_COUNTED, FactorySource, Rows, Source, shortened
from shardwise.testing.oracle_draws import OracleDraws
from shardwise.testing.oracle_dropout import OracleDropout
from shardwise.testing.oracle_muon import Muon, Several, is_hidden, projections
from shardwise.testing.oracle_optimizers import PLAIN, ScheduleFreeAdamW
from shardwise.testing.oracle_preference import preference_loss
from shardwise.testing.oracle_routers import RouterReference
from shardwise.testing.start_check import distributions
from shardwise.testing.widening import WithoutNarrowing, needs_fp32_weights

FORWARD_TOKENS = 4096  # of one forward; more would only cost memory
# Weights, optimizer state, and the biases of routers.
Snapshot = tuple[dict[str, Tensor], dict[str, Any], dict[str, Tensor]]
BALANCING = "load_balancing_loss_func"  # a function in the files of models with experts
ALIBI = "build_alibi_tensor"  # a function in the files of Bloom and Falcon


@dataclass(frozen=True)
class Twist:
    """A deliberate departure from the right computation, for finding out which mistake the other side makes.

    Attributes:
        shift_labels: positions by which labels stand too late.
        leak_documents: attention crosses documents.
        dropout_step: the step whose masks dropout has.
        no_dropout, no_z_loss, no_smoothing: what is left out.
        local_rows: size of the microbatches in which dropout numbers rows.
        scales_adapters_twice: the product of adapters.
        balancing: factor of the routers' balancing loss.
        balanced_apart: groups of samples, each with a balancing loss of its own; they are summed.
        reference_moves: the reference model of a preference loss is the one that is trained, as it is now.
    """

    shift_labels: int = 0
    leak_documents: bool = False
    dropout_step: int | None = None
    no_dropout: bool = False
    local_rows: int | None = None
    no_z_loss: bool = False
    no_smoothing: bool = False
    scales_adapters_twice: bool = False
    balancing: float = 1.0
    balanced_apart: tuple[tuple[int, ...], ...] = ()
    reference_moves: bool = False


@dataclass(frozen=True)
class UpdateTwist:
    """The same for the update.

    Attributes:
        clips: power of the clip factor.
        decay_all, decay_none: weight decay on all tensors or on none.
        couples_decay: weight decay is added to the gradient.
        eps: of the optimizer, instead of its own.
        counted: steps that its counter is ahead.
        forgets: it has no state of the steps before.
        repeats: how often it steps.
    """

    clips: int = 1
    decay_all: bool = False
    decay_none: bool = False
    couples_decay: bool = False
    eps: float | None = None
    counted: int = 0
    forgets: bool = False
    repeats: int = 1


@dataclass
class Oracle:
    """One process that trains `job` from `weights`.

    Args:
        job: the job; its parallel, memory and observe sections play no part.
        weights: logical name -> whole tensor; copied.
        source: the training samples.
        sequences_per_step: global, behind the stages of training.batch_size_schedule.
        steps: of the run, over which the learning rate is scheduled.
        samples: of the run, where the last step holds what is left of them; None: all steps are whole.
        blocks: names of the modules, repeated blocks above all, by which functional dropout is keyed.
        eager: the model runs its eager attention; else what the job names, if the model has it, or its default.
        master, compute: dtypes of the weights that the optimizer updates and of forward and backward.
        rows_together: samples of each forward, in their order, where rows change each other's numbers.
        draws: a user's module draws random numbers by itself: each module in it from a seed of its own, or all
            from one.
    """

    job: Job
    weights: Mapping[str, Tensor]
    source: Source
    sequences_per_step: int
    steps: int
    samples: int | None = None
    blocks: Sequence[str] = ()
    eager: bool = False
    master: torch.dtype = torch.float64
    compute: torch.dtype = torch.float64
    rows_together: int | None = None
    draws: Literal["by module", "together"] | None = None
    gradients: dict[str, Tensor] = field(default_factory=dict, init=False)
    _router_logits: Sequence[Tensor] = field(default=(), init=False)  # of the forward that ran last, layer by layer
    narrows_logits: bool = field(default=False, init=False)  # the model makes them in fp32 whatever its own dtype is
    used: set[str] = field(default_factory=set, init=False)  # parameters that the last backward reached
    averages: dict[str, Tensor] = field(default_factory=dict, init=False)  # of trained weights (EMA)

    def __post_init__(self) -> None:
        with drawing_from(self.job.training.seed):  # what a constructor draws and keeps beside parameters and buffers
            built = _build(self.job, self.eager)
        self.model = _wide(adapt(built, adapter_settings(self.job.adapter), self.weights), self.master)
        self._widens = needs_fp32_weights(self.model)
        owners: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(name)
        self.ties = [names for names in owners.values() if len(names) > 1]
        self.routers = RouterReference(self.job, self.model)
        self.dropout = OracleDropout(self.model, self.blocks, self.job.training.seed)
        by_module = self.draws == "by module"
        self.drawn = OracleDraws(self.model, self.blocks, self.job.training.seed, by_module) if self.draws else None
        live = dict(self.model.named_parameters())
        trained = _is_trained(self.job)
        for names in [[name] for name in live] + self.ties:
            live[names[0]].requires_grad_(all(map(trained, names)) and live[names[0]].requires_grad)
        self.plain = distributions(live)
        self.plain_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with torch.no_grad():
            for name, parameter in live.items():
                parameter.copy_(self.weights[name])
        self.parameters = live
        if self.compute != self.master:
            self.parameters = {name: nn.Parameter(p.detach().clone()) for name, p in live.items()}
            for parameter in live.values():
                _convert(parameter, self.compute)
        self.live = live
        self.reference = self._reference() if self.job.reads_pairs else None
        self.weights = {}
        self.optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Return the job's optimizer, or several where parameters have others."""
        settings, trained = self.job.optimizer, {name: p.requires_grad for name, p in self.live.items()}
        names: dict[str, list[str]] = {name: [name] for name in self.parameters} | {tied[0]: tied for tied in self.ties}
        settings_of = {name: _own_settings(settings, self.model, names[name]) for name in self.parameters}
        members: dict[str, list[str]] = {}
        for name, own in settings_of.items():
            kind = f"{own['name']} {own['options']}" if trained[name] else next(iter(members), "")
            members.setdefault(kind, []).append(name)
        places = {name: place for place, name in enumerate(self.parameters)}
        made = [
            (self._member([(name, settings_of[name]) for name in own]), [places[name] for name in own])
            for own in members.values()
        ]
        return made[0][0] if len(made) == 1 else Several(made)

    def _member(self, members: Sequence[tuple[str, Mapping[str, Any]]]) -> torch.optim.Optimizer:
        """Return one optimizer in its plain loop over tensors; weight decay for matrices only.

        Every tensor is a group of its own, with its `decay` before biases are left out, and its `share` of the job's
        rate.
        """
        settings, (_, first) = self.job.optimizer, next(pair for pair in members)
        made: Any = PLAIN.get(first["name"]) or optimizer_class(first["name"])
        accepted = inspect.signature(made).parameters
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in first["options"].items()}
        options |= {name: False for name in ("foreach", "fused") if name in accepted}
        is_muon = made is Muon
        if is_muon:
            in_16_bits = self.compute == torch.bfloat16 or self.job.precision.compute in ("bf16", "fp16")
            options["dtype"] = torch.bfloat16 if in_16_bits else self.master
        groups: list[dict[str, Any]] = []
        for name, own in members:
            parameter, share = self.parameters[name], own["learning_rate"] / settings.learning_rate
            known: dict[str, Any] = {"params": [parameter], "share": share, "decay": own["weight_decay"]}
            if "weight_decay" in accepted:
                known["weight_decay"] = own["weight_decay"] if parameter.dim() > 1 else 0.0
            groups.append(known | ({"projections": projections(self.model, name)} if is_muon else {}))
        optimizer: torch.optim.Optimizer = made(groups, lr=settings.learning_rate, **options)
        return optimizer

    @torch.no_grad()
    def _reference(self) -> nn.Module:
        """Return the model with which a preference loss compares: untouched, with the weights of the start."""
        model = _wide(_build(self.job, self.eager), self.master)
        for name, parameter in model.named_parameters():
            parameter.copy_(self.weights[name]).requires_grad_(False)
            _convert(parameter, self.compute)
        return model.eval()

    def models(self) -> list[nn.Module]:
        """Return the model, and the reference model where there is one."""
        return [self.model, *([] if self.reference is None else [self.reference])]

    def rebuilt_buffers(self) -> dict[str, Tensor]:
        """Return the buffers of the model built once more: those that are drawn differ."""
        return {
            name: buffer.to(self.master) if buffer.is_floating_point() else buffer
            for name, buffer in _build(self.job, self.eager).named_buffers()
        }

    # --- forward and backward

    def rows_of(self, step: int) -> list[int]:
        """Sample counters of a step."""
        first = end = 0
        for _ in range(step + 1):
            first, end = end, end + self._size_after(end)
        return list(range(first, end if self.samples is None else min(end, self.samples)))

    def _size_after(self, read: int) -> int:
        """Return the sequences of the step ahead of which `read` samples were read."""
        for stage in self.job.training.batch_size_schedule:
            tokens = read * self.job.data.sequence_length
            if read < (stage.until_samples or 0) or tokens < (stage.until_tokens or 0):
                return stage.sequences_per_step
        return self.sequences_per_step

    def read(self, step: int, counters: Sequence[int]) -> Rows:
        """Return some samples of a step as the sequences that it trains on."""
        return shortened(self.source.rows(list(counters)), self.sequences_per_sample(step))

    def _alike(self, counters: Sequence[int], most: int) -> Iterator[Sequence[int]]:
        """Yield the samples of one forward after the other: at most so many, of one form where samples have several."""
        for _, alike in groupby(counters, self._form):
            samples = list(alike)
            for start in range(0, len(samples), most):
                yield samples[start : start + most]

    def _form(self, counter: int) -> tuple[Any, ...]:
        return self.source.form(counter) if isinstance(self.source, FactorySource) else ()

    def _fed(self, step: int, counters: Sequence[int]) -> Rows:
        """Return the rows of one forward; where they change each other's numbers, ones that do not count fill it up."""
        missing, whole = (self.rows_together or 0) - len(counters), self.rows_of(step)
        padding = [whole[number % len(whole)] for number in range(missing)]
        rows = self.read(step, [*counters, *padding])
        if not padding or rows.labels is None or not can_be_ignored(rows.labels):
            return self.read(step, counters)
        rows.labels[len(self.numbers(step, counters)) :] = NOT_COUNTED
        return rows

    def numbers(self, step: int, counters: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the sequences into which some samples of a step are cut."""
        number = self.sequences_per_sample(step)
        return tuple(counter * number + place for counter in counters for place in range(number))

    def sequences_per_sample(self, step: int) -> int:
        """Return the sequences into which each sample of a step is cut."""
        whole, read = self.job.data.sequence_length, self.rows_of(step)[0]
        for stage in self.job.training.sequence_length_schedule:
            if read < (stage.until_samples or 0) or read * whole < (stage.until_tokens or 0):
                return whole // stage.sequence_length
        return 1

    def backward(
        self, step: int, counters: Sequence[int] | None = None, twist: Twist = Twist(), reverse: bool = False,
        shares: Sequence[float] = (1.0,),
    ) -> float:  # fmt: skip
        """Mean loss of the step; `gradients` hold that of the step's samples, or of only some (same normalisation).

        Backward runs for each of the `shares` of the loss, and the gradients are summed.
        """
        everything, cuts = self.rows_of(step), self.sequences_per_sample(step)
        rows = [self.read(step, samples) for samples in self._alike(everything, len(everything))]
        total = sum(len(own.samples()) if counts_samples(self.job) else own.count() for own in rows)
        chosen = everything if counters is None else list(counters)
        size = 1  # of sums in 16 bits: what more sequences add up to is summed in the master's dtype, by `_collect`
        if self.compute.itemsize > 2:
            size = max(1, FORWARD_TOKENS // self.job.data.sequence_length)
        if reverse and not self.rows_together:
            chosen, size = chosen[::-1], max(1, -(-min(size, len(chosen)) // 2))
        size = self.rows_together or self.routers.samples_at_once(size)
        self._zero()
        loss = 0.0
        for group in twist.balanced_apart or (tuple(chosen),):
            self._count_routers(group if twist.balanced_apart else everything, step, size)
            for samples in self._alike(group, size):
                part = self._loss(_twisted(self._fed(step, samples), twist), step, twist) / max(total, 1)
                losses = part
                if self.routers.has_loss:
                    sequences, of_step = cuts * len(samples), cuts * len(everything)
                    terms = self.routers.term(self._router_logits, sequences, of_step, twist.balancing)
                    losses = part + terms
                for number, share in enumerate(shares, start=1):
                    backward_under_modes(losses * share, number < len(shares))
                self._collect()
                loss += float(part.detach())
        return loss

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Rows]) -> float:
        """Return the mean loss of some rows, without dropout and without what training adds to the loss."""
        twist = Twist(no_dropout=True, no_z_loss=True, no_smoothing=True)
        by_sample = counts_samples(self.job)
        count = sum(len(rows.samples()) if by_sample else rows.count() for rows in microbatches)
        with self._averaged():
            return sum(float(self._loss(rows, 0, twist)) for rows in microbatches) / max(count, 1)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Let the weights be those that the optimizer evaluates, where it has others for training."""
        if not isinstance(self.optimizer, ScheduleFreeAdamW):
            yield
            return
        with self.optimizer.averaged():
            self._publish()
            yield
        self._publish()

    def _count_routers(self, counters: Sequence[int], step: int, size: int) -> None:
        """Run forward of the whole step ahead, where the routers' losses or biases ask for their choices."""
        self.routers.begin()
        if not (self.routers.has_loss or self.routers.rate):
            return
        with torch.no_grad(), self.routers.counting_routes():
            for samples in self._alike(counters, size):
                self._loss(self.read(step, samples), step, Twist())
                self.routers.count(self._router_logits if self.routers.has_loss else ())

    def backward_sum(self, step: int, counters: Sequence[int]) -> None:
        """Run forward and backward of the summed loss of some samples together; gradients are dropped."""
        self._loss(self.read(step, counters), step, Twist()).backward()
        for parameter in self.live.values():
            parameter.grad = None

    def norm(self, gradients: Mapping[str, Tensor] | None = None) -> float:
        """Global L2 norm, summed in fp64."""
        values = (self.gradients if gradients is None else gradients).values()
        return math.sqrt(sum(float(in_double(value).square().sum()) for value in values))

    def _loss(self, rows: Rows, step: int, twist: Twist) -> Tensor:
        """Summed loss of `rows`."""
        mask_step = step if twist.dropout_step is None else twist.dropout_step
        self.model.train(not twist.no_dropout)
        counters = rows.counters
        if twist.local_rows is not None:
            cuts = self.sequences_per_sample(step)
            counters = [(c - cuts * self.rows_of(step)[0]) % (cuts * twist.local_rows) for c in counters]
        with self.dropout.begin(mask_step, counters) if not twist.no_dropout else nullcontext():
            if self.has_own_loss:
                with self.drawn.forward(mask_step, counters[0]) if self.drawn else nullcontext():
                    return self._module_loss(rows)
            inputs: dict[str, Any] = self._cast(rows.inputs)
            if rows.documents is not None and not self._packs_by_positions():
                inputs["attention_mask"] = self._document_mask(rows.documents)
            model: Any = self.model  # that of a head of classes has labels that no decoder reads
            two_sided = self.job.model.factory is not None and model.config.is_encoder_decoder and model.can_generate()
            reads_labels = two_sided or TASKS[self.job.model.task].labels == "decoder"
            if reads_labels and "decoder_input_ids" not in inputs:
                inputs["decoder_input_ids"] = self._decoded(rows.labels)
            scaled = scaled_twice(self.model) if twist.scales_adapters_twice else nullcontext()
            widened: Any = WithoutNarrowing() if self._widens else nullcontext()
            self.routers.is_token = rows.tokens()
            with _whole_alibi(self.model), _without_balancing(self.model), scaled, widened:
                output = self.model(**inputs, **({"output_router_logits": True} if self.routers.has_loss else {}))
            logits, self._router_logits = output.logits, getattr(output, "router_logits", None) or ()
            self.narrows_logits |= logits.dtype == torch.float32 and self.compute == torch.float64
        assert rows.labels is not None
        if self.reference is not None:
            return self._preference_loss(rows, inputs, logits, twist)
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        flat, targets = logits.reshape(-1, logits.shape[-1]).to(wide), rows.labels.reshape(-1)
        training = self.job.training
        smoothing = 0.0 if twist.no_smoothing else training.label_smoothing
        losses = nn.functional.cross_entropy(
            flat, targets, ignore_index=NOT_COUNTED, reduction="none", label_smoothing=smoothing
        )
        if training.z_loss and not twist.no_z_loss:
            losses = losses + training.z_loss * flat.logsumexp(-1).square() * (targets != NOT_COUNTED)
        if training.loss_reduction == "sample":
            return torch.stack([losses[place.flatten()].mean() for place in rows.samples()] or [losses.sum()]).sum()
        return losses.sum()

    @property
    def has_own_loss(self) -> bool:
        """True for a user's module but one of transformers, of whose logits the job takes its loss."""
        model = self.job.model
        return model.factory is not None and (model.loss is not None or not isinstance(self.model, PreTrainedModel))

    def _preference_loss(self, rows: Rows, inputs: dict[str, Any], logits: Tensor, twist: Twist) -> Tensor:
        """Summed loss of the pairs of `rows`, with the reference's forward."""
        assert self.reference is not None
        model = self.model if twist.reference_moves else self.reference
        model.train(False)
        with torch.no_grad(), _whole_alibi(model), _without_balancing(model):
            frozen = model(**inputs).logits
        return preference_loss(rows, logits, frozen, self.job.training.dpo)

    def _decoded(self, labels: Any) -> Tensor:
        """[B, T] ids that the decoder reads, by the model's own rule if it has one outside of its forward."""
        model: Any = self.model
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            labels = labels.clone()  # FSMT writes into them
            empty = (labels == NOT_COUNTED).all(dim=1)  # rows that fill a batch, of which it wants a last label
            labels[empty, 0] = int(getattr(model.config, "pad_token_id", None) == 0)
            own: Tensor = model.prepare_decoder_input_ids_from_labels(labels)
            return own
        start = torch.full_like(labels[:, :1], model.config.decoder_start_token_id)
        return torch.cat([start, labels[:, :-1].masked_fill(labels[:, :-1] == NOT_COUNTED, 0)], dim=1)

    def _module_loss(self, rows: Rows) -> Tensor:
        """A user's module: its loss function's sum, or the mean that its forward returns times the count."""
        if self.job.model.loss is not None:
            batch = Batch(rows.inputs, rows.labels, torch.tensor(rows.counters))
            total: Tensor = load_object(self.job.model.loss)(self.model(**self._cast(rows.inputs)), batch)[0]
            return total
        labels = {} if rows.labels is None else {"labels": rows.labels}
        if rows.labels is not None and not rows.count():  # a mean over none is no number, and counts for none
            labels = {"labels": torch.zeros_like(rows.labels)}
        output = self.model(**self._cast({**rows.inputs, **labels}))
        if isinstance(output, (tuple, list)):
            output = output[0]
        elif isinstance(output, dict):
            output = output["loss"]
        mean: Tensor = getattr(output, "loss", output)
        return mean * rows.count()

    def _cast(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Floating-point inputs in the compute dtype."""
        return {name: x.to(self.compute) if x.is_floating_point() else x for name, x in inputs.items()}

    def _document_mask(self, documents: Tensor) -> Tensor:
        """[B, 1, S, S]: 0 where attention is allowed, else the dtype's minimum."""
        size = documents.shape[1]
        allowed = documents[:, None, :, None] == documents[:, None, None, :]
        if self.job.model.task == "causal_lm":
            allowed = allowed & torch.ones(size, size, dtype=torch.bool).tril()
        lowest = torch.tensor(torch.finfo(self.compute).min, dtype=self.compute)
        return torch.where(allowed, torch.zeros((), dtype=self.compute), lowest)

    def _packs_by_positions(self) -> bool:
        """Return True if transformers finds the documents in the positions, beside a window that a mask would undo."""
        window = getattr(getattr(self.model, "config", None), "sliding_window", None)
        return isinstance(window, int) and window < self.job.data.sequence_length

    def _zero(self) -> None:
        self.gradients = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}
        self.used = set[str]()

    def _collect(self) -> None:
        for name, parameter in self.live.items():
            if parameter.grad is not None:
                self.gradients[name] += parameter.grad.to(self.parameters[name].dtype)
                parameter.grad = None
                self.used.add(name)

    # --- update

    def update(
        self, step: int, gradients: Mapping[str, Tensor] | None = None, twist: UpdateTwist = UpdateTwist()
    ) -> None:
        """Clip and step with `gradients` (unset: the oracle's own)."""
        settings = self.job.optimizer
        given = self.gradients if gradients is None else gradients
        for name in self.used:  # torch.optim leaves a parameter without a gradient alone
            self.parameters[name].grad = given[name].to(self.parameters[name].dtype, copy=True)
        if settings.clip_norm is not None and twist.clips:
            # By hand: clip_grad_norm_ sums a million fp32 squares on a CPU in fp32, off by 5e-5.
            norm = self.norm({name: given[name] for name in self.used})
            factor = min(1.0, settings.clip_norm / (norm + 1e-6)) ** twist.clips
            for name in self.used:
                self.parameters[name].grad = given[name].to(self.parameters[name].dtype, copy=True).mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = scheduled_rate(settings, step, self.steps) * group["share"]
        with self._changed(twist):
            for _ in range(twist.repeats):
                self.optimizer.step()
        self.routers.move_biases()
        self._publish()

    def average(self) -> None:
        """Average the weights of a step that was taken: torch's AveragedModel with a decay, written out."""
        decay = self.job.training.ema_decay
        assert decay is not None
        for name, parameter in self.parameters.items():
            if self.live[name].requires_grad:
                weight = parameter.detach()
                before = self.averages.get(name, weight)
                self.averages[name] = decay * before + (1 - decay) * weight

    def evaluate_averages(self, microbatches: Sequence[Rows]) -> float:
        """Return what `evaluate` does, of the averaged weights."""
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.adopt({**weights, **self.averages})
        loss = self.evaluate(microbatches)
        self.adopt(weights)
        return loss

    @property
    def orthogonalized(self) -> list[str]:
        """The parameters that Muon updates."""
        return [name for name, options in self.options().items() if "projections" in options]

    def options(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's options by tensor."""
        groups = zip(self.parameters, self.optimizer.param_groups, strict=True)
        return {name: {key: value for key, value in group.items() if key != "params"} for name, group in groups}

    @contextmanager
    def _changed(self, twist: UpdateTwist) -> Iterator[None]:
        """Let the optimizer have the mistake's options inside."""
        groups = self.optimizer.param_groups
        before: list[dict[str, Any]] = [
            {key: group[key] for key in ("weight_decay", "eps", "decoupled_weight_decay") if key in group}
            for group in groups
        ]
        for group in groups:
            if twist.decay_all or twist.decay_none:
                group["weight_decay"] = 0.0 if twist.decay_none else group["decay"]
            if twist.eps is not None:
                group["eps"] = twist.eps
            if twist.couples_decay and "decoupled_weight_decay" in group:
                group["decoupled_weight_decay"] = False
        if twist.forgets:
            self.optimizer.state.clear()
        if twist.counted:
            self._count(twist.counted)
        try:
            yield
        finally:
            for group, options in zip(groups, before, strict=True):
                group |= options

    def _count(self, steps: int) -> None:
        """Add to the counter of Adam and AdamW, whose state before the first step is zero."""
        for name in self.used:
            parameter = self.parameters[name]
            state = self.optimizer.state[parameter]
            state.setdefault("step", torch.zeros(()))
            for moment in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                state.setdefault(moment, torch.zeros_like(parameter, requires_grad=False))
            state["step"] += steps

    def modules_in_order(self, step: int) -> list[str]:
        """Return the names of modules in the order of their first call in forward of a step."""
        called: dict[str, None] = {}
        handles = [
            module.register_forward_pre_hook(lambda module, inputs, name=name: called.setdefault(name))
            for name, module in self.model.named_modules()
        ]
        try:
            self.backward(step)
        finally:
            for handle in handles:
                handle.remove()
        return list(called)

    def snapshot(self) -> Snapshot:
        """Weights, optimizer state and biases of routers, to `restore` later."""
        weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        return weights, copy.deepcopy(self.optimizer.state_dict()), self.routers.biases()

    def restore(self, snapshot: Snapshot) -> None:
        weights, state, biases = snapshot
        self.optimizer.load_state_dict(copy.deepcopy(state))
        self.routers.set_biases(biases)
        self.adopt(weights)

    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Go on from other weights."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])
        self._publish()

    def _publish(self) -> None:
        """Cast the master weights to the live ones where these have a dtype of their own."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            if parameter is not self.live[name]:
                self.live[name].data.copy_(parameter.data)


def _is_trained(job: Job) -> Callable[[str], bool]:
    """Return what tells of a parameter's name whether the job trains it."""
    settings = adapter_settings(job.adapter)
    saved = "|".join(map(re.escape, settings.modules_to_save))

    def freely(name: str) -> bool:
        return not _is_named(name, job.model.freeze)

    def with_adapters(name: str) -> bool:
        return ".lora_" in name or bool(saved and re.search(rf"({saved})\.", name))

    return freely if settings.kind == "none" else with_adapters


def _is_named(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns is all of a parameter's name, or all of it up to some dot."""
    ends = [index for index, mark in enumerate(name) if mark == "."] + [len(name)]
    return any(re.fullmatch(pattern, name[:end]) for pattern in patterns for end in ends)


@contextmanager
def _without_balancing(model: nn.Module) -> Iterator[None]:
    """Leave out the model's own balancing loss, which takes no mask of documents; that of the job is taken beside."""
    module = sys.modules[type(model).__module__]
    own = getattr(module, BALANCING, None)
    if own is not None:
        setattr(module, BALANCING, lambda *args, **kwargs: 0.0)
    try:
        yield
    finally:
        if own is not None:
            setattr(module, BALANCING, own)


@contextmanager
def _whole_alibi(model: nn.Module) -> Iterator[None]:
    """Bloom and Falcon count their ALiBi biases from a [B, S] mask; beside one of documents they count every token.

    A bias that is the same for all keys of a query changes nothing, so documents need no count of their own.
    """
    files = {sys.modules[type(module).__module__] for module in model.modules()}
    own = {file: getattr(file, ALIBI) for file in files if hasattr(file, ALIBI)}

    def counted(make: Callable[..., Tensor], mask: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = torch.ones(mask.shape[0], mask.shape[-1], dtype=torch.long, device=mask.device)
        return make(mask if mask.dim() == 2 else whole, *args, **kwargs)

    try:
        for file, make in own.items():
            setattr(file, ALIBI, partial(counted, make))
        yield
    finally:
        for file, make in own.items():
            setattr(file, ALIBI, make)


def _wide(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert `model` to the real `dtype`, but for what is complex, of which that would leave the real parts."""
    for tensor in (*model.parameters(), *model.buffers()):
        _convert(tensor, dtype)
    return model


def _convert(tensor: Tensor, dtype: torch.dtype) -> None:
    """Let a real parameter or buffer have its values in `dtype`."""
    if tensor.is_floating_point():
        tensor.data = tensor.data.to(dtype)


def _build(job: Job, eager: bool) -> nn.Module:
    """The model, whole and on the CPU, in train mode; with its eager attention, or its default."""
    section = job.model
    if section.factory is not None:
        model: nn.Module = load_object(section.factory)(**copy.deepcopy(section.factory_arguments))
        mend_batch_norms(model)
        return model.train()
    config = load_config(job)
    for part in (config, *vars(config).values()):  # a cache in evaluation leaves out a mask of T5Gemma's decoder
        if isinstance(part, PreTrainedConfig):
            part.use_cache = False
    attention = {"attn_implementation": "eager"} if eager or section.attention == "eager" else {}
    model = (
        TASKS[section.task]
        .model_class()
        .from_config(config, trust_remote_code=section.trust_remote_code, dtype=torch.float32, **attention)
    )
    for module in model.modules():
        if isinstance(own := getattr(module, "config", None), PreTrainedConfig):
            own.dtype = None  # some forwards cast to it (Nemotron-H Omni's, its images): to none then
    mend_batch_norms(model)
    if any(hasattr(module, "set_attention_type") for module in model.modules()):
        with torch.no_grad():  # the first forward exchanges modules (BigBird), whose dropout is known by name
            base: Any = model.eval().base_model
            base(torch.zeros(1, job.data.sequence_length, dtype=torch.long))
    return model.train()


def _own_settings(settings: OptimizerSection, model: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """Return name, options, rate and decay for a parameter of these names; AdamW's for what Muon leaves."""
    own = settings.model_dump(include={"name", "options", "learning_rate", "weight_decay"})
    if settings.name == "Muon" and not is_hidden(model, names[0]):
        own |= {"name": "AdamW", **settings.adamw.model_dump(exclude_none=True)}
    for group in settings.groups:
        if any(_is_named(name, group.parameters) for name in names):
            given = group.model_dump(exclude={"parameters"}, exclude_none=True)
            if "optimizer" in given:
                own["name"] = given.pop("optimizer")
                own["options"] = settings.options if own["name"] == settings.name else {}
            own |= given
    return own


def scheduled_rate(settings: OptimizerSection, step: int, steps: int) -> float:
    """Warm-up to the peak over `warmup_steps`, then the shape of `schedule`; those that fall end at the final ratio."""
    if ":" in settings.schedule:
        return settings.learning_rate * float(load_object(settings.schedule)(step, steps))
    if settings.warmup_ratio is not None:
        warmup = math.ceil(settings.warmup_ratio * steps)
    else:
        warmup = min(steps // 6, 2000) if settings.warmup_steps == "auto" else settings.warmup_steps
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    if settings.schedule == "constant":
        return settings.learning_rate
    if settings.schedule == "inverse_sqrt":
        return settings.learning_rate * (max(warmup, 1) / (step + 1)) ** 0.5
    if settings.schedule == "piecewise":
        factor = 1.0
        for milestone, given in sorted(settings.milestones.items()):
            factor = given if step >= milestone else factor
        return settings.learning_rate * factor
    last = settings.learning_rate * settings.final_learning_rate_ratio
    return last + (settings.learning_rate - last) * _left(settings, step, steps, warmup)


def _left(settings: OptimizerSection, step: int, steps: int, warmup: int) -> float:
    """Share of the way down that is still ahead."""
    shape, way = settings.schedule, (step - warmup) / max(1, steps - warmup - 1)
    if shape == "warmup_stable_decay":
        length = max(steps // 10, 1) if settings.decay_steps is None else settings.decay_steps
        stable = steps - length
        shape, way = settings.decay_type, 0.0 if step < stable else (step - stable + 1) / length
    if shape == "cosine_with_restarts":
        shape, way = "cosine", 1.0 if step == steps - 1 and steps - 1 > warmup else math.fmod(way * settings.cycles, 1)
    if shape == "1-sqrt":
        return 1 - way**0.5
    return 1 - way if shape == "linear" else (1 + math.cos(math.pi * way)) / 2


def _twisted(rows: Rows, twist: Twist) -> Rows:
    labels, documents = rows.labels, rows.documents
    if twist.shift_labels and labels is not None and labels.dim() > 1:  # those of a sample have no positions
        labels = labels.roll(twist.shift_labels, dims=1)
    if twist.leak_documents and documents is not None:
        documents = torch.zeros_like(documents)
    return replace(rows, labels=labels, documents=documents)


def counts_samples(job: Job) -> bool:
    """Return whether a loss is divided by samples or pairs, in the place of tokens."""
    return job.training.loss_reduction == "sample" or job.reads_pairs
