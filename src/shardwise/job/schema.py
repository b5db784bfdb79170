"""The Job: what the user asks for, as frozen pydantic models.

Values here are requests. `None` or `auto` means "derive it"; `shardwise.plan.plan.resolve` derives, checks the
combination against `shardwise.plan.rules`, and keeps the rule behind every derived value. Reading YAML, dictionaries,
SMP options, environment and command line is in `shardwise.job.sources`; the reference page is generated from the
descriptions below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from shardwise.job.attention_kernels import KERNELS
from shardwise.job.data_section import DataSection
from shardwise.job.launch_section import LaunchSection
from shardwise.job.optimizer_section import OptimizerSection
from shardwise.job.section import RootSection, Section, UserPath
from shardwise.job.tasks import TASKS
from shardwise.job.values import Fraction, NonNegative, Pattern, Positive, SetName
from shardwise.job.warmup_stages import BatchSizeStage, SequenceLengthStage

Device = Literal["auto", "cpu", "cuda", "xpu", "mps"]
Precision = Literal["auto", "fp64", "fp32", "bf16", "fp16"]
Checkpointing = Literal["none", "full", "selective"]
if TYPE_CHECKING:
    AttentionKernelName = str
    TaskName = str
else:
    AttentionKernelName = Literal["auto", *(kernel.name for kernel in KERNELS)]
    TaskName = Literal[tuple(TASKS)]
PAIR_OBJECTIVES = ("dpo",)  # whose samples are pairs of completions


class ModelSection(Section):
    """The model that is trained, and how its forward is executed."""

    path: UserPath | None = Field(
        default=None, description="Local Hugging Face model directory; its weights are the starting point."
    )
    config: UserPath | dict[str, Any] | None = Field(
        default=None,
        description="Hugging Face config: a config.json, a directory that holds one, or the dict itself (with "
        "`model_type`). Weights are drawn anew; beside `path` a dict takes precedence over fields of the directory's "
        "config, and stands for it where the directory is not on this machine, so that a plan can be made.",
    )
    factory: str | None = Field(
        default=None,
        description="`package.module:function` that returns any `nn.Module`; called with `factory_arguments`.",
    )
    factory_arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of `factory`.")
    weights: UserPath | None = Field(
        default=None,
        description="File of weights (safetensors, or a state dict of `torch.save`) for a module of `factory`, by the "
        "module's own names. What it does not hold starts as without it.",
    )
    loss: str | None = Field(
        default=None,
        description="`package.module:function(output, batch) -> (sum, count)` for a module of `factory` that does not "
        "return its own loss.",
    )
    task: TaskName = Field(
        default="causal_lm",
        description="Which head and which loss. `seq2seq_lm` (T5 and its kind) learns to fill in spans of text that "
        "are left out (arXiv 1910.10683, section 3.1.4). Sequence and token classification learn a class of each "
        "sample, or of each token, from the `labels` of a `data.factory`. `image_classification`, `speech_seq2seq` "
        "(Whisper) and `image_text_to_text` (Llava) read rows that name files of images or of sound.",
    )
    labels: list[str] = Field(
        default=[],
        description="Names of the classes of a task of classification; unset: those of the config.",
    )
    dtype: Literal["file", "fp32", "bf16"] | None = Field(
        default=None,
        description="Dtype in which weights that are not trained are kept, and in which the model is written: `file` "
        "is that of each tensor in the files of `path`. Masters of what is trained are those of `precision.compute`. "
        "Unset: everything as the masters.",
    )
    attention: AttentionKernelName = Field(
        default="auto",
        description="Attention kernel; `auto` takes the first that can do what the model, the data and the device ask "
        "for (`shardwise doctor --model` shows it). Families that kernels do not compute have `eager` and `sdpa`.",
    )
    dropout: Fraction | None = Field(
        default=None,
        description="Sets every dropout probability of a Hugging Face config; unset keeps the config's own.",
    )
    compile: bool = Field(default=False, description="`torch.compile` for every block.")
    cuda_graphs: bool = Field(
        default=False,
        description="Compiled blocks run as CUDA graphs, which spares launches where a step is short: on one GPU whose "
        "weights stay in place.",
    )
    liger: bool = Field(
        default=False,
        description="Liger's kernels for RMS norms, gated MLPs and rotary positions, on a GPU; extra `liger`.",
    )
    freeze: list[Pattern] = Field(
        default=[],
        description="Parameters that are not trained: regular expressions, each matched against the whole name of a "
        "parameter or of a module that holds it, such as `model.layers.[0-7]`. They have no gradient, no optimizer "
        "state and no reduction.",
    )
    running_statistics: Literal["first_rank", "synchronised"] = Field(
        default="first_rank",
        description="What buffers that a forward changes (batch norms, averages) are after a step: those of the first "
        "rank, or their mean over the ranks that read different samples. Evaluation, checkpoints and export have them.",
    )
    trust_remote_code: bool = Field(default=False, description="Allow a model directory to run its own Python code.")


class AdapterSection(Section):
    """Low-rank adapters of linear layers: they are trained, and the model under them is frozen. Names as in peft."""

    kind: Literal["none", "lora", "dora"] = Field(
        default="none",
        description="`lora`: a product of two thin matrices is added to a layer's (arXiv 2106.09685); `dora`: the rows "
        "of their sum have a trained length besides (arXiv 2402.09353).",
    )
    rank: Positive = Field(default=8, description="Rows of `lora_A` and columns of `lora_B`; peft's `r`.")
    alpha: float = Field(
        default=8.0, gt=0, description="The product is multiplied by alpha / rank; peft's `lora_alpha`."
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Of the adapters' input; peft's `lora_dropout`.")
    rslora: bool = Field(
        default=False,
        description="Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732), so that high ranks learn as fast.",
    )
    target_modules: Literal["all-linear"] | list[str] | Pattern = Field(
        default="all-linear",
        description="Layers that have an adapter: names or ends of names, such as `[q_proj, v_proj]`; one regular "
        "expression, matched against whole names; or `all-linear`, the linear layers of all blocks.",
    )
    target_parameters: list[str] = Field(
        default=[],
        description="Stacks of experts of which each expert has an adapter: names of parameters or ends of names, such "
        "as `[experts.gate_up_proj, experts.down_proj]`. `target_modules` may then be empty.",
    )
    modules_to_save: list[str] = Field(
        default=[],
        description="Modules that are trained whole beside the adapters and kept with them, by ends of names as in "
        "peft: `norm` is each `input_layernorm` too.",
    )
    rank_pattern: dict[Pattern, Positive] = Field(
        default={}, description="Regular expression of a layer's name, or of the end of one -> its own rank."
    )
    alpha_pattern: dict[Pattern, float] = Field(
        default={}, description="Regular expression of a layer's name, or of the end of one -> its own alpha."
    )
    base: Literal["full", "nf4", "int8"] = Field(
        default="full",
        description="Form of the frozen weights of the blocks' linear layers: `nf4`, four bits (arXiv 2305.14314), or "
        "`int8`, each with a scale for 64 elements; `full`: as `model.dtype` has them.",
    )
    path: UserPath | None = Field(
        default=None,
        description="Directory of an adapter in peft's format, from which training goes on. The other keys come from "
        "its `adapter_config.json`, and those that are set have to agree with it; `dropout` may differ.",
    )


class ParallelSection(Section):
    """The arrangement of the ranks. Names are SMP's where SMP has one."""

    workers: Positive | None = Field(
        default=None, description="Local workers to start; unset: all GPUs, or 2 on a CPU."
    )
    device: Device = Field(
        default="auto",
        description="Device type of the workers. `auto` takes a GPU of CUDA, ROCm (as `cuda`) or Intel (`xpu`) where "
        "there is one, Apple's (`mps`) by name alone: one worker, in fp32. What each can do: [devices.md](devices.md).",
    )
    sharded_data_parallel_degree: Positive | None = Field(
        default=None,
        description="Ranks over which parameters, gradients and optimizer state are sharded; the rest of the data "
        "ranks are replicas (MiCS, arXiv 2205.00119). Unset: all data ranks.",
    )
    tensor_parallel_degree: Positive = Field(default=1, description="Ranks that split each layer's tensors.")
    sequence_parallel: bool = Field(
        default=False,
        description="Tensor ranks also share the sequence between split layers: norms, dropout and residuals are kept "
        "in parts (arXiv 2205.05198). SMP's `optimize: memory`.",
    )
    pipeline_parallel_degree: Positive = Field(default=1, description="Pipeline stages.")
    pipeline: Literal["interleaved", "simple", "zero_bubble", "zbv", "dualpipev"] = Field(
        default="interleaved",
        description="Schedule of the stages: `interleaved` runs forward and backward in turn (1F1B, arXiv 2104.04473, "
        "section 2.2), `simple` all forwards first (GPipe, arXiv 1811.06965), `zero_bubble` in turn with the gradients "
        "of weights where a rank would idle (ZB1P, arXiv 2401.10241, section 2), `zbv` (section 6) and `dualpipev` "
        "(arXiv 2412.19437, section 3.2.1) the same with stages that go down the ranks and up again; the pairs of "
        "`dualpipev` run one after the other and overlap nothing, so that `zbv` does the same with less memory.",
    )
    virtual_pipeline_degree: Positive | None = Field(
        default=None,
        description="Stages on each pipeline rank, in turns around the ranks; more make the bubble smaller and the "
        "traffic larger. Unset: 2 where `pipeline` is `zbv` or `dualpipev`, which have no other number, else 1.",
    )
    active_microbatches: Positive | None = Field(
        default=None, description="Most forwards in flight on a pipeline rank; unset: as many as the schedule needs."
    )
    auto_partition: bool = Field(
        default=True, description="Cut the blocks into stages so that the costliest stage costs least."
    )
    memory_weight: float = Field(
        default=0.2, ge=0, le=1, description="Weight of memory against compute in `auto_partition`."
    )
    default_partition: NonNegative | None = Field(
        default=None, description="Stage of the blocks that `partition` does not name, without `auto_partition`."
    )
    partition: dict[str, int] = Field(
        default={}, description="Block's name -> its stage, from 0, without `auto_partition`."
    )
    context_parallel_degree: Positive = Field(default=1, description="Ranks that split the sequence.")
    context_parallel_method: Literal["auto", "all_gather", "ulysses", "ring"] = Field(
        default="auto",
        description="How attention reaches the other ranks' parts of a sequence: keys and values gathered, heads "
        "exchanged for rows, or keys and values passed round. `auto`: ulysses where the heads divide, else all_gather.",
    )
    expert_parallel_degree: Positive = Field(
        default=1,
        description="Ranks that share the experts of each layer: tokens travel to the rank of their expert and back. A "
        "second view of the data ranks (replica x shard x context), which it has to divide.",
    )
    placement_strategy: str = Field(
        default="cluster",
        description="Order of the axes D (data), P (pipeline), T (tensor), right-most varying fastest; `cluster` is "
        "DPT, `spread` is TPD.",
    )
    shard_optimizer_state: bool = Field(
        default=False,
        description="Shard optimizer state and gradients' reduction over the data ranks while parameters stay whole "
        "(ZeRO-1); needs sharded_data_parallel_degree 1 or unset.",
    )
    reshard_after_forward: bool = Field(
        default=True,
        description="Free a block's gathered parameters after its forward and gather them again in backward; "
        "without a pipeline the last unit's stay, since backward begins with it.",
    )
    prefetch_depth: NonNegative = Field(
        default=1, description="Blocks whose parameters are gathered ahead of their use; 0 leaves the order to FSDP2."
    )
    ddp_dist_backend: Literal["auto", "gloo", "shardwise", "nccl", "xccl"] = Field(
        default="auto",
        description="Collective backend. `shardwise` is the library's own engine for CPU ranks, on one host or "
        "several; tensors of a GPU go through the host's memory. `auto` is NCCL on CUDA, but the engine where several "
        "ranks share a GPU; XCCL on Intel's GPUs; on a CPU the engine where there are several ranks and it can be "
        "built, else Gloo.",
    )
    collective_algorithm: Literal["auto", "measured", "flat", "two_level", "direct"] = Field(
        default="auto",
        description="How all-gather, reduce-scatter and all-reduce cross hosts. `flat` leaves it to the backend; "
        "`two_level` goes between hosts at equal local index, then inside each (MiCS, arXiv 2205.00119, section 3.3); "
        "`direct` does so with all peers at once; `measured` times them when a group is made and takes the fastest by "
        "size. `auto` is `measured` on Gloo over several hosts; NCCL and the engine choose for themselves.",
    )
    timeout_seconds: Positive = Field(
        default=600, description="After this long a collective is taken as hung and the run ends."
    )
    max_restarts: NonNegative = Field(
        default=0,
        description="How often local workers are started again after one has died or failed; the run goes on from its "
        "newest complete checkpoint. A user's mistake is not retried.",
    )


