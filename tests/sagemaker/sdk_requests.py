"""Requests that SageMaker's own SDK makes of a call, printed as JSON. Run by a Python that has it, without shardwise.

`python sdk_requests.py 2 < call.json` for the estimator of version 2, `… 3` for the trainer of version 3. Nothing is
sent: the session's clients answer out of this process.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any
from unittest.mock import MagicMock, patch


def request_of_estimator(call: dict[str, Any]) -> dict[str, Any]:
    """Return the request of `PyTorch(...).fit(...)`."""
    import sagemaker
    from sagemaker.inputs import FileSystemInput, TrainingInput
    from sagemaker.pytorch import PyTorch

    client, boto = MagicMock(), MagicMock(region_name="us-east-1")
    session = sagemaker.Session(boto_session=boto, sagemaker_client=client, default_bucket="bucket")
    kinds = {"TrainingInput": TrainingInput, "FileSystemInput": FileSystemInput}
    inputs = {name: made_of(value, kinds) for name, value in call["inputs"].items()}
    PyTorch(**call["arguments"], sagemaker_session=session).fit(inputs, wait=False, job_name="job")
    return dict(client.create_training_job.call_args.kwargs)


def request_of_trainer(call: dict[str, Any]) -> dict[str, Any]:
    """Return the request of `ModelTrainer(...).train(...)`."""
    import boto3
    from sagemaker.core.helper.session_helper import Session
    from sagemaker.core.shapes import MetricDefinition
    from sagemaker.train import ModelTrainer, configs, distributed
    from sagemaker.train.defaults import TrainDefaults

    answers = MagicMock()
    kinds = {name: getattr(configs, name, None) or getattr(distributed, name) for name in call["kinds"]}
    arguments = {name: made_of(value, kinds) for name, value in call["arguments"].items()}
    with (
        patch.object(boto3.Session, "client", return_value=answers),
        patch.object(boto3.Session, "resource", return_value=answers),
        patch.object(TrainDefaults, "get_role", lambda role, **_: role),
    ):
        boto = boto3.Session(region_name="us-east-1", aws_access_key_id="none", aws_secret_access_key="none")
        session = Session(boto_session=boto, sagemaker_client=answers, default_bucket="bucket")
        trainer = ModelTrainer(**arguments, sagemaker_session=session)
        trainer.with_metric_definitions([MetricDefinition(**metric) for metric in call["metrics"]])
        with contextlib.suppress(Exception):  # what comes behind the request reads an answer that is none
            trainer.train([made_of(value, kinds) for value in call["inputs"]], wait=False)
    return dict(answers.create_training_job.call_args.kwargs)


def made_of(value: Any, kinds: dict[str, Any]) -> Any:
    """Return an object of a class of the SDK, of a mapping that names it; lists item by item, the rest as it is."""
    if isinstance(value, list):
        return [made_of(item, kinds) for item in value]
    if not isinstance(value, dict) or "kind" not in value:
        return value
    given = {name: made_of(part, kinds) for name, part in value.items() if name != "kind"}
    return kinds[value["kind"]](**given)


if __name__ == "__main__":
    made = {"2": request_of_estimator, "3": request_of_trainer}[sys.argv[1]](json.load(sys.stdin))
    print(json.dumps(made, default=str))
