"""The table of operations and their kernels (backends). Only the engine imports the kernels themselves."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from trainspec_cli.recipe.field_types import AUTO

TORCH = "torch"
"""The engine's default backend."""


@dataclass(frozen=True)
class Backend:
    source: str
    """`module:function` below engine/, which is imported when the backend is used."""
    on: Literal["any", "cuda"] = "any"
    package: str = ""
    """The import name of the package that the backend needs."""
    extra: str = ""
    """The trainspec extra that installs the package."""
    options: dict[str, int] = field(default_factory=dict)
    """Additional arguments for the function."""
    since_torch: tuple[int, int] = (2, 11)
    fused: bool = False
    """True if torch.compile can fuse the plain function."""
    compiles: bool = False
    """True if the function calls torch.compile itself."""
    more_memory: bool = False
    """True if the backend needs more memory than a plan counts; `auto` then never chooses it."""
    whole_vocabulary: bool = False
    """True if the backend cannot handle a vocabulary that is sharded across tp ranks."""

    @property
    def needs_compiler(self) -> bool:
        return self.fused or self.compiles

    def missing_package(self) -> str:
        return self.package if self.package and importlib.util.find_spec(self.package) is None else ""


def _fused(source: str) -> Backend:
    return Backend(source, fused=True)


def _liger(name: str, whole_vocabulary: bool = False) -> Backend:
    source = f"kernels.libraries:{name}"
    return Backend(source, on="cuda", package="liger_kernel", extra="kernels", whole_vocabulary=whole_vocabulary)


KERNELS: dict[str, dict[str, Backend]] = {
    "attention": {
        TORCH: Backend("models.attention:attention"),
        "flash": Backend("kernels.attention:flash"),
        "expanded": Backend("kernels.attention:expanded", more_memory=True),
        "math": Backend("kernels.attention:math", more_memory=True),
        "efficient": Backend("kernels.attention:efficient", on="cuda"),
        "cudnn": Backend("kernels.attention:cudnn", on="cuda"),
        "flex": Backend("kernels.attention:flex", on="cuda", compiles=True),
    },
    "rms_norm": {
        TORCH: Backend("models.layers:rms_norm"),
        "frugal": Backend("kernels.frugal:rms_norm"),
        "compiled": _fused("models.layers:rms_norm"),
        "liger": _liger("rms_norm"),
    },
    "swiglu": {
        TORCH: Backend("models.layers:swiglu"),
        "frugal": Backend("kernels.frugal:swiglu"),
        "compiled": _fused("models.layers:swiglu"),
        "liger": _liger("swiglu"),
    },
    "rope": {
        TORCH: Backend("models.rope:apply_rope"),
        "halves": Backend("kernels.frugal:rope"),
        "compiled": _fused("models.rope:apply_rope"),
        "liger": _liger("rope"),
    },
    "linear_cross_entropy": {
        TORCH: Backend("models.cross_entropy:linear_cross_entropy"),
        "chunks_16mib": Backend("models.cross_entropy:linear_cross_entropy", options={"chunk_bytes": 2**24}),
        "chunks_512mib": Backend(
            "models.cross_entropy:linear_cross_entropy", options={"chunk_bytes": 2**29}, more_memory=True
        ),
        "native": Backend("kernels.cross_entropy:native", since_torch=(2, 13), whole_vocabulary=True),
        "full": Backend("kernels.cross_entropy:full", more_memory=True, whole_vocabulary=True),
        "liger": _liger("linear_cross_entropy", whole_vocabulary=True),
    },
    "grouped_matmul": {
        TORCH: Backend("models.experts:grouped_matmul"),
        "loop": Backend("models.experts:matmul_in_turn"),
    },
    "ssd_scan": {
        TORCH: Backend("models.mamba2:selective_scan"),
        "block_32": Backend("models.mamba2:selective_scan", options={"block": 32}),
        "block_64": Backend("models.mamba2:selective_scan", options={"block": 64}),
        "block_256": Backend("models.mamba2:selective_scan", options={"block": 256}, more_memory=True),
        "compiled": _fused("models.mamba2:selective_scan"),
        "fla": Backend("kernels.libraries:ssd_scan", on="cuda", package="fla", extra="kernels"),
    },
    "adamw": {
        TORCH: Backend("optim.optimizer:fused"),
        "foreach": Backend("kernels.adamw:looped", options={"foreach": 1}, more_memory=True),
        "for_loop": Backend("kernels.adamw:looped", options={"foreach": 0}),
        "torchao": Backend("kernels.adamw:torchao", package="torchao", extra="float8", compiles=True),
    },
}
"""Operation -> backends by name. All backends of an operation take the same inputs and return the same outputs."""