class MemorySection(Section):
    """Recomputation and offload, which save device memory."""

    activation_checkpointing: Checkpointing = Field(
        default="none",
        description="`full`: keep each block's inputs only; `selective`: keep matrix products and attention too, "
        "recompute the rest.",
    )
    checkpoint_every: Positive = Field(default=1, description="Checkpoint every n-th block only.")
    checkpoint_strategy: str = Field(
        default="each", description="SMP's grouping: `each`, `contiguous` (all blocks as one), or `group_N` (N as one)."
    )
    keep_expert_rows: bool = Field(
        default=False,
        description="Keep the rows that shared experts get and give, 2·k hidden states a token and layer: checkpointed "
        "blocks then exchange none again. Routes are always kept.",
    )
    offload_activations: bool = Field(
        default=False, description="Keep checkpointed activations in host memory between forward and backward."
    )
    activation_loading_horizon: Positive = Field(
        default=4, description="How many checkpoints ahead of backward are loaded back from the host."
    )
    offload_parameters: bool = Field(
        default=False, description="Keep sharded parameters, gradients and optimizer state in host memory."
    )
    offload_optimizer: bool | Fraction = Field(
        default=False,
        description="Keep optimizer state in host memory and update there: `true` all, or a share of each rank's "
        "parameters from 0 to 1. Without `optimizer.clip_norm` the update runs beside backward.",
    )
    loss_chunk_tokens: Positive = Field(
        default=1024, description="Rows of [tokens, vocabulary] logits that exist at once in the chunked loss."
    )


