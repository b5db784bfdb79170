"""What the reference pages say that no other table of the code holds: metrics, files of a run, environment variables.

Tests hold them to the code: the keys of METRICS to the records of a run, FILES to its output directory, the variables
to the names in the sources. SUBJECTS is the index: where each part of the system is described.
"""

from __future__ import annotations

METRICS = {
    "step": "number of the step, from 1",
    "loss": "mean over the step's counted labels of all ranks, nats",
    "grad_norm": "global L2 norm before clipping; the one that clips",
    "learning_rate": "of this step",
    "tokens": "labels counted since the start, all ranks (rows for data without labels)",
    "tokens_per_second": "counted labels of the step / its seconds, all ranks",
    "tflops_per_rank": "model TFLOP/s of one rank, 6P + 12Lsh a token; no recomputation counted",
    "smp_tflops_per_rank": "the same step in SMP's convention, 8P a token, which its published figures use",
    "mfu": "tflops_per_rank / peak of the device; null where the peak is not known",
    "peak_memory_bytes": "list by rank: the allocator's peak on a GPU, or the process's peak resident size on a CPU",
    "data_seconds": "list by rank: seconds of the step that it has waited for its batches",
    "compute_seconds": "list by rank: what is left of the step without the waits; on a CPU only",
    "communication_seconds": "list by rank: seconds in named collectives, the wait for other ranks with it; CPU only",
    "straggler": "rank, host and device of a rank that is slow, with its seconds and `usual_` ones, those of its peers",
    "skipped": "true: gradients were not finite on some rank, and no rank updated anything",
    "data_hash": "hash of all samples so far, equal on any layout: two runs that differ in it have read other data",
    "seconds": "wall time of the step",
    "sequences": "samples of the step; with `training.batch_size_schedule` only",
    "sequence_length": "tokens of each sequence of the step; with `training.sequence_length_schedule` only",
    "stream_tokens_per_second": "tokens of a stream that rank 0's host has made ahead, a second; streams only",
    "stream_waited_seconds": "seconds for which rank 0 has waited for the stream so far; streams only",
    "stream_waited_seconds/NAME": "the same of one of `data.sources` that is a stream",
    "stream_skipped_shards": "damaged shards passed over so far, with `data.on_bad_files: skip`; streams only",
    "expert_load": "rows of the most used expert over the mean, of the layer where that is highest; experts only",
    "idle_experts": "share of experts without a row, over all layers; experts only",
    "balancing_loss": "loss that balances the experts, over the step, before its factor; `router.balancing_loss` only",
    "rewards_chosen": "mean reward of the step's chosen completions, beta x log-ratio to the reference; `dpo` only",
    "rewards_rejected": "the same of rejected completions",
    "rewards_margin": "rewards_chosen - rewards_rejected",
    "rewards_accuracy": "share of the step's pairs whose chosen completion has the higher reward",
    "loss_scale": "scale of this step's backward; fp16 only",
    "training_loss": "of an evaluation: mean of the steps before it, as many as it has batches, each before its update",
    "validation_rewards_chosen": "`rewards_chosen` of an evaluation's pairs",
    "validation_rewards_rejected": "`rewards_rejected` of an evaluation's pairs",
    "validation_rewards_margin": "`rewards_margin` of an evaluation's pairs",
    "validation_rewards_accuracy": "`rewards_accuracy` of an evaluation's pairs",
    "validation_loss": "mean over the labels of `training.evaluate_batches` global batches, nats",
    "validation_loss/NAME": "the same of a set of `evaluation.sets`, or of a source of `data.sources`",
    "passes/NAME": "how often a source of `data.sources` has been read; a stream by its whole shards",
    "accuracy": "share of the step's labels whose class is predicted; `model.task` of classification only",
    "f1": "mean of the classes' F1 in the step (macro); `model.task` of classification only",
    "validation_accuracy": "`accuracy` of an evaluation's labels",
    "validation_f1": "`f1` of an evaluation's labels",
    "exact_match": "share of held-out answers that the model writes token for token; `exact_match/NAME` of a set",
    "samples": "what the model writes behind the prompts of `evaluation.prompts`: a list of prompt and text",
}

FILES = {
    "run.json": "whose directory it is: job, plan and its rules, model facts, data, versions; at the end the result",
    "job.yaml": "the whole job with every default written out; `shardwise train` reads it",
    "metrics.jsonl": "one JSON object a step or evaluation, flushed as it is written",
    "tensorboard": "TensorBoard event files (`observe.tensorboard`)",
    "wandb_run.txt": "the run's name at Weights & Biases, with which a resumed run goes on; `mlflow_run.txt` likewise",
    "profile": "torch profiler traces of each rank (`observe.profile`, `--profile`); only where asked for",
    "model": "the trained model with its tokenizer, as `from_pretrained` opens it",
    "adapter": "the trained adapters in peft's format (`adapter`)",
    "checkpoints": "a directory a checkpoint (`checkpoint.every`): safetensors files, one a rank, and `manifest.json`",
    "sample.txt": "generated text of a causal language model (`observe.sample`)",
    "report.html": "charts of loss, throughput, memory, gradient norm and learning rate; needs no network",
    "stacks.txt": "where the ranks were, with their Python stacks, each time a step took far too long",
    ".lock": "held while a run writes here; `.launcher-HOST.json` is there for `shardwise inspect`",
}

