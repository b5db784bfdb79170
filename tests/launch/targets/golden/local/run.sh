#!/usr/bin/env bash
# llama: written by `shardwise launch`; `shardwise jobs` knows it once it runs.
set -eo pipefail
export PYTHONUNBUFFERED=1
export NCCL_DEBUG=WARN
ulimit -n 4096
exec "${SHARDWISE_PYTHON:-python3}" -m shardwise train /shared/launches/llama/job.yaml --parallel.workers 2 --parallel.max_restarts 3
