"""A chip that nobody makes, with round figures, and a cluster of it."""

from __future__ import annotations

from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec

CHIP = AcceleratorSpec(
    *("chip", "maker", 500.0, 80.0, 3.0),
    matmul_bf16_tflops=400.0,
    link_gb_per_s=300.0,
    link_kind="nvswitch",
    sources={"default": "made up"},
)
CLUSTER = ClusterSpec(num_nodes=2, devices_per_node=4, accelerator=CHIP, nic_gbit_per_s=400.0)
