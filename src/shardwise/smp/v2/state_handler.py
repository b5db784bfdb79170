"""`torch.sagemaker.state_handler`, where scripts look for the state and its ranker."""

from shardwise.smp.v2.session import Ranker, state

__all__ = ["Ranker", "state"]
