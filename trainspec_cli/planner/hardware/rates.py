"""Achieved rates of a chip and its links: the vendor's values times a few measured efficiencies."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, cast

from trainspec_cli.core.errors import Problem, RecipeError, TrainspecError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import VERSION_KEY, UnreadableFileError, read_text, show_kind, unreadable
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.model import ModelSpec, derive_head_dim
from trainspec_cli.recipe.records import choose_section, from_plain

REFERENCE_W_PER_TFLOP = 0.7
"""Ratio of board power to bf16 peak for the chip whose best matrix multiplication was measured (H100 SXM). With less
power, the clock drops."""
TYPICAL_FRACTION = 0.80
TYPICAL_FRACTIONS = {"amd": 0.60}
"""The best matrix multiplication relative to the bf16 peak, for chips where it was not measured: the median of the 8
measured chips of NVIDIA and the 3 of AMD in conf/accelerator."""
UNKNOWN_FRACTION = 0.75
"""The most that is assumed for a chip whose board power is unknown."""
GENERATION_TFLOPS = (500.0, 1700.0)
"""A chip with at least this bf16 peak is of generation 3 (Hopper: 756 to 989) or 4 (Blackwell: 2,250 and more) even if
nothing is stated about the formats by which generations are told apart."""
FRACTIONS = frozenset(
    {
        *("matmul", "attention_forward", "attention_backward", "memory", "cache_reuse"),
        *("link_nvswitch", "link_mesh", "link_pcie", "nic"),
        *("tp_overlap", "cp_overlap", "ep_overlap", "ep_overlap_network", "dp_overlap", "pp_overlap"),
    }
)
"""Efficiencies that cannot exceed 1."""


MEASURED_CHIPS = frozenset(
    {
        *("A100-PCIe-80GB", "A100-SXM-40GB", "A100-SXM-80GB", "A30", "A40", "B200-SXM", "B300-SXM", "GB200", "GB300"),
        *("H100-NVL-94GB", "H100-PCIe-80GB", "H100-SXM-80GB", "H200-NVL", "H200-SXM-141GB", "L4", "L40", "L40S"),
        *("MI300X", "MI325X", "MI350X", "MI355X", "NVIDIA RTX A5000", "RTX Pro 6000"),
    }
)
"""The chips with measured training runs among the rows that the planner was fitted to."""


@dataclass(frozen=True)
class Efficiency:
    """The planner's few free parameters, fitted to published runs (`trainspec backtest --fit`) and the same for all
    chips.

    Fractions refer to the chip's sustained matmul rate, its memory bandwidth or a link's bandwidth."""

    matmul: float = 0.918
    """Matmul rate in training as a fraction of the best measured one, which benefits from higher clocks and warm
    caches."""
    matmul_fp8: float = 0.851
    matmul_fp4: float = 0.664
    gemm_memory: float = 0.428
    """Fraction of a matrix multiplication's memory traffic that its arithmetic does not hide."""
    kernel_s: float = 7.22e-06
    """Ramp-up and tail time of one kernel on the device."""
    tail_waves: float = 0.408
    """Fraction of a wave of tiles that is idle at the end of a matrix multiplication."""
    misalignment: float = 0.457
    """Fraction of the rate lost each time the largest power of two dividing a matrix dimension halves below 64
    (tensor-core tiles)."""
    attention_forward: float = 0.848
    """Rate of fused attention relative to the sustained bf16 matmul rate."""
    attention_backward: float = 0.637
    attention_older: float = 0.592
    """Rate of attention kernels written for the previous chip generation, relative to those written for the chip's own;
    applied once per generation."""
    exponentials: float = 0.513
    """Fraction of attention's exponentials that its matrix multiplications do not hide."""
    memory: float = 0.916
    """Fraction of the memory bandwidth that element-wise kernels achieve."""
    cache_reuse: float = 0.288
    """Fraction of the memory traffic that is saved by a cache much larger than the tensors."""
    elementwise: float = 0.996
    """Actual number of passes over memory, relative to the number counted for lightly fused kernels."""
    elementwise_eager: float = 1.58
    """The same ratio if every operation is a separate kernel."""
    issue: float = 1.26
    """Number of passes through the load and store units, per pass of an element-wise kernel, that memory traffic does
    not hide."""
    cast_fp8: float = 0.667
    """Number of passes over a matmul's inputs for fp8 scaling and casting."""
    launch_s: float = 9.26e-06
    """Host time to launch one kernel without graphs or compilation."""
    link_nvswitch: float = 0.607
    link_mesh: float = 0.746
    link_pcie: float = 0.386
    nic: float = 0.685
    all_to_all: float = 0.672
    """Rate of an all-to-all inside a scale-up domain, relative to a ring, because of many small messages and
    permutations."""
    collective_latency_s: float = 1.58e-05
    hop_latency_s: float = 1.53e-06
    """Latency added by each additional rank of a ring."""
    tp_overlap: float = 0.743
    """Fraction of tensor-parallel traffic that is hidden behind matmuls, except for a ring's first chunk."""
    cp_overlap: float = 0.788
    ep_overlap: float = 0.351
    ep_overlap_network: float = 0.524
    """Hidden fraction of the traffic to experts on other nodes, if the schedule overlaps it."""
    dp_overlap: float = 0.851
    """Fraction of the backward (or forward) pass that can hide data-parallel traffic."""
    pp_overlap: float = 0.443
    contention: float = 0.29
    """Slowdown of computation by concurrent traffic, as a fraction of the traffic's time."""
    expert_imbalance: float = 0.209
    """Load of the busiest expert relative to the mean, minus one."""
    experts_ungrouped: float = 1.41
    """Time of an expert layer with 16 experts per rank that run one after another, relative to a grouped kernel."""
    jitter: float = 0.00925
    """Fraction added to the step time by waiting for the slowest device, per doubling of the device count."""
    optimizer_passes: float = 1.25
    """Memory traffic of the optimizer relative to the ideal."""
    step_s: float = 0.0204
    """Host work between steps: clipping, logging, and receiving data from the loader."""
    step_graphed_s: float = 0.00461
    """Host work between steps if kernel launches are replayed from a graph."""
    bubble: float = 0.837
    """Pipeline bubble relative to the ideal."""
    conv: float = 0.952
    """Rate of convolutions relative to a matrix multiplication of the same size."""
    conv_memory: float = 1.03
    """Actual number of passes over the activations of a convolutional network, relative to the number counted."""

    def as_dict(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def matmul_flops_per_s(chip: AcceleratorSpec, fmt: str, eff: Efficiency) -> float:
    """Return the rate of a large matrix multiplication in `fmt`: bf16, fp16, tf32, fp32, fp8, mxfp8 or nvfp4.

    If the chip does not support the format, the next wider one that it supports is used."""
    # Best large matrix multiplication relative to the bf16 peak: the measured value if there is one, otherwise a
    # typical one, or less if the board power cannot sustain the peak.
    fraction = TYPICAL_FRACTIONS.get(chip.vendor, TYPICAL_FRACTION)
    if chip.matmul_bf16_tflops and chip.bf16_tflops:
        fraction = chip.matmul_bf16_tflops / chip.bf16_tflops
    elif chip.tdp_w and chip.bf16_tflops:
        power = chip.tdp_w / chip.bf16_tflops / REFERENCE_W_PER_TFLOP
        fraction = min(fraction, TYPICAL_FRACTION * float(min(1.0, power) ** 0.3))
    else:
        fraction = min(fraction, UNKNOWN_FRACTION)
    half = (chip.bf16_tflops or chip.fp16_tflops) * 1e12
    if fmt in ("fp8", "mxfp8") and chip.fp8_tflops:
        measured = chip.matmul_fp8_tflops or chip.fp8_tflops * fraction * 0.95
        return eff.matmul_fp8 * measured * 1e12
    if fmt == "nvfp4" and (chip.fp4_tflops or chip.fp8_tflops):
        return eff.matmul_fp4 * fraction * (chip.fp4_tflops or chip.fp8_tflops) * 1e12
    if fmt == "fp16" and chip.fp16_tflops:
        return eff.matmul * fraction * chip.fp16_tflops * 1e12
    if fmt == "tf32":
        return eff.matmul * fraction * (chip.tf32_tflops or chip.fp32_tflops) * 1e12
    if fmt == "fp32":
        return eff.matmul * fraction * (chip.fp32_tflops or chip.tf32_tflops) * 1e12
    return eff.matmul * fraction * half


def tensor_core_generation(chip: AcceleratorSpec) -> int:
    """Return the generation of tensor cores for which attention kernels are written: 2 Ampere, 3 Hopper, 4 Blackwell. A
    chip whose formats are not stated is classified by its peak."""
    if not chip.bf16_tflops:
        return 1
    stated = 2 + (chip.fp8_tflops > 0) + (chip.fp4_tflops > 0)
    return stated if chip.fp8_tflops else 2 + sum(chip.bf16_tflops >= least for least in GENERATION_TFLOPS)


def peak_flops_per_s(chip: AcceleratorSpec, fmt: str) -> float:
    """Return the data sheet's dense peak in `fmt`, which is the denominator of MFU."""
    tflops = {
        "fp8": chip.fp8_tflops,
        "mxfp8": chip.fp8_tflops,
        "nvfp4": chip.fp4_tflops or chip.fp8_tflops,
        "tf32": chip.tf32_tflops,
        "fp32": chip.fp32_tflops,
        "fp16": chip.fp16_tflops,
    }.get(fmt, 0.0)
    return (tflops or chip.bf16_tflops or chip.fp16_tflops) * 1e12


def memory_bytes_per_s(chip: AcceleratorSpec, eff: Efficiency) -> float:
    return eff.memory * chip.memory_tb_per_s * 1e12


def link_bytes_per_s(chip: AcceleratorSpec, link_gb_per_s: float, peers: int, eff: Efficiency) -> float:
    """Return the rate of a collective of `peers` devices inside the scale-up domain, in one direction.

    In a mesh of 8 devices, each pair has one seventh of the links, so fewer peers reach a smaller part of the total. A
    bridge joins pairs; other devices communicate over PCIe."""
    raw = link_gb_per_s * 1e9
    if chip.link_kind == "nvswitch":
        return eff.link_nvswitch * raw
    if chip.link_kind == "mesh":
        return eff.link_mesh * raw * min(1.0, max(1, peers - 1) / 7)
    if chip.link_kind == "bridge":
        return eff.link_nvswitch * raw if peers <= 2 else eff.link_pcie * 63e9
    if chip.link_kind == "torus":
        return eff.link_mesh * raw
    return eff.link_pcie * raw


# The accelerators and models described in conf/, for tables of runs that refer to them by label.


T = TypeVar("T")


class LeftOutWarning(UserWarning):
    """Warns that a file in the user's ./conf is broken, so the option with that name is left out."""


def load_group(group: str, build: Callable[[JsonObject], T]) -> dict[str, T]:
    """Return `build` applied to every option of a group, by file name. The first folder that contains a file wins: the
    user's ./conf, then the installed one or the checkout's.

    Options include the options named in their `defaults`. A broken user file is left out with a LeftOutWarning, so that
    commands that do not need it still work. A shipped option with the same name is left out too, because the user
    replaced it. Raises UnreadableFileError or RecipeError if a shipped file is broken."""
    from trainspec_cli.core.reading.yaml_file import read_yaml  # imported late, because `plan` never needs it

    package = Path(__file__).resolve().parents[2]
    options: dict[str, JsonObject] = {}
    files: dict[str, Path] = {}
    broken: dict[str, str] = {}
    for folder in (Path.cwd() / "conf", package / "_data" / "conf", package.parent / "conf"):
        for path in sorted((folder / group).glob("*.yaml")):
            if path.stem in files:
                continue
            files[path.stem] = path
            try:
                content = read_yaml(path)
                if not isinstance(content, dict):
                    raise unreadable(path, f"holds {show_kind(content)}; expected `key: value` lines", line=1)
                if odd := [key for key in content if not isinstance(key, str)]:
                    line = _line_of(path, str(odd[0]))
                    raise unreadable(path, f"has a key that is not text: {odd[0]!r}", line=line)
                options[path.stem] = content
            except UnreadableFileError as error:
                broken[path.stem] = _why_left_out(path, error)
    built: dict[str, T] = {}
    for name in options:
        try:
            built[name] = build(_with_defaults(name, options, files, ()))
        except TrainspecError as error:
            broken[name] = _why_left_out(files[name], error)
    for name in sorted(broken):
        warnings.warn(broken[name], LeftOutWarning, stacklevel=2)
    return built


def _why_left_out(path: Path, error: TrainspecError) -> str:
    """Return the file, the line and the error as text. Re-raises the error if the file is not the user's."""
    own = Path.cwd() / "conf"
    if not path.is_relative_to(own):
        raise error
    problem = error.problems[0]
    shown = path.relative_to(own.parent)
    line = problem.line or _line_of(path, problem.path)
    why = problem.message.removeprefix(f"{path} ")
    return f"{shown}{f':{line}' if line else ''}: {why}; the file is ignored: fix it, or move it elsewhere"


def _line_of(path: Path, key: str) -> int | None:
    """Return the line of a top-level key in a file; None if it is not found."""
    from yaml import YAMLError

    from trainspec_cli.core.reading.yaml_file import MAX_BYTES, compose_yaml

    try:
        root = compose_yaml(read_text(path, MAX_BYTES))
    except (UnreadableFileError, YAMLError):
        return None
    top = key.partition(".")[0]
    pairs = root.value if root is not None and isinstance(root.value, list) else []
    return next((pair[0].start_mark.line + 1 for pair in pairs if str(pair[0].value) == top), None)


def _with_defaults(
    name: str, options: Mapping[str, JsonObject], files: Mapping[str, Path], within: tuple[str, ...]
) -> JsonObject:
    """Return an option merged over the options named in its `defaults`. `within`: the options that led to it."""
    own = options[name]
    entries = own.get("defaults")
    named = [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
    whole: JsonObject = {}
    for entry in (entry for entry in named if entry != "_self_" and "/" not in entry):
        if entry in (*within, name):
            why = f"its defaults lead back to it: {' -> '.join((*within, name, entry))}"
        elif entry not in options:
            why = f"its defaults name {entry}, {'which is broken' if entry in files else 'but there is no such option'}"
        else:
            whole = _laid_over(whole, _with_defaults(entry, options, files, (*within, name)))
            continue
        raise RecipeError(Problem("bad_default", why, "defaults"))
    return _laid_over(whole, own)


def _laid_over(below: JsonObject, above: JsonObject) -> JsonObject:
    """Merge `above` over `below`, section by section."""
    whole = {**below}
    for key, value in above.items():
        under = whole.get(key)
        both = isinstance(under, dict) and isinstance(value, dict)
        whole[key] = _laid_over(cast("JsonObject", under), cast("JsonObject", value)) if both else value
    return whole


def words(label: str) -> tuple[str, ...]:
    """`H100-SXM-80GB` -> (h100, sxm, 80gb): the parts used in comparisons."""
    return tuple(re.findall(r"[a-z0-9.]+", label.lower().replace("nvidia", "").replace("tesla", "")))


@lru_cache(maxsize=1)
def accelerators() -> tuple[AcceleratorSpec, ...]:
    """Return the accelerators without their sources, so that they are hashable."""
    return tuple(load_group("accelerator", build_accelerator).values())


def build_accelerator(values: JsonObject) -> AcceleratorSpec:
    return from_plain(AcceleratorSpec, {**without_defaults(values), "sources": None})


def without_defaults(values: JsonObject) -> JsonObject:
    """Return the values without keys that describe the file itself."""
    return {key: value for key, value in values.items() if key not in ("defaults", VERSION_KEY)}


VARIANTS = frozenset({"pcie", "nvl", "500w", "hbm2e"})
"""Words that distinguish variants in labels: `NVIDIA H100 80GB HBM3` is the SXM part."""


@lru_cache(maxsize=256)
def find_accelerator(label: str) -> AcceleratorSpec | None:
    """Return the chip that a label names: the one with the same first word and the most other words in common. In case
    of a tie, the shorter name wins."""
    wanted = words(label)
    if not wanted:
        return None
    best: tuple[tuple[int, int, int], AcceleratorSpec] | None = None
    for chip in accelerators():
        has = words(chip.name)
        if "".join(has) == "".join(wanted):
            return chip
        if not any(word in has for word in wanted if re.search(r"\d", word) and not word.endswith("gb")):
            continue
        unsaid = len(VARIANTS & set(has) - set(wanted))
        score = (len(set(has) & set(wanted)), -unsaid, -len(has))
        if best is None or score > best[0]:
            best = score, chip
    return best[1] if best else None


@lru_cache(maxsize=1)
def models() -> dict[str, ModelSpec]:
    """Return the models described in conf/, except for `auto`, which is read from a checkpoint."""
    return {name: model for name, model in load_group("model", _model).items() if model is not None}


def _model(values: JsonObject) -> ModelSpec | None:
    known = without_defaults(values)
    if known.get("family", "auto") == "auto":
        return None
    if head_dim := derive_head_dim(known):
        known |= {"head_dim": head_dim}
    model: ModelSpec = from_plain(cast("Any", choose_section(ModelSpec, known)), known)
    return model


def find_model(label: str) -> ModelSpec | None:
    """Return the described model whose name equals the label or is a prefix of it (`resnet50-v1.5` is resnet50)."""
    plain = "".join(words(label.replace("_", "-")))
    known = {name.replace("_", ""): model for name, model in models().items()}
    fitting = [name for name in known if plain == name or plain.startswith(name)]
    return known[max(fitting, key=len)] if fitting else None
