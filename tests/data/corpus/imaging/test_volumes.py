"""Folders of volumes with labels, as .npy and as NIfTI."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.data.corpus.imaging.volumes import VolumeFolder, find_pairs
from trainspec_cli.data.corpus.labelled import find_samples
from trainspec_cli.data.corpus.samples import hold_out
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import DataSpec

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
    with refused(RecipeError, "no_partner", "data.path", "images/case3.npy"):
        find_samples(spec(folder), MODEL)


def test_sizes_that_differ_are_named(folder):
    np.save(folder / "labels" / "case2.npy", np.zeros((3, 3, 3), dtype=np.uint8))
    with refused(RecipeError, "wrong_shape", "data.path", "images/case2.npy", "(12, 10, 6)", "(3, 3, 3)"):
        find_samples(spec(folder), MODEL)


def test_a_label_beyond_the_models_classes_is_named(folder):
    volumes = VolumeFolder(folder, spec(folder), replace(MODEL, num_classes=2))
    with refused(MachineError, "wrong_classes", "", "labels/case", "0 to 3", "model.num_classes=4"):
        volumes.train(0, np.random.default_rng(0))


def test_nothing_to_read_is_refused(tmp_path):
    with refused(RecipeError, "no_samples", "data.path", "images/", ".npy, .nii, .nii.gz"):
        find_samples(spec(tmp_path), MODEL)


def lone(folder: Path, image: np.ndarray, label: np.ndarray, model: ConvModel) -> VolumeFolder:
    """Volumes that are all alike."""
    for number in range(8):
        np.save(folder / "images" / f"case{number}.npy", image)
        np.save(folder / "labels" / f"case{number}.npy", label)
    return VolumeFolder(folder, spec(folder), model)


def test_the_middle_of_a_held_out_volume_is_read(folder: Path) -> None:
    label = np.random.default_rng(0).integers(4, size=(12, 11, 6))
    _, read = lone(folder, label.astype(np.int16), label.astype(np.uint8), MODEL).heldout(0)
    assert np.array_equal(read[..., :6], label[2:10, 1:9])
    assert read.shape == (8, 8, 8) and not read[..., 6:].any()


def test_crops_reach_both_ends(folder: Path) -> None:
    label = np.zeros((10, 8, 8), dtype=np.uint8)
    label[:] = (np.arange(10) % 4)[:, None, None]
    volumes = lone(folder, label.astype(np.int16), label, MODEL)
    starts = {int(volumes.train(0, np.random.default_rng(seed))[1][0, 0, 0]) for seed in range(40)}
    assert starts == {0, 1, 2}


def test_grey_values_are_normalised_over_what_is_not_air(folder: Path) -> None:
    """Voxels of 10 and 30 have mean 20 and deviation 10; air is 0."""
    image = np.zeros((8, 8, 8), dtype=np.float32)
    image[:, :, 2], image[:, :, 3] = 10, 30
    read, _ = lone(folder, image, np.zeros((8, 8, 8), dtype=np.uint8), MODEL).heldout(0)
    assert read[0, 0, 0, :4] == pytest.approx([-2, -2, -1, 1], abs=1e-5)


def test_a_volume_of_air_alone_stays_as_it_is(folder: Path) -> None:
    read, _ = lone(folder, np.zeros((8, 8, 8)), np.zeros((8, 8, 8), dtype=np.uint8), MODEL).heldout(0)
    assert not read.any()


def test_each_contrast_is_its_own_channel(folder: Path) -> None:
    image = np.stack([np.full((8, 8, 8), 10.0), np.full((8, 8, 8), 30.0)])
    read, _ = lone(folder, image, np.zeros((8, 8, 8), dtype=np.uint8), replace(MODEL, in_channels=2)).heldout(0)
    assert read[:, 0, 0, 0] == pytest.approx([-1, 1], abs=1e-5)


def test_niftis_contrasts_come_last(folder: Path) -> None:
    nibabel = pytest.importorskip("nibabel")
    for path in (folder / "images").iterdir():
        image = np.load(path)
        nibabel.save(nibabel.Nifti1Image(np.stack([image, 3 * image], -1), np.eye(4)), path.with_suffix(".nii"))
        path.unlink()
    volumes = VolumeFolder(folder, spec(folder), replace(MODEL, in_channels=2))
    image, label = volumes.heldout(0)
    assert image.shape == (2, 8, 8, 8)
    inside = label[..., :6]
    assert image[0, ..., :6][inside == 3].max() < image[1, ..., :6][inside == 0].min()


def test_a_label_of_other_dims_is_named(folder: Path) -> None:
    np.save(folder / "labels" / "case0.npy", np.zeros((12, 10), dtype=np.uint8))
    with refused(RecipeError, "wrong_shape", "data.path", "labels/case0.npy", "(12, 10)", "3 dimensions"):
        VolumeFolder(folder, spec(folder), MODEL)


def test_a_label_below_zero_is_refused(folder: Path) -> None:
    label = np.zeros((8, 8, 8), dtype=np.int8)
    label[0, 0, 0] = -1
    with pytest.raises(MachineError, match="labels voxels -1 to 0"):
        lone(folder, label, label, MODEL).heldout(0)


def test_pairs_are_by_name_whatever_the_suffixes(tmp_path: Path) -> None:
    for name in ("images/a.nii.gz", "images/b.npy", "labels/a.npy", "labels/b.nii", "images/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    pairs = [(image.name, label.name) for image, label in find_pairs(tmp_path)]
    assert pairs == [("a.nii.gz", "a.npy"), ("b.npy", "b.nii")]
    (tmp_path / "labels" / "c.npy").touch()
    (tmp_path / "labels" / "d.npy").touch()
    with refused(RecipeError, "no_partner", "data.path", "labels/c.npy", " images/", " 1 others"):
        find_pairs(tmp_path)


def test_what_holds_no_numbers_is_no_volume(folder: Path) -> None:
    np.save(folder / "images" / "case0.npy", np.array(["a"]))
    with refused(MachineError, "unreadable_file", "", "case0.npy", "<U1"):
        VolumeFolder(folder, spec(folder), MODEL)


def test_a_pipe_in_the_place_of_a_volume_holds_nobody_up(folder):
    (folder / "images" / "case0.npy").unlink()
    os.mkfifo(folder / "images" / "case0.npy")
    with pytest.raises(MachineError, match=r"case0\.npy"):
        VolumeFolder(folder, spec(folder), MODEL)


def test_nifti_needs_nibabel(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    assert VolumeFolder(folder, spec(folder), MODEL).count("train")
    (folder / "images" / "case0.npy").rename(folder / "images" / "case0.nii.gz")
    with pytest.raises(MachineError, match="nibabel") as raised:
        VolumeFolder(folder, spec(folder), MODEL)
    (problem,) = raised.value.problems
    assert (problem.code, problem.environment) == ("missing_package", True)


def test_a_volume_whose_end_is_missing_is_named(folder):
    volumes = VolumeFolder(folder, spec(folder), MODEL)
    for path in (folder / "images").iterdir():
        path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(MachineError, match=r"images/case\d\.npy"):
        volumes.train(0, np.random.default_rng(0))
