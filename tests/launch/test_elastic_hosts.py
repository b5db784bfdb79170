"""Hosts that come and go under our own launcher: batch, samples and losses stay those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster import obstacle
from tests.launch.elastic_cluster import ElasticCluster, elastic_cluster, records_of
from tests.launch.named_hosts import wait_until

needs_namespaces = pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there can be hosts")


def check_same_run(cluster: ElasticCluster) -> None:
    """The records are those of one rank that was left alone: no step twice, none lost, the same samples and losses."""
    expected, records = records_of(cluster.undisturbed()), cluster.records()
    assert [record["step"] for record in records] == [record["step"] for record in expected], cluster.logs()
    assert [record["data_hash"] for record in records] == [record["data_hash"] for record in expected]
    assert [record["tokens"] for record in records] == [record["tokens"] for record in expected]
    for key in ("loss", "grad_norm"):
        assert [record[key] for record in records] == pytest.approx([record[key] for record in expected], rel=1e-9)


@pytest.mark.timeout(1500)
@pytest.mark.slow  # some twenty processes import torch
@needs_namespaces
def test_a_host_goes_away_and_comes_back(tmp_path: Path) -> None:
    with elastic_cluster(tmp_path, steps=200) as cluster:
        for host in range(3):
            cluster.start(host)
        wait_until(lambda: cluster.ranks().count(3) >= 12, "three hosts train", cluster.logs)
        cluster.kill(2)
        wait_until(lambda: cluster.ranks().count(2) >= 5, "two go on", cluster.logs)
        cluster.start(2)
        wait_until(lambda: cluster.ranks()[-1] == 3, "it joins", cluster.logs)
        assert [cluster.hosts[host].wait(timeout=300) for host in range(3)] == [0, 0, 0], cluster.logs()
        check_same_run(cluster)
        log = cluster.log(0).read_text()
        assert "a step has 3 sequences" in log
        assert "host 2 is gone: the run goes on with 2 of 3 hosts" in log
        assert "host 2 joins: the run goes on with 3 of 3 hosts" in log