class LossScaleSection(Section):
    """Dynamic loss scaling for fp16; names and defaults are SMP's `dynamic_loss_args`, initial scale 2**16."""

    static: float | None = Field(default=None, gt=0, description="A fixed scale; unset: dynamic.")
    init_scale: float = Field(default=2.0**16, gt=0, description="First dynamic scale.")
    scale_factor: float = Field(default=2.0, gt=1, description="Factor by which the scale grows and shrinks.")
    scale_window: Positive = Field(default=1000, description="Good steps in a row before the scale grows.")
    min_scale: float = Field(default=1.0, gt=0, description="The scale never falls below this.")
    delayed_shift: Positive = Field(default=1, description="Overflows tolerated before the scale shrinks (hysteresis).")
    consecutive_hysteresis: bool = Field(default=False, description="A good step restores the full hysteresis.")


class PrecisionSection(Section):
    """Dtypes. Master weights, reduction and optimizer state are fp32 (fp64 for a fp64 job), with float8 too."""

    compute: Precision = Field(
        default="auto", description="Dtype of forward and backward; `auto`: bf16 on CUDA, fp32 on a CPU."
    )
    loss_scale: LossScaleSection = Field(default_factory=LossScaleSection, description="Loss scaling of fp16.")
    cast_float_arguments: bool = Field(
        default=False,
        description="In 16 bits, cast every float argument of a module of `model.factory` and of its blocks. Without "
        "it only what is made from weights, and what the module does not take in fp32, so that positions and times are "
        "not rounded.",
    )
    fp8: Literal["none", "torchao", "transformer_engine", "emulate"] = Field(
        default="none",
        description="What multiplies the blocks' linear layers in float8: `torchao` on a GPU that has it, extra fp8; "
        "`transformer_engine` on the same, where it is installed; `emulate` rounds to float8 and multiplies in fp32, "
        "on any device.",
    )
    fp8_scaling: Literal["tensorwise", "rowwise"] = Field(
        default="tensorwise",
        description="One scale a tensor, or one for each row and column that are multiplied.",
    )
    fp8_layers: Literal["auto", "all"] = Field(
        default="auto",
        description="`auto` leaves out the first and the last block and layers that are too small to gain; `all` takes "
        "every linear layer of the blocks.",
    )
    fp8_all_gather: bool = Field(
        default=False,
        description="Gather the sharded weights of float8 layers in float8, half the bytes of bf16. Weights' scales "
        "are powers of two then.",
    )


