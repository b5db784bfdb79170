# The image that SageMaker, Kubernetes and SkyPilot start: shardwise with torch for CUDA, or for CPUs.
#
#   docker build --tag shardwise .
#   docker build --tag shardwise-cpu --build-arg INDEX=https://download.pytorch.org/whl/cpu .
#
# It starts `shardwise`: SageMaker adds the argument `train`, the others give whole commands. Processes run as root,
# to whom mounted data, checkpoints and keys belong.
FROM python:3.12-slim-bookworm

# PyPI's torch is for CUDA and brings CUDA, cuDNN and NCCL with it.
ARG INDEX=https://pypi.org/simple
ARG TORCH=2.13.0
# Checkpoints in S3; boto3 (extra sagemaker) is for machines that start jobs.
ARG EXTRAS=s3

# A compiler builds the native collectives for CPU ranks; tini hands signals on and reaps what workers leave.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git openssh-client procps tini \
    && rm -rf /var/lib/apt/lists/*

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

RUN python -m pip install "torch==${TORCH}" --index-url "${INDEX}"

WORKDIR /opt/shardwise
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m pip install ".[${EXTRAS}]"
RUN shardwise build

# CUDA ranks get the driver's libraries from the host.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /workspace
ENTRYPOINT ["tini", "--", "shardwise"]
CMD ["--help"]
