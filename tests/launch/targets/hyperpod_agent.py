"""HyperPod's agent, `hyperpodrun`, under any torch: from 2.12 on torchrun has a --shutdown-timeout of its own."""

from __future__ import annotations

import sys
from argparse import ArgumentParser

import hyperpod_elastic_agent.run as agent

torchruns_parser = agent.get_args_parser


def parser() -> ArgumentParser:
    """Return torchrun's, whose options the agent may replace."""
    made: ArgumentParser = torchruns_parser()
    for group in (made, *made._action_groups):
        group.conflict_handler = "resolve"
    return made


agent.get_args_parser = parser
agent.main(sys.argv[1:])
