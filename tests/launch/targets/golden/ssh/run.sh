#!/usr/bin/env bash
# llama: bash run.sh PLACE, from 0, on each of the hosts.
set -eo pipefail
export PYTHONUNBUFFERED=1
export NCCL_DEBUG=WARN
export PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK="$1"
export PET_MASTER_ADDR=host1 PET_MASTER_PORT=29500
shardwise_job=$PWD/job.yaml
cd /work
exec shardwise train "$shardwise_job"
