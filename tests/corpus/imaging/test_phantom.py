"""Phantoms: the same for the same seed and index, labelled with what is in them."""

from __future__ import annotations

import numpy as np
import pytest

from trainspec_cli.corpus.imaging.phantom import Phantoms, acquire, contrast, draw_tissues, ellipsoid
from trainspec_cli.spec.recipe.data import DataSpec, PhantomSpec
from trainspec_cli.spec.recipe.model import ConvModel

UNET = ConvModel("unet", (16, 24, 16), widths=(4,), in_channels=2, num_classes=4)
RESNET = ConvModel("resnet", (32, 32), widths=(4,), blocks=(1,), in_channels=1, num_classes=8)


def phantoms(model: ConvModel, seed: int = 0) -> Phantoms:
    return Phantoms(DataSpec(1, "phantom", heldout_fraction=0.1, phantom=PhantomSpec(50, seed)), model)


def unused() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("model", [UNET, RESNET])
def test_a_phantom_is_a_function_of_seed_and_index(model):
    first, again = (phantoms(model).train(7, unused()) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one, other)
    others = [phantoms(model).train(8, unused()), phantoms(model, 1).train(7, unused()), phantoms(model).heldout(7)]
    assert all(not np.array_equal(first[0], image) for image, _ in others)


def test_volumes_have_a_tissue_in_every_voxel():
    image, label = phantoms(UNET).train(0, unused())
    assert image.shape == (2, 16, 24, 16) and image.dtype == np.float32
    assert label.shape == (16, 24, 16) and label.dtype == np.int64
    assert image.mean(axis=(1, 2, 3)) == pytest.approx([0, 0], abs=1e-4)
    assert image.std(axis=(1, 2, 3)) == pytest.approx([1, 1], abs=1e-3)
    seen = np.unique(np.stack([phantoms(UNET).train(index, unused())[1] for index in range(10)]))
    assert seen.tolist() == [0, 1, 2, 3]


def test_every_kind_of_lesion_is_drawn():
    kinds = [int(phantoms(RESNET).train(index, unused())[1]) for index in range(50)]
    assert set(kinds) == set(range(8))
    assert (phantoms(RESNET).count("train"), phantoms(RESNET).count("heldout")) == (50, 5)


def test_an_ellipsoid_fills_its_volume():
    inside = ellipsoid((64, 64, 64), np.zeros(3), np.array([0.8, 0.5, 0.4]), np.eye(3))
    assert 8 * inside.mean() == pytest.approx(4 / 3 * np.pi * 0.8 * 0.5 * 0.4, rel=0.08)


def test_air_has_the_noise_of_a_magnitude_image():
    """Of two channels of Gaussian noise the magnitude is Rayleigh: mean and deviation in a ratio of 1.913."""
    generator = np.random.default_rng(0)
    image = acquire(generator, np.zeros((64, 64, 32), dtype=np.int64), 1)[0]
    raw = image - image.min()
    assert raw.mean() / raw.std() == pytest.approx(1.913, rel=0.02)


def test_tissues_differ_in_every_channel():
    for channel in range(3):
        assert np.diff(np.sort(contrast(channel))).min() > 0.05
    assert draw_tissues(np.random.default_rng(1), (32, 32), 2).max() == 1
