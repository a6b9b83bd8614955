"""What drivers report, and what they answer when something is wrong: see `tests/lab/gpus`."""

from __future__ import annotations

import json
from pathlib import Path

import pynvml as installed
import pytest
from lab.gpus.machines import CARDS, play, stub, write_kfd
from lab.sysfs import write

from trainspec_cli.run.job.gpus import find_gpus

MIB = 2**20


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("1,9,2", [1]),
        ("GPU-00000003", [3]),
        ("GPU-00000002,0", [2, 0]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_gpus_that_cuda_would_show(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str | None, expected: list[int]
) -> None:
    """Numbers or UUIDs in order, ending before the first that names no GPU; a note names those left out."""
    machine = tmp_path / "machine.json"
    gpus = [{"card": "h100_sxm", "used_mib": number, "uuid": f"GPU-{number:08x}-0"} for number in range(4)]
    machine.write_text(json.dumps({"gpus": gpus}))
    play(str(machine), monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = find_gpus()
    assert [(gpu.memory_bytes - gpu.free_bytes) // MIB for gpu in found.gpus] == expected
    assert found.problem is None
    assert bool(found.notes) == (visible in ("1,9,2", "", "-1"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("visible_unknown_index", "4 names none"),
        ("visible_unknown_uuid", "GPU-deadbeef names none"),
        ("visible_twice", "names a GPU twice"),
        ("mismatched_driver", "NVML error 18"),
        ("no_permission", "NVML error 4"),
        ("lost", "GPU 3 does"),
        ("lost_handle", "GPU 1 does"),
        ("forbidden", "GPU 0 does"),
        ("mig_without_slices", "no slice exists"),
        ("amd_visible_unknown", "9 names none"),
    ],
)
def test_what_is_wrong_is_a_problem_with_advice(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    play(name, monkeypatch)
    found = find_gpus()
    assert found.gpus == ()
    assert found.problem is not None
    assert (found.problem.code, found.problem.path, found.problem.environment) == ("no_gpu", "cluster.device", True)
    assert said in found.problem.message
    assert found.problem.hint.endswith("cluster.device=cpu")


def test_a_lost_gpu_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    play("lost", monkeypatch)
    problem = find_gpus().problem
    assert problem is not None
    assert "CUDA_VISIBLE_DEVICES=0,1,2" in problem.hint
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert len(find_gpus().gpus) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000001")
    assert len(find_gpus().gpus) == 1, "a UUID is looked for past the lost one"


@pytest.mark.parametrize("name", ["no_library", "no_gpus"])
def test_a_node_without_gpus_has_no_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    play(name, monkeypatch)
    found = find_gpus(tmp_path, tmp_path)
    assert (found.gpus, found.problem) == ((), None)


def test_a_driver_that_is_not_loaded_matters_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    play("no_driver", monkeypatch)
    assert find_gpus(tmp_path, tmp_path).problem is None
    write(tmp_path / "bus/pci/devices/0000:01:00.0", vendor="0x10de", **{"class": "0x030200"})
    problem = find_gpus(tmp_path, tmp_path).problem
    assert problem is not None
    assert "modprobe nvidia" in problem.hint


def test_a_container_without_nvml_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play("no_library", monkeypatch)
    (tmp_path / "nvidiactl").touch()
    problem = find_gpus(tmp_path, tmp_path).problem
    assert problem is not None
    assert "NVIDIA_DRIVER_CAPABILITIES" in problem.hint


def test_a_gpu_in_the_systems_memory_has_that(monkeypatch: pytest.MonkeyPatch) -> None:
    play("1xgb10", monkeypatch)
    (gpu,) = find_gpus().gpus
    assert gpu.memory_bytes > gpu.free_bytes > 0
    assert (gpu.processors, gpu.memory_gb_per_s) == (48, 0.0)


@pytest.mark.parametrize(
    ("name", "memory_mib", "processors"),
    [("mig_a100", 40192, 42), ("mig_h100", 9984, 16), ("mig_by_uuid", 40448, 60)],
)
def test_cuda_shows_one_slice(monkeypatch: pytest.MonkeyPatch, name: str, memory_mib: int, processors: int) -> None:
    play(name, monkeypatch)
    (gpu,) = find_gpus().gpus
    assert (gpu.memory_bytes, gpu.processors) == (memory_mib * MIB, processors)
    assert " MIG " in gpu.name


@pytest.mark.parametrize("card", [card for card, facts in CARDS.items() if not facts["name"].startswith("AMD")])
def test_cards_are_described_by_numbers_alone(monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    play(f"2x{card}", monkeypatch)
    facts = CARDS[card]
    for gpu in find_gpus().gpus:
        assert (gpu.name, list(gpu.compute_capability)) == (facts["name"], facts["compute_capability"])
        assert gpu.clock_mhz == facts.get("sm_mhz", 0)


@pytest.mark.parametrize(
    ("card", "gb_per_s"), [("h100_sxm", 3352), ("rtx_3090", 936), ("t4", 320), ("rtx_5090", 1792), ("b200", 8184)]
)
def test_memory_bandwidth_follows_from_clock_and_width(
    monkeypatch: pytest.MonkeyPatch, card: str, gb_per_s: float
) -> None:
    play(f"1x{card}", monkeypatch)
    (gpu,) = find_gpus().gpus
    assert gpu.memory_gb_per_s == pytest.approx(gb_per_s, rel=1e-3)


@pytest.mark.parametrize(("name", "links"), [("2xh100_sxm", 450), ("nvlink_down", 0), ("2xl40s", None)])
def test_nvlinks_that_are_up(monkeypatch: pytest.MonkeyPatch, name: str, links: float | None) -> None:
    play(name, monkeypatch)
    assert {gpu.nvlink_gb_per_s for gpu in find_gpus().gpus} == {links}


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, 8),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0,1,2", "HIP_VISIBLE_DEVICES": "2"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "GPU-a51c000000000003"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
    ],
)
@pytest.mark.parametrize("source", ["amdsmi", "sysfs"])
def test_amd_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str], number: int, source: str
) -> None:
    """Both sources report the same, and say that nothing of it was ever run."""
    play("amd_mi300x", monkeypatch)
    if source == "sysfs":
        play("no_library", monkeypatch)
        write_kfd(tmp_path, "amd_mi300x")
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    found = find_gpus(tmp_path, tmp_path)
    assert found.notes
    assert found.problem is None
    assert len(found.gpus) == number
    for gpu in found.gpus:
        assert (gpu.name, gpu.vendor, gpu.memory_bytes) == ("AMD Instinct MI300X", "amd", 196592 * MIB)
        assert (gpu.compute_capability, gpu.processors, gpu.bf16, gpu.fp8) == ((9, 0x42), 304, True, True)


