"""Synthetic MR-like images: ellipsoids of tissue under a bias field, with Rician noise.

Sample `index` is a pure function of the seed and the index, so nothing is stored and any rank can generate any sample.
For a U-Net, every voxel is labelled with its tissue. For a classifier, the sample is labelled with the kind of its
lesion."""

from __future__ import annotations

import math

import numpy as np

from trainspec_cli.data.corpus.shards import Split
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import DataSpec

NOISE_STD = 0.05
"""Noise in each of the receiver's two channels (Gudbjartsson and Patz 1995); tissue intensities are between 0 and 1."""
BIAS_STRENGTH = 0.3
"""The largest deviation of the receiver's sensitivity from 1, which occurs at the edges."""
SEED = 0
"""The seed is fixed, so that every run gets the same images. They stand in for a data set, and `train.seed` determines
their order in a run. Another seed would produce another data set with the same statistics."""
HELDOUT_STREAM = 1
"""A seed word that keeps held-out samples distinct from training samples of the same index."""


class Phantoms:
    def __init__(self, data: DataSpec, model: ConvModel):
        self.model = model
        self._counts = {
            "train": data.phantom.samples,
            "heldout": max(1, round(data.phantom.samples * data.heldout_fraction)),
        }

    def count(self, split: Split) -> int:
        return self._counts[split]

    def train(self, index: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Generate sample `index`. The generator for crops is not used, because a phantom is generated at the model's
        size."""
        return self._make(np.random.default_rng([SEED, 0, index]))

    def heldout(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._make(np.random.default_rng([SEED, HELDOUT_STREAM, index]))

    def _make(self, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        model = self.model
        if model.segments:
            tissues = draw_tissues(generator, model.input_size, model.num_classes)
            label = tissues
        else:
            label = np.asarray(generator.integers(model.num_classes), dtype=np.int64)
            tissues = draw_lesion(generator, model.input_size, int(label))
        return acquire(generator, tissues, model.in_channels), label


def draw_tissues(generator: np.random.Generator, size: tuple[int, ...], num_classes: int) -> np.ndarray:
    """Return the labels of a head (1) containing progressively smaller organs (2, 3, ...), as int64 of shape `size`; 0
    is air."""
    tissues = np.zeros(size, dtype=np.int64)
    head = generator.uniform(0.65, 0.9, len(size))
    tissues[ellipsoid(size, np.zeros(len(size)), head, random_rotation(generator, len(size)))] = 1
    for tissue in range(2, num_classes):
        radii = generator.uniform(0.22, 0.4, len(size)) * (1 - 0.06 * tissue)
        centre = generator.uniform(-0.4, 0.4, len(size)) * head
        inside = ellipsoid(size, centre, radii, random_rotation(generator, len(size)))
        tissues[inside & (tissues > 0)] = tissue
    return tissues


def draw_lesion(generator: np.random.Generator, size: tuple[int, ...], kind: int) -> np.ndarray:
    """Return the labels of a head (1) with one lesion. The lesion is a shell for odd kinds, and solid for even ones.
    Each pair of kinds has a different tissue."""
    dims = len(size)
    tissues = np.zeros(size, dtype=np.int64)
    tissues[ellipsoid(size, np.zeros(dims), generator.uniform(0.75, 0.95, dims), np.eye(dims))] = 1
    centre = generator.uniform(-0.35, 0.35, dims)
    radius = generator.uniform(0.25, 0.35)
    turned = random_rotation(generator, dims)
    radii = radius * generator.uniform(0.85, 1.15, dims)
    tissues[ellipsoid(size, centre, radii, turned)] = 2 + kind // 2
    if kind % 2:
        tissues[ellipsoid(size, centre, 0.6 * radii, turned)] = 1
    return tissues


def ellipsoid(size: tuple[int, ...], centre: np.ndarray, radii: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """Return a mask of the voxels inside the ellipsoid, as bool of shape `size`. Coordinates range from -1 to 1 along
    each axis."""
    axes = [np.linspace(-1, 1, extent, dtype=np.float32) - middle for extent, middle in zip(size, centre, strict=True)]
    grid = np.meshgrid(*axes, indexing="ij", sparse=True)
    reach = np.zeros(size, dtype=np.float32)
    for row, radius in zip(rotation.astype(np.float32), radii, strict=True):
        reach += np.square(sum(weight * axis for weight, axis in zip(row, grid, strict=True)) / np.float32(radius))
    return reach <= 1


def random_rotation(generator: np.random.Generator, dims: int) -> np.ndarray:
    """Return a random orthogonal matrix: the Q of a Gaussian matrix."""
    return np.linalg.qr(generator.normal(size=(dims, dims)))[0]


def acquire(generator: np.random.Generator, tissues: np.ndarray, channels: int) -> np.ndarray:
    """Simulate a scan of `tissues` in `channels` contrasts: (C, ...) in fp32, with mean 0 and variance 1."""
    images = []
    for channel in range(channels):
        signal = contrast(channel)[tissues] * bias_field(generator, tissues.shape)
        noise = generator.normal(0, NOISE_STD, (2, *tissues.shape)).astype(np.float32)
        image = np.hypot(signal + noise[0], noise[1])
        images.append((image - image.mean()) / (image.std() + 1e-6))
    return np.stack(images).astype(np.float32)


def contrast(channel: int) -> np.ndarray:
    """Return each tissue's brightness in a channel: air is dark, the head is medium, and the others differ from the
    head."""
    steps = np.array([0.0, 0.45, 1.0, 0.2, 0.75, 0.1, 0.88, 0.3], dtype=np.float32)
    return np.concatenate([steps[:2], np.roll(steps[2:], channel)])


def bias_field(generator: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Return a smooth gain that is 1 in the middle and has a slope and a curvature along each axis."""
    gain = np.ones(size, dtype=np.float32)
    for axis, extent in enumerate(size):
        along = np.linspace(-1, 1, extent, dtype=np.float32)
        slope, bend = generator.uniform(-1, 1, 2).astype(np.float32) * (BIAS_STRENGTH / math.sqrt(len(size)))
        shape = [-1 if dim == axis else 1 for dim in range(len(size))]
        gain += (slope * along + bend * along**2).reshape(shape)
    return gain
