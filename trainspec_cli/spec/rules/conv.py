"""What a convolutional network can be trained on, and which of them the engine knows."""

from __future__ import annotations

from collections.abc import Iterator

from trainspec_cli.errors import Problem
from trainspec_cli.spec.recipe.model import ConvModel
from trainspec_cli.spec.recipe.run import RunSpec

MAX_PHANTOM_CLASSES = 8
"""Tissues, or kinds of lesions, of phantoms that differ by enough."""


def data_of_its_kind(spec: RunSpec) -> Iterator[Problem]:
    """Images for convolutions, tokens for all others."""
    conv, unit = isinstance(spec.model, ConvModel), spec.data.unit
    if conv and unit == "tokens":
        message = f"data={spec.data.source} is text, and a convolutional network reads images or volumes"
        yield Problem("unsupported", message, "data.source", "type data=phantom, data=images or data=volumes")
    elif not conv and unit == "samples":
        message = f"data={spec.data.source} has no tokens, which a {spec.model.family} model reads"
        yield Problem("unsupported", message, "data.source", "type data=text, or another model")
    elif conv and spec.data.seq_len != 1:
        message = f"`data.seq_len` is {spec.data.seq_len}; a sample is one image or volume"
        yield Problem("unsupported", message, "data.seq_len", "type data.seq_len=1")


def known_architecture(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if not isinstance(model, ConvModel):
        return
    if model.architecture not in ("resnet", "unet"):
        message = f"the engine trains a resnet or a unet; a {model.architecture} can be planned"
        yield Problem("unsupported", message, "model.architecture", "type model.architecture=resnet")
    elif model.architecture == "resnet" and len(model.widths) != len(model.blocks):
        message = f"{len(model.widths)} stages in `model.widths`, {len(model.blocks)} in `model.blocks`"
        yield Problem("not_divisible", message, "model.blocks", "give both a number for every stage")


def fitting_input(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if not isinstance(model, ConvModel):
        return
    dims = len(model.input_size)
    if dims not in ((2, 3) if model.segments else (2,)):
        allowed = "a unet takes 2 or 3" if model.segments else f"a {model.architecture} takes 2"
        yield Problem("out_of_range", f"`model.input_size` has {dims} dimensions; {allowed}", "model.input_size")
    shrinks_by = 2 ** len(model.widths)
    if model.segments and any(extent % shrinks_by for extent in model.input_size):
        message = f"`model.input_size` is {list(model.input_size)}; {len(model.widths)} levels halve every extent"
        near = ",".join(str(max(1, round(extent / shrinks_by)) * shrinks_by) for extent in model.input_size)
        yield Problem("not_divisible", message, "model.input_size", f"type model.input_size=[{near}]")


def phantom_classes(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if not isinstance(model, ConvModel) or spec.data.source != "phantom":
        return
    fewest = 2 if model.segments else 1
    if not fewest <= model.num_classes <= MAX_PHANTOM_CLASSES:
        message = f"`model.num_classes` is {model.num_classes}; phantoms have {fewest} to {MAX_PHANTOM_CLASSES} classes"
        yield Problem("out_of_range", message, "model.num_classes", f"type model.num_classes={MAX_PHANTOM_CLASSES}")


def eager_alone(spec: RunSpec) -> Iterator[Problem]:
    """Inductor of torch 2.13 fails to lower the gradient of a strided convolution on a CPU."""
    if isinstance(spec.model, ConvModel) and spec.compile:
        message = "convolutional networks are not compiled by this version"
        yield Problem("unsupported", message, "compile", "type compile=false")


CONV_RULES = (data_of_its_kind, known_architecture, fitting_input, phantom_classes, eager_alone)
