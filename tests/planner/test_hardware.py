"""Device names as torch gives them find their own row of the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.planner.constants.hardware import ACCELERATORS, GB, find_accelerator, peak_tflops, read_data
from shardwise.planner.constants.inventory import cluster

NAMES = {
    "NVIDIA GB300": "GB300",
    "NVIDIA GB200": "GB200",
    "NVIDIA B200": "B200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA H200": "H200 SXM",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA H100 NVL": "H100 NVL",
    "NVIDIA H20": "H20",
    "NVIDIA L40S": "L40S",
    "NVIDIA L40": "L40",
    "NVIDIA L4": "L4",
    "NVIDIA A100-SXM4-40GB": "A100 40GB",
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA A100 80GB PCIe": "A100 80GB",
    "A100-PCIE-40GB": "A100 40GB",
    "NVIDIA A800-SXM4-80GB": "A800 80GB",
    "NVIDIA H800": "H800 SXM",
    "NVIDIA A40": "A40",
    "NVIDIA A30": "A30",
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA GeForce RTX 5090": "RTX 5090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "Tesla V100-SXM2-16GB": "V100 SXM",
    "Tesla V100-SXM2-32GB": "V100 SXM 32GB",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla V100-PCIE-32GB": "V100 PCIe 32GB",
    "Tesla V100S-PCIE-32GB": "V100S PCIe",
    "Tesla T4": "T4",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
    "AMD Instinct MI350X": "MI350X",
    "AMD Instinct MI355X": "MI355X",
    "AMD Instinct MI250X": "MI250X (one of two)",
}


@pytest.mark.parametrize("device_name, row", NAMES.items())
def test_device_names_find_their_row(device_name: str, row: str) -> None:
    found = find_accelerator(device_name)
    assert found is not None and found.name == row


def test_every_row_is_reached_by_a_name() -> None:
    assert {accelerator.name for accelerator in ACCELERATORS} == set(NAMES.values())


@pytest.mark.parametrize(
    "device_name",
    ["", "AMD EPYC 7R13 Processor", "NVIDIA GeForce GTX 1080", "NVIDIA GeForce RTX 4090 Laptop GPU",
     "NVIDIA GeForce RTX 3090 Ti", "NVIDIA H1000", "A100X"],
)  # fmt: skip
def test_unknown_devices_and_cpus_have_no_peak(device_name: str) -> None:
    assert peak_tflops(device_name, "bf16") is None


def test_dense_peaks_of_the_usual_dtypes() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", "bf16") == pytest.approx(989.4)
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "fp32") == pytest.approx(19.5)
    assert peak_tflops("Tesla V100-SXM2-16GB", "fp16") == pytest.approx(125)
    assert peak_tflops("Tesla V100-SXM2-16GB", "bf16") is None


def test_peaks_of_products_are_those_of_the_widest_format_that_is_quick() -> None:
    gb300, a100 = find_accelerator("NVIDIA GB300"), find_accelerator("NVIDIA A100-SXM4-80GB")
    assert gb300 and a100
    assert [gb300.product_peak(dtype) for dtype in ("bf16", "mxfp8", "nvfp4")] == [2500, 5000, 15000]
    assert a100.product_peak("fp8-block") == a100.product_peak("nvfp4") == 312
    assert gb300.peak("fp8") == gb300.peak("nvfp4") == 2500


def test_links_of_a_rack_join_nodes() -> None:
    rack = cluster("gb200-nvl72:64")
    assert (rack.size, rack.per_node, rack.island) == (256, 4, 64)
    assert cluster("p5.48xlarge:4").island == 8


def test_table_is_consistent() -> None:
    for accelerator in ACCELERATORS:
        assert accelerator.fp64 <= accelerator.fp32 < accelerator.fp16
        assert accelerator.bf16 in (None, accelerator.fp16)
        assert 16 * GB <= accelerator.memory_bytes <= 310 * GB


@pytest.mark.parametrize("name", [name for name in read_data("clusters") if "." in name])
def test_an_instance_type_is_a_cluster_under_both_of_its_names(name: str) -> None:
    found = cluster(f"ml.{name}:2")
    assert found == cluster(f"{name}:2")
    assert (found.nodes, found.instance) == (2, name)
    assert found.cpus > 0 and found.host_gb > 0 and (found.efa > 0) == found.fabric.name.startswith("efa")


@pytest.mark.parametrize(
    "name, words", {"ml.p5.48xlage": "Did you mean 'p5.48xlarge'", "ml.trn1.32xlarge": "chips of AWS"}.items()
)
def test_instance_types_that_are_not_known(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster(name)


def test_a_cluster_file_may_name_an_instance_type(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("instance: ml.p5.48xlarge\nnodes: 3\ncpus: 100\n")
    found = cluster(str(file))
    assert (found.size, found.efa, found.cpus, found.instance) == (24, 32, 100, "p5.48xlarge")


def test_generations_of_efa_have_shorter_hops_in_turn() -> None:
    hops = [cluster(f"{name}:2").fabric.hop_seconds for name in ("p5.48xlarge", "p5en.48xlarge", "p6-b200.48xlarge")]
    assert hops == pytest.approx([5e-5, 5e-5 * (1 - 0.35), 5e-5 * (1 - 0.35) / 1.18], rel=0.03)
    assert cluster("p4d.24xlarge:2").fabric == cluster("p5.48xlarge:2").fabric
