"""Folders of volumes with labels, as .npy and as NIfTI."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainspec_cli.corpus.imaging.volumes import VolumeFolder
from trainspec_cli.corpus.labelled import find_samples
from trainspec_cli.corpus.split import hold_out
from trainspec_cli.errors import MachineError, RecipeError
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.model import ConvModel

MODEL = ConvModel("unet", (8, 8, 8), widths=(4,), in_channels=1, num_classes=4)
SHAPE = (12, 10, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight volumes, in which every voxel tells its own label."""
    (tmp_path / "images").mkdir()
    (tmp_path / "labels").mkdir()
    for number in range(8):
        label = np.random.default_rng(number).integers(4, size=SHAPE)
        np.save(tmp_path / "images" / f"case{number}.npy", (100 + 10 * label).astype(np.int16))
        np.save(tmp_path / "labels" / f"case{number}.npy", label.astype(np.uint8))
    return tmp_path


def spec(folder: Path) -> DataSpec:
    return DataSpec(1, "volumes", str(folder), heldout_fraction=0.25)


def test_image_and_label_are_cut_alike_normalised_and_padded(folder):
    volumes = VolumeFolder(folder, spec(folder), MODEL)
    assert volumes.count("train") + volumes.count("heldout") == 8
    image, label = volumes.train(0, np.random.default_rng(5))
    assert image.shape == (1, 8, 8, 8) and label.shape == (8, 8, 8)
    assert (image.dtype, label.dtype) == (np.float32, np.int64)
    inside = image[0, :, :, :6]
    for tissue in range(4):
        values = inside[label[:, :, :6] == tissue]
        assert values.std() < 1e-5, "one tissue is one grey"
    assert not image[..., 6:].any() and not label[..., 6:].any()
    assert abs(inside.mean()) < 0.2 and inside.std() == pytest.approx(1, abs=0.1)


def test_held_out_volumes_are_never_trained_on(folder):
    volumes = VolumeFolder(folder, spec(folder), MODEL)
    held = hold_out([path.name for path in sorted((folder / "images").iterdir())], 0.25)
    assert volumes.count("heldout") == len(held)
    for name in held:
        (folder / "images" / name).unlink()
    for index in range(volumes.count("train")):
        volumes.train(index, np.random.default_rng(0))
    for index in range(volumes.count("heldout")):
        with pytest.raises(MachineError):
            volumes.heldout(index)


def test_crops_move_and_are_a_function_of_their_generator(folder):
    volumes = VolumeFolder(folder, spec(folder), MODEL)
    crops = [volumes.train(1, np.random.default_rng(seed))[1] for seed in (1, 1, 2, 3, 4)]
    assert np.array_equal(crops[0], crops[1])
    assert any(not np.array_equal(crops[0], other) for other in crops[2:])


def test_nifti_gives_what_npy_gives(folder, tmp_path_factory):
    nibabel = pytest.importorskip("nibabel")
    other = tmp_path_factory.mktemp("nifti")
    for kind in ("images", "labels"):
        (other / kind).mkdir()
        for path in (folder / kind).iterdir():
            nibabel.save(nibabel.Nifti1Image(np.load(path), np.eye(4)), other / kind / f"{path.stem}.nii.gz")
    volumes = VolumeFolder(other, spec(other), MODEL)
    same = {path.name: np.load(path) for path in (folder / "labels").iterdir()}
    image, label = volumes.train(0, np.random.default_rng(5))
    name = volumes._pairs["train"][0][1].name.removesuffix(".nii.gz")
    whole = same[f"{name}.npy"]
    places = [whole[x : x + 8, y : y + 8] for x in range(5) for y in range(3)]
    assert any(np.array_equal(label[..., :6], place) for place in places)
    assert image.std() > 0.5


def test_several_contrasts_are_channels(folder):
    for path in (folder / "images").iterdir():
        np.save(path, np.stack([np.load(path), np.load(path) * 2]))
    image, _ = VolumeFolder(folder, spec(folder), replace(MODEL, in_channels=2)).heldout(0)
    assert image.shape == (2, 8, 8, 8)


def test_a_volume_without_a_label_is_named(folder):
    (folder / "labels" / "case3.npy").unlink()
    with pytest.raises(RecipeError, match=r"images/case3.npy has no counterpart of its name in labels/"):
        find_samples(spec(folder), MODEL)


def test_sizes_that_differ_are_named(folder):
    np.save(folder / "labels" / "case2.npy", np.zeros((3, 3, 3), dtype=np.uint8))
    with pytest.raises(RecipeError, match=r"images/case2.npy has shape \(12, 10, 6\), its label \(3, 3, 3\)"):
        find_samples(spec(folder), MODEL)


def test_a_label_beyond_the_models_classes_is_named(folder):
    volumes = VolumeFolder(folder, spec(folder), replace(MODEL, num_classes=2))
    with pytest.raises(MachineError, match=r"labels/case\d.npy labels voxels 0 to 3") as caught:
        volumes.train(0, np.random.default_rng(0))
    assert caught.value.problems[0].hint.endswith("model.num_classes=4")


def test_nothing_to_read_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"has no images/ with \.npy, \.nii, \.nii\.gz files"):
        find_samples(spec(tmp_path), MODEL)