class DpoSection(Section):
    """Direct preference optimization (arXiv 2305.18290): what was chosen becomes likelier than what was rejected."""

    loss: Literal["sigmoid", "ipo"] = Field(
        default="sigmoid",
        description="Of the margin m between a pair's log-probability ratios to the reference: `sigmoid`: "
        "-log sigmoid(beta m) (equation 7); `ipo`: (m - 1 / (2 beta))^2 (arXiv 2310.12036, equation 17).",
    )
    beta: float = Field(default=0.1, gt=0, description="How much a departure from the reference counts.")
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of the pairs that are taken for labelled the wrong way round (arXiv 2403.00409, equation "
        "12); `sigmoid` only.",
    )
    length_normalised: bool = Field(
        default=False,
        description="Log-probabilities of a completion are means over its tokens in the place of sums, so that a long "
        "one does not weigh more.",
    )
    precompute_reference: bool = Field(
        default=False,
        description="Log-probabilities by the reference are computed for all pairs ahead of the first step, and kept "
        "in `data.cache_directory`. Steps then run no reference, and no copy of the model is made.",
    )


class TrainingSection(Section):
    """The number of steps, their size, and what is learned."""

    steps: Positive = Field(default=64, description="Optimizer steps.")
    epochs: Positive | None = Field(
        default=None,
        description="Passes through the training sequences, in the place of `steps`; the last step holds what is left.",
    )
    tokens_per_step: Positive | None = Field(
        default=None, description="Global tokens a step; or give `sequences_per_step`."
    )
    sequences_per_step: Positive | None = Field(default=None, description="Global sequences (samples) a step.")
    batch_size_schedule: list[BatchSizeStage] = Field(
        default=[],
        description="Warm-up of the batch size (Megatron's `rampup_batch_size`): stages of smaller steps, each larger "
        "than the one before, ahead of those of `sequences_per_step`. The microbatch stays; each stage has as many as "
        "its steps need. Learning rates go by steps, not by samples.",
    )
    sequence_length_schedule: list[SequenceLengthStage] = Field(
        default=[],
        description="Warm-up of the sequence length (DeepSpeed's `seqlen_reshape`): stages that cut each sample into "
        "shorter sequences, each stage into longer ones than the one before, ahead of whole samples. The tokens of a "
        "step stay, none is left out, and evaluations have whole samples.",
    )
    microbatch_size: Positive | None = Field(
        default=None, description="Sequences in one forward of one rank; derived if unset."
    )
    gradient_accumulation: Positive | None = Field(
        default=None, description="Microbatches a step, behind any warm-up of the batch size; derived if unset."
    )
    objective: Literal["auto", "pretraining", "sft", "dpo"] = Field(
        default="auto",
        description="`pretraining`: every token of documents; `sft` (supervised fine-tuning): the tokens of "
        "conversations and pairs that `data.train_on` names; `dpo` (direct preference optimization): pairs of "
        "preferences. `auto`: by the data's format.",
    )
    dpo: DpoSection = Field(default_factory=DpoSection, description="The loss of `dpo`.")
    loss_reduction: Literal["token", "sample"] = Field(
        default="token",
        description="Mean of the loss over the target tokens of a step, or over its samples of each one's own mean: "
        "rows, isolated documents, else sequences. Whatever the ranks hold, it is divided once.",
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the target spread evenly over all classes, in training."
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the squared log-normaliser of the softmax in the training loss (PaLM: 1e-4).",
    )
    seed: NonNegative = Field(default=0, description="Seed of weights, sample order and dropout.")
    ema_decay: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Keep an exponential moving average of the trained weights (EMA): after each step it keeps this "
        "share of itself, such as 0.999, and takes the rest from the weights. It is evaluated too "
        "(`validation_loss/ema`), saved in checkpoints, and written as a model beside the trained one. Unset: none.",
    )
    evaluate_every: NonNegative = Field(default=0, description="Steps between evaluations; 0: at the end only.")
    evaluate_batches: Positive = Field(default=8, description="Global batches of one evaluation.")
    deterministic: bool = Field(default=False, description="`torch.use_deterministic_algorithms`.")
    callbacks: list[str] = Field(
        default=[],
        description="Callbacks of your own, each `package.module:name` of a subclass of `shardwise.Callback`, of a "
        "function that returns one, or of an object; called in this order, before the display and the trackers.",
    )