def test_an_amd_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    play("amd_without_driver", monkeypatch)
    assert find_gpus(tmp_path, tmp_path).problem is None, "amdsmi is installed on a node without an AMD GPU"
    (tmp_path / "class/kfd").mkdir(parents=True)
    problem = find_gpus(tmp_path, tmp_path).problem
    assert problem is not None
    assert "AMD" in problem.message


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"class/accel/accel0/device": {"vendor": "0x1da3"}}, "Gaudi"),
        ({"class/accel/accel0/device": {"vendor": "0x1ae0"}}, "TPU"),
        ({"bus/pci/devices/0000:29:00.0": {"vendor": "0x8086", "device": "0x0bd5"}}, "Intel"),
        ({"class/accel/accel0/device": {"vendor": "0x8086"}}, ""),
        ({"bus/pci/devices/0000:29:00.0": {"vendor": "0x8086", "device": "0x4680"}}, ""),
    ],
    ids=["Gaudi", "TPU", "Max", "a laptop's NPU", "a laptop's graphics"],
)
def test_accelerators_on_which_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, dict[str, str]], said: str
) -> None:
    play("no_library", monkeypatch)
    for folder, content in files.items():
        write(tmp_path / folder, **content)
    problem = find_gpus(tmp_path, tmp_path).problem
    assert (problem is not None) == bool(said)
    assert problem is None or said in problem.message


def test_the_stand_in_has_the_errors_of_the_real_module() -> None:
    """Every function and code of the lab's NVML exists in NVIDIA's."""
    for name in (name for name in dir(stub) if name.startswith(("NVML_ERROR_", "NVML_CLOCK_"))):
        assert getattr(installed, name) == getattr(stub, name)
    for name in (name for name in dir(stub) if name.startswith(("nvml", "NVMLError"))):
        assert hasattr(installed, name), name
    assert type(stub.NVMLError(15)).__name__ == type(installed.NVMLError(15)).__name__ == "NVMLError_GpuIsLost"
