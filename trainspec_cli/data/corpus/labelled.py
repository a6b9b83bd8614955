"""Labelled samples (images, volumes, phantoms) of a DataSpec, read by number.

An image has the shape (C, ...) in fp32, with mean 0 and variance 1. Its label is one class, or a class for every voxel
(int64)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from trainspec_cli.core.reading.files import expand
from trainspec_cli.data.corpus.imaging.images import ImageFolder
from trainspec_cli.data.corpus.imaging.phantom import Phantoms
from trainspec_cli.data.corpus.imaging.volumes import VolumeFolder
from trainspec_cli.data.corpus.shards import Split
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import DataSpec

Labelled = tuple[np.ndarray, np.ndarray]
"""(image, label)"""


class LabelledSamples(Protocol):
    def count(self, split: Split) -> int: ...

    def train(self, index: int, generator: np.random.Generator) -> Labelled:
        """Return training sample `index`. The random generator chooses its crop."""

    def heldout(self, index: int) -> Labelled:
        """Return held-out sample `index`, always with the same crop."""


def open_samples(data: DataSpec, model: ConvModel, folder: Path | None) -> LabelledSamples:
    """Open the samples.

    Raises RecipeError if none exist, or if their sizes, channels or classes do not match the model."""
    if data.source == "phantom":
        return Phantoms(data, model)
    assert folder is not None, f"{data.source} are read from a folder"
    return ImageFolder(folder, data, model) if data.source == "images" else VolumeFolder(folder, data, model)


def find_samples(data: DataSpec, model: ConvModel) -> Path | None:
    """Check the samples, and return their folder; None for phantoms. Raises the same errors as `open_samples`."""
    folder = expand(data.path).absolute() if data.path else None
    open_samples(data, model, folder)
    return folder