class EvaluationSection(Section):
    """Metrics of an evaluation beside the validation loss, and what follows from them.

    `training.evaluate_every` says when, `training.evaluate_batches` on how much.
    """

    sets: dict[SetName, UserPath] = Field(
        default={},
        description="Name -> path of a set that is evaluated too, read as `data.path` is; it is not "
        "trained on. Its loss is the metric `validation_loss/NAME`.",
    )
    answers: NonNegative = Field(
        default=0,
        description="Held-out rows whose first answer the model writes itself, always with its likeliest token. The "
        "share that equals the row's own is the metric `exact_match`, and `exact_match/NAME` of a set.",
    )
    prompts: list[str | list[dict[str, Any]]] = Field(
        default=[],
        description="Texts, or lists of messages, that the model continues at each evaluation, always with its "
        "likeliest token, by `observe.sample_tokens` at most. With a chat template a text is a message of the user's.",
    )
    metric: str = Field(
        default="validation_loss",
        description="By which `checkpoint.keep_best` and `early_stopping_patience` judge: any number of an evaluation, "
        "those that callbacks add to its record included.",
    )
    greater_is_better: bool | None = Field(
        default=None, description="Of `metric`; unset: unless its name has `loss` in it."
    )
    early_stopping_patience: NonNegative = Field(
        default=0, description="Evaluations in a row without a better `metric` after which the run ends; 0: none do."
    )
    early_stopping_threshold: float = Field(
        default=0.0, ge=0, description="By how much a `metric` has to be better than the best one so far."
    )

    @property
    def prefers_greater(self) -> bool:
        """`greater_is_better`, where it is unset by the metric's name."""
        return "loss" not in self.metric if self.greater_is_better is None else self.greater_is_better


