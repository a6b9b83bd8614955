"""Outputs of `nvidia-smi topo -m` from several drivers and kinds of machines.

The files in tests/data/topology were published by the owners of the machines:

- dgx_h100: a report of a DGX H100 with driver 580.126.20, which ends after the row of NIC5 and has no legend;
- dgx_a100: a DGX A100 with the names of the NICs in the columns; NVIDIA/nccl#1505 shows the same links;
- hgx_h100: sgl-project/sglang#30401, eight H100 and eight NICs;
- a100_pcie: rapidsai/dask-cuda#1381, eight A100 PCIe with bridges, without the row of NIC0. The job's cores are not
  near half of the GPUs, so their affinity is blank;
- v100_pcie: lattice/quda#669, eight GPUs below PCIe switches, of 2018: no NUMA affinity;
- l40s: warpem/miss-alignment#106, four L40S;
- rtx_4090: aikitoria/open-gpu-kernel-modules#1, two RTX 4090, an RTX 5090 and an RTX A6000 on one socket;
- rtx_4090_two_sockets: noonghunna/club-3090#46, five GPUs, two of them RTX 4090.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import MachineError
from trainspec_cli.wings.doctor.discover import describe_links, parse_matrix

DATA = Path(__file__).parents[2] / "data" / "topology"


def published(name: str) -> str:
    return (DATA / f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("name", "links", "first", "last"),
    [
        ("dgx_h100", "8: NV18 between 28 pairs", ("0-55,112-167", 0), ("56-111,168-223", 1)),
        ("dgx_a100", "8: NV12 between 28 pairs", ("48-63,176-191", 3), ("80-95,208-223", 5)),
        ("hgx_h100", "8: NV18 between 28 pairs", ("0-47,96-143", 0), ("48-95,144-191", 1)),
        ("a100_pcie", "8: NODE between 24, NV12 between 4 pairs", ("0-15,56-71", 0), ("", 1)),
        ("v100_pcie", "8: SYS between 16, PXB between 8, PIX between 4 pairs", ("0-13", None), ("14-27", None)),
        ("l40s", "4: SYS between 4, NODE between 2 pairs", ("0-95,192-287", 0), ("96-191,288-383", 1)),
        ("rtx_4090", "4: PHB between 6 pairs", ("0-15", 0), ("0-15", 0)),
        (
            "rtx_4090_two_sockets",
            "5: SYS between 4, NODE between 4, PHB between 2 pairs",
            ("8-15,24-31", 1),
            ("0-7,16-23", 0),
        ),
    ],
)
def test_links_cores_and_numa_nodes_are_read(
    name: str, links: str, first: tuple[str, int | None], last: tuple[str, int | None]
) -> None:
    gpus = parse_matrix(published(name), name)
    assert describe_links(gpus) == links
    assert [(gpu.cores, gpu.numa_node) for gpu in (gpus[0], gpus[-1])] == [first, last]
    assert all(far.links[gpu.name] == gpu.links[far.name] for gpu in gpus for far in gpus if far is not gpu)


@pytest.mark.parametrize(
    ("name", "gpu", "nics"),
    [
        ("dgx_h100", 5, {"NIC6": "NODE", "NIC9": "PXB", "NIC0": "SYS"}),
        ("dgx_a100", 4, {"mlx5_6": "PXB", "mlx5_7": "PXB", "mlx5_4": "SYS"}),
        ("hgx_h100", 7, {"mlx5_7": "PIX", "mlx5_6": "NODE", "mlx5_3": "SYS"}),
        ("a100_pcie", 6, {"NIC0": "PHB"}),
        ("v100_pcie", 4, {"mlx5_0": "PHB"}),
        ("l40s", 2, {"mlx5_0": "NODE", "mlx5_1": "NODE"}),
        ("rtx_4090", 0, {}),
    ],
)
def test_nics_have_the_names_in_the_legend(name: str, gpu: int, nics: dict[str, str]) -> None:
    found = parse_matrix(published(name), name)[gpu].nics
    assert nics.items() <= found.items() and bool(found) == bool(nics)


def test_one_gpu_colours_and_names_of_old_drivers() -> None:
    [alone] = parse_matrix(
        "\t\x1b[4mGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\nGPU0\t X \t0-15\t0\t\tN/A\n", "one"
    )
    assert (alone.links, alone.cores, alone.numa_node) == ({}, "0-15", 0)
    first, second = parse_matrix("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSOC\t0-7\nGPU1\tSOC\t X \t8-15\n", "two")
    assert (first.links, second.cores) == ({"GPU1": "SYS"}, "8-15")


def test_a_damaged_matrix_is_refused_with_the_line() -> None:
    """Mail programs and terminals remove tabs: a published matrix of a B200 has `PXBNODE`."""
    run_together = published("hgx_h100").replace(
        "NODE    NODE    PIX     NODE    SYS", "NODE    NODE    PIXNODE    SYS", 1
    )
    with raises(MachineError, "bad_matrix", "topology.txt:4", "GPU2", "`PIXNODE`"):
        parse_matrix(run_together, "topology.txt")
    with pytest.raises(MachineError, match="GPU2, GPU3"):
        parse_matrix("\n".join(published("rtx_4090").splitlines()[:3]), "topology.txt")
    with raises(MachineError, "bad_matrix", "topology.txt:2", "GPU0", "3 links", "4"):
        parse_matrix(published("rtx_4090").replace("PHB     0-15    0               N/A", "", 1), "topology.txt")
    with raises(MachineError, "no_matrix", "topology.txt"):
        parse_matrix("Failed to initialize NVML: Driver/library version mismatch\n", "topology.txt")