ENVIRONMENT_VARIABLES = {
    "SM_HP_MP_PARAMETERS": "SMP's options as a JSON object; stronger than the job file, weaker than the command line",
    "SHARDWISE_DEVICE": "set by `shardwise run --device`: where `smp.init` computes",
    "SM_FRAMEWORK_PARAMS": "`shardwise run --smp-options` sets its `sagemaker_mpi_enabled`; transformers looks for it",
    "SM_NUM_GPUS, SM_HOSTS, SM_CURRENT_HOST, SM_MODULE_DIR, SM_CHANNELS": "set by `shardwise run` for the script, "
    "where they are not set yet; in a container of SageMaker all that its toolkit and its SDK set",
    "SAGEMAKER_BASE_DIR": "another place of `/opt/ml`, the directory of SageMaker's containers",
    "SM_CHANNEL_TRAIN, SM_CHANNEL_TEST": "input directories of a script: `shardwise run --channel NAME=DIR`, or `data`",
    "SM_MODEL_DIR, SM_OUTPUT_DATA_DIR": "output directories of a script: `shardwise run --model-dir`, `--output-dir`",
    "XDG_CACHE_HOME": "tokenizers and tokens are cached in its `shardwise/`; unset: `~/.cache`. `data.cache_directory` "
    "wins",
    "SHARDWISE_ENGINE_DIRECTORY": "where the compiled engine is kept; unset: `engine/` in the cache above",
    "SHARDWISE_HOST": "a name for this host; ranks with equal names share it. Unset: host name, boot id and network "
    "namespace",
    "SHARDWISE_SOCKET_IFNAME": "network interface of the engine between hosts; unset: that of the host's address "
    "towards the store (MASTER_ADDR)",
    "FI_PROVIDER": "libfabric's own; `shardwise launch` sets it to `efa` where several nodes have EFA",
    "SHARDWISE_PYTHON": "set by a `local` launch: the Python of whoever submits, which its script then starts",
    "OMP_NUM_THREADS": "threads of a CPU worker; unset: the usable cores divided by the workers of the host",
    "MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_, MALLOC_TOP_PAD_, GLIBC_TUNABLES": "glibc's own; where one is set, "
    "CPU workers leave malloc as it is. Unset: they keep up to 2 GiB of freed memory for the next step",
    "GLOO_SOCKET_IFNAME": "network interface of Gloo; unset and all ranks on one host: the loopback interface",
    "SHARDWISE_DEBUG": "1 shows the output of every local worker, not of rank 0 alone",
    "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT": "torchrun's; where RANK is set this "
    "process joins as that rank, before any other launcher is looked for",
    "TORCHELASTIC_RESTART_COUNT, SLURM_RESTART_COUNT, SHARDWISE_RESTART_COUNT": "torchrun's, Slurm's of a requeued "
    "job, a launch's with a named checkpoint.resume; above 0 the run goes on from its newest complete checkpoint",
    "PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT": "torchrun's options as "
    "TrainJob, PyTorchJob and JobSet give them to a pod; without LOCAL_RANK this process starts the ranks of its host. "
    "PET_NNODES=2:4: hosts may come and go, as long as there are two",
    "PET_RDZV_CONF": "torchrun's; of it `join_timeout=SECONDS`: how long hosts wait for one another. Unset: 900",
    "JOB_COMPLETION_INDEX": "Kubernetes' number of a pod, where PET_NODE_RANK is not set",
    "PET_RDZV_ENDPOINT, HOSTNAME": "where pods of a PyTorchJob with elasticPolicy meet (`run-worker-0:23456`), and the "
    "name that numbers one of them (`run-worker-2`), where nothing else does",
    "SM_HOSTS, SM_CURRENT_HOST, SM_MASTER_ADDR, SM_MASTER_PORT": "SageMaker's hosts, sorted as words; with several, "
    "each starts its ranks",
    "SM_FRAMEWORK_PARAMS, SM_DISTRIBUTED_CONFIG": "hold the ranks of a host that an estimator or trainer asked for",
    "SM_DISTRIBUTION_INSTANCE_GROUPS, SM_INSTANCE_GROUPS_DICT": "SageMaker's; the hosts that are trained on",
    "SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS, SKYPILOT_NUM_NODES, SKYPILOT_NUM_GPUS_PER_NODE": "SkyPilot's; each node "
    "starts its ranks",
    "SKYPILOT_TASK_ID": "SkyPilot's; the port is chosen from it where MASTER_PORT is not set",
    "SLURM_GPUS_ON_NODE, CUDA_VISIBLE_DEVICES": "with one task a node: where they say that it has several GPUs, it "
    "starts a rank for each; PET_NPROC_PER_NODE says another number",
    "KUBEFLOW_TRAINER_SERVER_URL, KUBEFLOW_TRAINER_SERVER_CA_CERT, KUBEFLOW_TRAINER_SERVER_TOKEN": "where a TrainJob's "
    "progress is posted, with files of certificate and token",
    "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_SIZE": "Open MPI's; "
    "over several hosts MASTER_ADDR has to be given too",
    "PMIX_NAMESPACE, OMPI_MCA_ess_base_jobid": "Open MPI's; the port is chosen from them where MASTER_PORT is not set",
    "SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_NUM_TASKS, SLURM_STEP_TASKS_PER_NODE": "Slurm's, inside of "
    "an `srun` step; the batch script itself and an interactive shell (SLURM_PTY_PORT) join nothing",
    "SLURM_STEP_NODELIST, SLURM_JOB_NODELIST, SLURM_LAUNCH_NODE_IPADDR": "Slurm's; rank 0's host, the first of them, "
    "where MASTER_ADDR is not set",
    "SLURM_JOB_ID, SLURM_STEP_ID": "Slurm's; the port is chosen from them where MASTER_PORT is not set",
    "WANDB_MODE, WANDB_API_KEY": "Weights & Biases' own, with `observe.wandb`",
    "MLFLOW_TRACKING_URI": "MLflow's own, with `observe.mlflow`",
    "AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY": "botocore's own, with "
    "`checkpoint.directory: s3://...`; nothing of them is written down or shown",
}