class CheckpointSection(Section):
    """Checkpoints: when the run's state is kept, where, and from what a run starts."""

    every: NonNegative = Field(
        default=0, description="Steps between checkpoints, the last step included; 0: only where a signal ends the run."
    )
    resume: UserPath = Field(
        default="none",
        description="`none`; `auto`: go on from the newest complete checkpoint, or start where there is none; or the "
        "path of one checkpoint.",
    )
    change_sources: bool = Field(
        default=False,
        description="Go on from a checkpoint of other `data.sources`: of other weights, more of them or fewer. Each "
        "goes on where the checkpoint has it, and a new one begins.",
    )
    directory: UserPath | None = Field(
        default=None,
        description="Directory or URL (`s3://bucket/run`, `gs://...`; needs fsspec's package for its scheme); unset: "
        "`checkpoints` in `output`.",
    )
    memory_every: NonNegative = Field(
        default=0,
        description="Steps between copies of the state in the memory of each host, of which there are two. Where hosts "
        "come and go, those that are left go on from the newest that all of them have, without reading a disk. Each "
        "host has to hold the whole state. 0: none.",
    )
    keep_last: Positive = Field(default=2, description="How many of the newest checkpoints are kept.")
    keep_every: NonNegative = Field(
        default=0, description="Checkpoints at multiples of this step are never removed; 0: none of them."
    )
    keep_best: bool = Field(
        default=False,
        description="Keep the checkpoint of the best `evaluation.metric` too, by default the validation loss.",
    )
    asynchronous: bool = Field(default=True, description="Training goes on while a checkpoint is written.")
    staging_bytes: Annotated[int, Field(ge=1 << 23)] | None = Field(
        default=None,
        description="Host memory of each rank for what is saved and not yet written when an update comes, in bytes; "
        "for what is more, the update waits for the disk. Unset: as large as the state.",
    )


