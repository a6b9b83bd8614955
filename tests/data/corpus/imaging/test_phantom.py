"""Phantoms: the same for the same seed and index, labelled with what is in them."""

from __future__ import annotations

import numpy as np
import pytest

from trainspec_cli.data.corpus.imaging.phantom import (
    SEED,
    Phantoms,
    acquire,
    bias_field,
    contrast,
    draw_lesion,
    draw_tissues,
    ellipsoid,
    random_rotation,
)
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import DataSpec, PhantomSpec

UNET = ConvModel("unet", (16, 24, 16), widths=(4,), in_channels=2, num_classes=4)
RESNET = ConvModel("resnet", (32, 32), widths=(4,), blocks=(1,), in_channels=1, num_classes=8)


def phantoms(model: ConvModel) -> Phantoms:
    return Phantoms(DataSpec(1, "phantom", heldout_fraction=0.1, phantom=PhantomSpec(50)), model)


def unused() -> np.random.Generator:
    return np.random.default_rng()


@pytest.mark.parametrize("model", [UNET, RESNET])
def test_a_phantom_is_a_function_of_split_and_index(model):
    first, again = (phantoms(model).train(7, unused()) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one, other)
    others = [phantoms(model).train(8, unused()), phantoms(model).heldout(7)]
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


@pytest.mark.parametrize(("kind", "tissue", "hollow"), [(0, 2, False), (1, 2, True), (6, 5, False), (7, 5, True)])
def test_a_lesion_is_solid_or_a_shell_of_its_own_tissue(kind: int, tissue: int, hollow: bool) -> None:
    """A shell leaves out 0.6 of each radius: 0.36 of the area."""
    areas = {}
    for shape in (kind, kind - kind % 2):
        drawn = draw_lesion(np.random.default_rng(3), (200, 200), shape)
        assert np.unique(drawn).tolist() == [0, 1, tissue]
        areas[shape] = (drawn == tissue).sum()
    assert areas[kind] / areas[kind - kind % 2] == pytest.approx(0.64 if hollow else 1, rel=0.02)


def test_the_last_axis_of_an_ellipsoid_is_the_columns() -> None:
    inside = ellipsoid((21, 21), np.array([0.5, -0.5]), np.array([0.2, 0.4]), np.eye(2))
    rows, columns = np.nonzero(inside)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (13, 17, 1, 9)


def test_a_quarter_turn_swaps_the_radii() -> None:
    turned = ellipsoid((21, 21), np.zeros(2), np.array([0.2, 0.8]), np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert np.array_equal(turned, ellipsoid((21, 21), np.zeros(2), np.array([0.8, 0.2]), np.eye(2)))


def test_a_rotation_keeps_lengths() -> None:
    turn = random_rotation(np.random.default_rng(0), 3)
    assert turn @ turn.T == pytest.approx(np.eye(3))


def test_the_receivers_gain_is_one_in_the_middle_and_smooth() -> None:
    gain = bias_field(np.random.default_rng(0), (21, 31))
    assert gain[10, 15] == 1
    along = np.linspace(-1, 1, 21)
    slope, bend = (gain[-1, 15] - gain[0, 15]) / 2, (gain[-1, 15] + gain[0, 15]) / 2 - 1
    assert gain[:, 15] == pytest.approx(1 + slope * along + bend * along**2, abs=1e-6)
    ends = [np.abs(bias_field(np.random.default_rng(seed), (5, 5)) - 1)[[0, -1], 2] for seed in range(200)]
    assert 0.3 < np.max(ends) <= 2 * 0.3 / np.sqrt(2) + 1e-6


def test_the_channels_contrasts_are_a_turn_of_one_another() -> None:
    expected = [[0, 0.45, 1.0, 0.2, 0.75, 0.1, 0.88, 0.3], [0, 0.45, 0.3, 1.0, 0.2, 0.75, 0.1, 0.88]]
    assert [contrast(channel) for channel in (0, 1)] == [pytest.approx(np.array(row)) for row in expected]


def test_a_scan_shows_the_tissues_under_noise() -> None:
    """Head against air: 0.45 of signal, noise of 0.05 in each channel of the receiver, gain of 1 within a third."""
    tissues = np.zeros((40, 40), dtype=np.int64)
    tissues[:, 20:] = 1
    image = acquire(np.random.default_rng(1), tissues, 1)[0]
    air, head = image[:, :15], image[:, 20:25]
    assert (head.mean() - air.mean()) / air.std() == pytest.approx((0.45 - 0.0627) / 0.0328, rel=0.2)


def test_organs_lie_within_the_head_and_later_ones_on_earlier() -> None:
    drawn = [draw_tissues(np.random.default_rng(seed), (48, 48), 4) for seed in range(20)]
    shares = [[(tissues == tissue).mean() for tissue in range(4)] for tissues in drawn]
    head = np.mean([1 - share[0] for share in shares])
    assert head == pytest.approx(np.pi / 4 * 0.775**2, rel=0.1), "radii of 0.65 to 0.9"
    assert all(share[3] > 0.01 for share in shares)


def test_training_and_held_out_phantoms_differ_by_a_word_of_the_seed() -> None:
    one = phantoms(RESNET)
    expected = one._make(np.random.default_rng([SEED, 1, 3]))
    assert np.array_equal(one.heldout(3)[0], expected[0])
    assert np.array_equal(one.train(3, unused())[0], one._make(np.random.default_rng([SEED, 0, 3]))[0])
    assert (
        Phantoms(DataSpec(1, "phantom", heldout_fraction=0.001, phantom=PhantomSpec(50)), RESNET).count("heldout") == 1
    )


def test_no_organ_lies_outside_the_head() -> None:
    """The head is drawn first, so that of one seed it is the same with organs and without."""
    for seed in range(40):
        whole, head = (draw_tissues(np.random.default_rng(seed), (32, 32), classes) for classes in (5, 2))
        assert np.array_equal(whole > 0, head > 0)
