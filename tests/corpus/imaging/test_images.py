"""Folders of pictures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trainspec_cli.corpus.imaging.images import ImageFolder, resize
from trainspec_cli.corpus.labelled import find_samples
from trainspec_cli.corpus.split import hold_out
from trainspec_cli.errors import MachineError, RecipeError
from trainspec_cli.spec.recipe.data import DataSpec
from trainspec_cli.spec.recipe.model import ConvModel

MODEL = ConvModel("resnet", (8, 12), widths=(4,), blocks=(1,), in_channels=3, num_classes=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of ten pictures of several sizes."""
    generator = np.random.default_rng(0)
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
        for number in range(10):
            pixels = generator.integers(256, size=(20 + number, 30, 3), dtype=np.uint8)
            np.save(tmp_path / name / f"{number}.npy", pixels)
    return tmp_path


def spec(folder: Path, fraction: float = 0.2) -> DataSpec:
    return DataSpec(1, "images", str(folder), heldout_fraction=fraction)


def opened(folder: Path) -> ImageFolder:
    return ImageFolder(folder, spec(folder), MODEL)


def test_classes_are_the_sub_folders_and_every_picture_is_read(folder):
    images = opened(folder)
    assert images.classes == ["ant", "bee", "cat"]
    assert images.count("train") + images.count("heldout") == 30
    assert 0 < images.count("heldout") < 15
    labels = [int(images.train(i, np.random.default_rng(0))[1]) for i in range(images.count("train"))]
    assert labels == sorted(labels) and set(labels) == {0, 1, 2}


def test_held_out_pictures_are_never_trained_on(folder):
    images = opened(folder)
    held = hold_out([path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.npy"))], 0.2)
    assert images.count("heldout") == len(held)
    for name in held:
        (folder / name).unlink()
    for index in range(images.count("train")):
        images.train(index, np.random.default_rng(0))
    for index in range(images.count("heldout")):
        with pytest.raises(MachineError):
            images.heldout(index)


def test_a_crop_is_a_function_of_its_generator(folder):
    images = opened(folder)
    one, again, other = (images.train(3, np.random.default_rng(seed))[0] for seed in (1, 1, 2))
    assert one.shape == (3, 8, 12) and one.dtype == np.float32
    assert np.array_equal(one, again) and not np.array_equal(one, other)
    assert one.mean(axis=(1, 2)) == pytest.approx(np.zeros(3), abs=1e-5)
    assert np.array_equal(images.heldout(0)[0], images.heldout(0)[0])


def test_resizing_keeps_a_slope_and_averages_what_it_shrinks():
    slope = np.broadcast_to(np.arange(40, dtype=np.float32), (1, 10, 40))
    assert resize(slope, (10, 20))[0, 0, 2:-2] == pytest.approx(np.arange(40).reshape(20, 2).mean(axis=1)[2:-2])
    stripes = np.broadcast_to(np.arange(40, dtype=np.float32) % 2, (1, 10, 40))
    assert resize(stripes, (10, 10))[0, :, 1:-1] == pytest.approx(np.full((10, 8), 0.5), abs=0.02)
    assert resize(slope, (10, 40)) == pytest.approx(slope)


def test_pictures_are_opened_with_pillow(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            image.fromarray(np.full((9, 9), 40 * number, dtype=np.uint8)).save(tmp_path / name / f"{number}.png")
    images = ImageFolder(tmp_path, spec(tmp_path), replace(MODEL, in_channels=1))
    assert images.count("train") + images.count("heldout") == 6
    assert images.train(0, np.random.default_rng(0))[0].shape == (1, 8, 12)


def test_too_many_classes_are_refused(folder):
    with pytest.raises(RecipeError, match=r"has 3 classes \(sub-folders\), the model 2") as caught:
        find_samples(spec(folder), replace(MODEL, num_classes=2))
    assert caught.value.problems[0].hint == "type model.num_classes=3"


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="no sub-folder with pictures"):
        find_samples(spec(tmp_path), MODEL)


def test_a_file_of_another_shape_is_named(folder):
    np.save(folder / "ant" / "0.npy", np.zeros((5, 5), dtype=np.uint8))
    with pytest.raises(MachineError, match=r"ant/0.npy has shape \(5, 5, 1\); \(H, W, 3\)"):
        find_samples(spec(folder), MODEL)


def test_a_broken_file_is_named(folder):
    (folder / "ant" / "0.npy").write_bytes(b"nothing")
    with pytest.raises(MachineError, match=r"ant/0.npy cannot be read as a picture"):
        find_samples(spec(folder), MODEL)