class ObserveSection(Section):
    """Display and records of a run."""

    log_every: Positive = Field(default=1, description="Steps between lines of a display that is not a terminal.")
    tensorboard: bool = Field(default=True, description="Write TensorBoard event files.")
    wandb: str | None = Field(default=None, description="Weights & Biases project; needs the extra `wandb`.")
    mlflow: str | None = Field(default=None, description="MLflow experiment; needs the extra `mlflow`.")
    profile: list[NonNegative] | None = Field(
        default=None, description="Steps whose torch profiler trace is written, e.g. `[10, 12]`: first and last."
    )
    peak_tflops: float | None = Field(
        default=None, gt=0, description="Peak TFLOP/s of one device for MFU; unset: from a table of accelerators."
    )
    hang_report: bool = Field(
        default=True,
        description="Let the launcher of local workers say where the ranks are when a step takes far too long. It ends "
        "nothing; `parallel.timeout_seconds` does.",
    )
    hang_medians: float = Field(
        default=10.0, ge=2, description="A step takes too long after so many medians of the last 32."
    )
    hang_seconds: float = Field(
        default=60.0,
        gt=0,
        description="And after at least so many seconds; five times as many where there is no median yet, as for the "
        "first step.",
    )
    sample: bool = Field(default=True, description="Generate a text sample at the end.")
    sample_prompt: str | None = Field(
        default=None, description="Prompt of the sample; unset: the start of a validation text."
    )
    sample_tokens: Positive = Field(default=64, description="Tokens generated.")


class RouterSection(Section):
    """Losses and biases that keep the experts of a mixture evenly used."""

    balancing_loss: Literal["auto", "global", "layer", "sequence", "model", "none"] = Field(
        default="auto",
        description="Loss that balances the experts (arXiv 2101.03961, equation 4), of the choices and probabilities "
        "of: `layer` all tokens of a step in each layer, and the mean of the layers; `global` all tokens of a step in "
        "all layers at once, which layers that are uneven in different ways even out. Both are the same on every "
        "layout; steps of several microbatches cost a forward more. `sequence`: each sequence and layer, and the mean "
        "of all; `model`: each microbatch over all layers, as transformers does. `auto`: global where the model itself "
        "would add a loss (output_router_logits in its config), else none.",
    )
    balancing_coefficient: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Factor of the balancing loss; unset: router_aux_loss_coef of the model's config."
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="Factor of the mean squared log-sum-exp of the routers' logits (arXiv 2202.08906, equation 5).",
    )
    bias_update_rate: float = Field(
        default=0.0,
        ge=0,
        description="By how much a step moves the bias on a router's scores against uneven use (arXiv 2412.19437, "
        "section 2.1.2, has 0.001); for models with e_score_correction_bias. 0: never, as in transformers.",
    )


class Job(RootSection):
    """Everything a user asks for. `Job()` is the embedded default that `shardwise train` runs."""

    model: ModelSection = Field(default_factory=ModelSection, description="The model.")
    adapter: AdapterSection = Field(default_factory=AdapterSection, description="Low-rank adapters.")
    parallel: ParallelSection = Field(default_factory=ParallelSection, description="The layout.")
    router: RouterSection = Field(default_factory=RouterSection, description="Routers of experts.")
    memory: MemorySection = Field(default_factory=MemorySection, description="Recomputation and offload.")
    precision: PrecisionSection = Field(default_factory=PrecisionSection, description="Dtypes.")
    training: TrainingSection = Field(default_factory=TrainingSection, description="Steps and batch.")
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection, description="Optimizer and schedule.")
    data: DataSection = Field(default_factory=DataSection, description="The corpus.")
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection, description="Evaluations.")
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="Keeping and resuming the run's state."
    )
    observe: ObserveSection = Field(default_factory=ObserveSection, description="Display and records.")
    launch: LaunchSection = Field(default_factory=LaunchSection, description="Where `shardwise launch` starts the job.")
    output: UserPath = Field(default="shardwise-run", description="Directory of everything a run writes.")

    @property
    def objective(self) -> str:
        """`training.objective` with `auto` resolved, once the data's format is known."""
        if self.training.objective != "auto":
            return self.training.objective
        if "preference" in self.data.row_formats:
            return "dpo"
        return "sft" if self.data.has_rows else "pretraining"

    @property
    def reads_pairs(self) -> bool:
        """True where a sample holds both completions of preferences."""
        return self.objective in PAIR_OBJECTIVES

    @property
    def isolates_documents(self) -> bool:
        """True where documents, rows or completions of one sequence do not attend to each other."""
        return (self.data.packing or self.reads_pairs) if self.data.has_rows else self.data.isolate_documents