COMMON_OPTIONS = {
    "--version": "the version",
    "--help": "the commands; after a command its options and every key of a job",
}

SUBJECTS = (
    ("1. The package: versions, extras", "[package.md](package.md)"),
    (
        "2. The commands: `train`, `verify`, `export`, `checkpoint`, `doctor`, `bench`, `build`",
        "[command-line.md](command-line.md), [run.md](run.md)",
    ),
    (
        "3. The job: YAML, Python, `smp_options`, `run.model_type` of recipes, dotted keys",
        "[job.md](job.md), [smp-options.md](smp-options.md), [recipes.md](recipes.md), [legality.md](legality.md), "
        "[python.md](python.md)",
    ),
    ("4. Layout: `placement_strategy`, SMP's ranks and groups", "[layout.md](layout.md)"),
    (
        "5. Workers and launchers: `parallel.workers`, torchrun, Slurm, Open MPI, Kubernetes, SageMaker",
        "[job.md](job.md#parallel), [devices.md](devices.md), [environment.md](environment.md), "
        "[errors.md](errors.md), [sagemaker.md](sagemaker.md)",
    ),
    (
        "6. Models: `model.path`, `model.config`, `model.factory`, `model.attention`",
        "[job.md](job.md#model), [attention.md](attention.md), [coverage.md](coverage.md)",
    ),
    (
        "7. Sharded data parallelism: `sharded_data_parallel_degree`, `shard_optimizer_state`, `prefetch_depth`",
        "[job.md](job.md#parallel), [smp-options.md](smp-options.md)",
    ),
    ("8. Memory: `activation_checkpointing`, `checkpoint_strategy`, `offload_activations`", "[job.md](job.md#memory)"),
    ("9. Precision: `precision.compute`, `loss_scale`", "[precision.md](precision.md), [job.md](job.md#precision)"),
    (
        "10. The step: `tokens_per_step`, `optimizer.name`, `clip_norm`, `model.dropout`, `model.compile`",
        "[job.md](job.md#training), [job.md](job.md#optimizer)",
    ),
    ("11. Data: `data.format`, `isolate_documents`, `mask_probability`", "[job.md](job.md#data)"),
    (
        "12. Seeing: `metrics.jsonl`, FLOPs, `observe.tensorboard`, `observe.wandb`, `observe.profile`",
        "[run.md](run.md), [job.md](job.md#observe)",
    ),
    ("13. Verifying: `--blocks`, `--against`, `--steps`", "[command-line.md](command-line.md#shardwise-verify)"),
    (
        "14. Checkpoints: `checkpoint.every`, `checkpoint.resume`, `keep_last`, `staging_bytes`, `--dtype`",
        "[job.md](job.md#checkpoint), [command-line.md](command-line.md#shardwise-checkpoint)",
    ),
)
