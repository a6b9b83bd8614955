"""The rates that a chip and its links achieve: the maker's figures times a few measured efficiencies."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainspec_cli.recipe.keys.cluster import AcceleratorSpec

REFERENCE_W_PER_TFLOP = 0.7
"""Board power over bf16 peak of the chips whose best matmul was measured (H100 SXM); with less, the clock falls."""
FRACTIONS = frozenset(
    {
        *("matmul", "attention_forward", "attention_backward", "memory", "cache_reuse"),
        *("link_nvswitch", "link_mesh", "link_pcie", "nic"),
        *("tp_overlap", "cp_overlap", "ep_overlap", "ep_overlap_network", "dp_overlap", "pp_overlap"),
    }
)
"""Efficiencies that cannot pass 1."""


@dataclass(frozen=True)
class Efficiency:
    """The planner's few free parameters. Fitted to published runs (`trainspec backtest --fit`), the same for all chips.

    Fractions are of the chip's sustained matmul rate, its memory bandwidth or a link's bandwidth.
    """

    matmul: float = 0.937
    """Fraction of the best matmul measured on a chip: clocks under a training load, cold caches."""
    matmul_fp8: float = 0.913
    matmul_fp4: float = 0.674
    gemm_memory: float = 0.472
    """Part of a matrix product's memory traffic that its arithmetic does not hide."""
    kernel_s: float = 6.38e-06
    """Ramp-up and tail of one kernel on the device."""
    tail_waves: float = 0.466
    """Fraction of a wave of tiles that is idle at the end of a matrix product."""
    misalignment: float = 0.36
    """Rate lost each time a matrix dimension's largest power of two halves below 64 elements (tensor-core tiles)."""
    attention_forward: float = 0.694
    """Fused attention's rate over the sustained bf16 matmul rate."""
    attention_backward: float = 0.605
    attention_older: float = 0.626
    """Rate of attention kernels written for the generation before the chip's (no Hopper or later instructions)."""
    exponentials: float = 0.497
    """Part of attention's exponentials that its products do not hide."""
    memory: float = 0.877
    """Fraction of the memory bandwidth that element-wise kernels reach."""
    cache_reuse: float = 0.372
    """Part of the memory traffic that a cache much larger than the tensors saves."""
    elementwise: float = 1.11
    """Passes over memory actually made, over those counted for lightly fused kernels."""
    elementwise_eager: float = 1.48
    """The same when each operation of a framework is a kernel of its own."""
    issue: float = 1.06
    """Passes of element-wise kernels through the load and store units that the memory's traffic does not hide."""
    cast_fp8: float = 0.746
    """Passes over a matmul's inputs that fp8 scaling and casting take."""
    launch_s: float = 8.46e-06
    """Host time to launch one kernel without graphs or compilation."""
    link_nvswitch: float = 0.684
    link_mesh: float = 0.714
    link_pcie: float = 0.473
    nic: float = 0.673
    all_to_all: float = 0.643
    """Rate of an all-to-all inside a scale-up domain over a ring's: many small messages, permutations."""
    collective_latency_s: float = 1.52e-05
    hop_latency_s: float = 1.51e-06
    """Added by each further rank of a ring."""
    tp_overlap: float = 0.713
    """Part of tensor-parallel traffic hidden behind matmuls, of all chunks of a ring but the first."""
    cp_overlap: float = 0.721
    ep_overlap: float = 0.328
    ep_overlap_network: float = 0.503
    """The same where experts are spread over nodes, and the schedule is built to hide it."""
    dp_overlap: float = 0.8
    """Part of the backward (or forward) that data-parallel traffic can hide behind."""
    pp_overlap: float = 0.471
    contention: float = 0.226
    """Hidden traffic takes this part of its time from the compute beside it."""
    expert_imbalance: float = 0.201
    """The fullest expert's share over the mean, less one."""
    experts_ungrouped: float = 1.39
    """Time of an expert layer over a grouped kernel's, where 16 experts of a rank run one after the other."""
    jitter: float = 0.0103
    """Step time added by waiting for the slowest, for each doubling of the devices."""
    optimizer_passes: float = 1.22
    """Memory traffic of the optimizer over its ideal."""
    step_s: float = 0.02
    """Host work between steps: clipping, logging, the data loader's hand-over."""
    step_graphed_s: float = 0.00441
    """The same where launches are replayed."""
    bubble: float = 0.898
    """The pipeline bubble over its ideal."""
    conv: float = 0.886
    """Convolutions' rate over that of a matrix product of the same size."""
    conv_memory: float = 1.02
    """Passes over activations of a convolutional network, over those counted."""

    def as_dict(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def sustained_fraction(chip: AcceleratorSpec) -> float:
    """Best large matmul over the bf16 peak: as measured, else 0.8, less where board power is short for the peak."""
    if chip.matmul_bf16_tflops and chip.bf16_tflops:
        return chip.matmul_bf16_tflops / chip.bf16_tflops
    if not chip.tdp_w or not chip.bf16_tflops:
        return 0.75
    power = chip.tdp_w / chip.bf16_tflops / REFERENCE_W_PER_TFLOP
    return 0.80 * float(min(1.0, power) ** 0.3)


EXPONENTIALS_PER_FLOP = 1 / 250
"""Exponential rate of a chip whose rate is not described, over its bf16 peak (H100: 16 a clock a multiprocessor)."""


def exponentials_per_s(chip: AcceleratorSpec) -> float:
    """Rate of the special-function units, which softmax needs: they did not grow with the tensor cores."""
    return (chip.tera_exponentials_per_s or (chip.bf16_tflops or chip.fp16_tflops) * EXPONENTIALS_PER_FLOP) * 1e12


def matmul_flops_per_s(chip: AcceleratorSpec, fmt: str, eff: Efficiency) -> float:
    """Rate of a large matrix product in `fmt`: bf16, fp16, tf32, fp32, fp8, mxfp8 or nvfp4.

    A chip without a format multiplies in the next wider one that it has.
    """
    fraction = sustained_fraction(chip)
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


def peak_flops_per_s(chip: AcceleratorSpec, fmt: str) -> float:
    """The sheet's dense peak in `fmt`: the denominator of MFU."""
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


LOADS_OVER_MEMORY = 4.7
"""First-level cache bandwidth over the memory's, of a chip that does not describe it (A100: 4.8, H100: 4.7)."""


def load_store_bytes_per_s(chip: AcceleratorSpec) -> float:
    """Rate of the multiprocessors' load and store units: it grows with their number and clock, not with the memory."""
    return (chip.load_store_tb_per_s or LOADS_OVER_MEMORY * chip.memory_tb_per_s) * 1e12


def link_bytes_per_s(chip: AcceleratorSpec, link_gb_per_s: float, peers: int, eff: Efficiency) -> float:
    """Achieved by a collective of `peers` devices inside the scale-up domain, one direction.

    A mesh gives each pair of devices one seventh of the links (8 devices): fewer peers reach less of the whole.
    A bridge joins pairs; beyond a pair its devices speak over PCIe.
    """
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