@dataclass(frozen=True)
class KernelSpec:
    """The backend of each operation. auto: the fastest correct one, measured once on this machine."""

    attention: str = TORCH
    """The backend of attention."""
    rms_norm: str = TORCH
    """The backend of RMSNorm."""
    swiglu: str = TORCH
    """The backend of SwiGLU."""
    rope: str = TORCH
    """The backend of the rotary embedding."""
    linear_cross_entropy: str = TORCH
    """The backend of the output head together with its loss."""
    grouped_matmul: str = TORCH
    """The backend of the experts' matrix multiplications."""
    ssd_scan: str = TORCH
    """The backend of the state-space scan."""
    adamw: str = TORCH
    """The backend of the AdamW update."""

    @property
    def by_op(self) -> dict[str, str]:
        return asdict(self)

    @property
    def open_ops(self) -> tuple[str, ...]:
        """Return the operations whose backend has not been measured yet."""
        return tuple(op for op, backend in self.by_op.items() if backend == AUTO)

    @property
    def changed(self) -> dict[str, str]:
        """Return the operations whose backend differs from the default."""
        return {op: backend for op, backend in self.by_op.items() if backend not in (TORCH, AUTO)}


IN_BLOCKS = ("attention", "rms_norm", "swiglu", "rope", "grouped_matmul", "ssd_scan")
"""Operations that `compile: true` fuses with the operations around them."""


@dataclass(frozen=True)
class KernelTrial:
    """One process's measurement of a backend's forward and backward passes, with the shapes of the run."""

    ratios: tuple[float, ...] = ()
    """Ratio of the backend's time to the default's in each round; every round measures all backends."""
    error: float | None = None
    """The largest relative error (Euclidean norm) of its output and gradients relative to fp64; None if it was not
    tried, failed, or returned a non-finite value."""
    allowed_error: float | None = None
    untried: str = ""
    """Why it was not tried."""
    failure: str = ""
    """The error that it raised."""


@dataclass(frozen=True)
class KernelTrials:
    """One process's trials; operations that the run does not use are omitted."""

    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The shapes of each operation's calls: `6 x (8, 6, 512, 64) ...`."""
    trials: dict[str, dict[str, KernelTrial]] = field(default_factory=dict)
    """The trials by operation and backend."""


Verdict = Literal["default", "chosen", "not faster", "wrong", "failed", "not tried"]


@dataclass(frozen=True)
class KernelFigure:
    """A backend compared with torch's default across all processes."""

    verdict: Verdict
    reason: str = ""
    """For `not faster`, the faster backend; otherwise the reason."""
    ratio: float | None = None
    """Ratio of the backend's time to the default's: the median of all rounds."""
    quartiles: tuple[float, ...] = ()
    error: float | None = None
    allowed_error: float | None = None


@dataclass(frozen=True)
class KernelTable:
    """A comparison of backends on one machine, with one torch version and the shapes of one run."""

    device: str
    compute: str
    torch: str
    calls: dict[str, tuple[str, ...]] = field(default_factory=dict)
    figures: dict[str, dict[str, KernelFigure]] = field(default_factory=dict)
    """The results by operation and backend, as in `KernelTrials`."""

    def chosen(self, op: str) -> str:
        figures = self.figures.get(op, {})
        return next((backend for backend, figure in figures.items() if figure.verdict == "chosen"), TORCH)

    def resolve(self, wanted: KernelSpec) -> KernelSpec:
        """Return `wanted` with `auto` replaced by the chosen backends."""
        return replace(wanted, **{op: self.chosen(op) for op in wanted.open_ops})
