"""Constants and formatting of quantities. A GiB is 2**30 bytes, a GB 1e9."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_si(value: float, unit: str = "", digits: int = 3) -> str:
    """Format with an SI prefix: `1.25e12` -> `1.25 T`; values below 1,000 get none."""
    for scale, prefix in _SI:
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g} {prefix}{unit}".rstrip()
    return f"{value:.{digits}g} {unit}".rstrip()


def format_count(value: float) -> str:
    """Format counts of parameters or tokens: `6_400_000` -> `6.4M`, `8.03e9` -> `8.03B`."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.4g}"


def format_bytes(value: float) -> str:
    """Format with a binary prefix: `2**31` -> `2.00 GiB`."""
    for scale, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format in three digits: `0.0545` -> `54.5 ms`, `12.345` -> `12.3 s`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def format_duration(seconds: float) -> str:
    """Format in at most two units: `93.2` -> `1 min 33 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"
