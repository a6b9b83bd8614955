"""Folders of pictures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.data.corpus.imaging.images import (
    ImageFolder,
    list_pictures,
    middle_part,
    random_part,
    resize,
    weights,
)
from trainspec_cli.data.corpus.labelled import find_samples
from trainspec_cli.data.corpus.samples import hold_out
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import DataSpec

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
    with refused(RecipeError, "wrong_classes", "model.num_classes", " 3 classes ", " 2", "model.num_classes=3"):
        find_samples(spec(folder), replace(MODEL, num_classes=2))


def test_an_empty_folder_is_refused(tmp_path):
    with refused(RecipeError, "no_samples", "data.path"):
        find_samples(spec(tmp_path), MODEL)


def test_a_file_of_another_shape_is_named(folder):
    np.save(folder / "ant" / "0.npy", np.zeros((5, 5), dtype=np.uint8))
    with refused(MachineError, "wrong_shape", "", "ant/0.npy", "(5, 5, 1)", "(H, W, 3)"):
        find_samples(spec(folder), MODEL)


def test_a_broken_file_is_named(folder):
    (folder / "ant" / "0.npy").write_bytes(b"nothing")
    with refused(MachineError, "unreadable_file", "", "ant/0.npy"):
        find_samples(spec(folder), MODEL)


@pytest.mark.parametrize(
    ("extent", "wanted", "expected"),
    [
        (2, 2, [[1, 0], [0, 1]]),
        (2, 4, [[1, 0], [0.75, 0.25], [0.25, 0.75], [0, 1]]),
        (4, 2, [[3 / 7, 3 / 7, 1 / 7, 0], [0, 1 / 7, 3 / 7, 3 / 7]]),
        (3, 1, [[2 / 7, 3 / 7, 2 / 7]]),
    ],
)
def test_the_weight_of_each_old_pixel_in_each_new_one(extent: int, wanted: int, expected: list[list[float]]) -> None:
    """Centres lie at (i + 1/2) extent / wanted - 1/2; a triangle is as wide as the wider pixel."""
    assert weights(extent, wanted) == pytest.approx(np.array(expected))


def test_rows_and_columns_are_resized_each_by_itself() -> None:
    picture = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    assert resize(picture, (1, 3)).tolist() == [[[1.5, 2.5, 3.5]]]
    assert resize(picture, (2, 1)) == pytest.approx(np.array([[[1.0], [4.0]]]))


def test_the_middle_of_a_held_out_picture_is_kept() -> None:
    """Seven eighths of each side: 14 of 16 from 1 on, 7 of 8 from 0 on."""
    picture = np.arange(2 * 16 * 8).reshape(2, 16, 8)
    assert np.array_equal(middle_part(picture), picture[:, 1:15, :7])
    assert middle_part(np.zeros((1, 1, 1))).shape == (1, 1, 1)


def test_crops_cover_a_quarter_to_the_whole_stretched_by_at_most_a_third() -> None:
    generator = np.random.default_rng(0)
    rows, columns = np.meshgrid(np.arange(90), np.arange(120), indexing="ij")
    crops = [random_part(np.stack([rows, columns]), generator) for _ in range(400)]
    areas = [crop[0].size / (90 * 120) for crop in crops]
    stretches = [(crop.shape[1] / 90) / (crop.shape[2] / 120) for crop in crops]
    assert 0.23 < min(areas) < 0.3 and 0.9 < max(areas) <= 1 and np.mean(areas) == pytest.approx(0.62, abs=0.04)
    assert 0.72 < min(stretches) < 0.8 and 1.25 < max(stretches) < 1.38
    assert {crop[0, 0, 0] == 0 for crop in crops} == {crop[1, 0, 0] == 0 for crop in crops} == {True, False}
    assert max(crop[0, -1, 0] for crop in crops) == 89 and max(crop[1, 0, -1] for crop in crops) == 119


def test_half_of_the_training_pictures_are_mirrored(folder: Path) -> None:
    slope = np.broadcast_to(np.arange(30, dtype=np.uint8)[None, :, None], (20, 30, 3))
    for path in folder.rglob("*.npy"):
        np.save(path, slope)
    images = opened(folder)
    rising = [images.train(0, np.random.default_rng(seed))[0][0, 0, -1] > 0 for seed in range(200)]
    assert 70 < sum(rising) < 130
    image, label = images.heldout(0)
    assert image[0, 0, -1] > image[0, 0, 0] and label.dtype == np.int64
    assert image.std(axis=(1, 2)) == pytest.approx(np.ones(3), rel=1e-4)


def test_held_out_pictures_keep_their_class(folder: Path) -> None:
    for label, name in enumerate(("ant", "bee", "cat")):
        for path in (folder / name).iterdir():
            pixels = np.zeros((8, 12, 3), dtype=np.uint8)
            pixels[:, : 3 * (label + 1)] = 200
            np.save(path, pixels)
    images = opened(folder)
    for index in range(images.count("heldout")):
        image, label = images.heldout(index)
        assert round((image[0] > 0).mean() * 4) == int(label) + 1


def test_pictures_of_any_spelling_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.npy", "c.txt", "d.jpeg", "e.tiff", "f.bmp"):
        (tmp_path / name).touch()
    assert [path.name for path in list_pictures(tmp_path)] == ["a.npy", "b.PNG", "d.jpeg", "e.tiff", "f.bmp"]


def test_a_picture_of_one_channel_may_have_two_dims(folder: Path) -> None:
    for path in folder.rglob("*.npy"):
        np.save(path, np.arange(96, dtype=np.uint8).reshape(8, 12))
    images = ImageFolder(folder, spec(folder), replace(MODEL, in_channels=1))
    assert images.heldout(0)[0].shape == (1, 8, 12)


@pytest.mark.parametrize("pixels", [np.array([["a"]]), np.zeros((4, 4, 3), dtype=complex)])
def test_what_holds_no_numbers_is_no_picture(folder: Path, pixels: np.ndarray) -> None:
    np.save(folder / "ant" / "0.npy", pixels)
    with refused(MachineError, "unreadable_file", "", "ant/0.npy"):
        opened(folder)


@pytest.mark.parametrize("path", ["gone", "a" * 400, "a\0b"])
def test_what_is_no_folder_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(RecipeError, match="is not a folder"):
        ImageFolder(tmp_path / path, spec(tmp_path), MODEL)


def test_colours_are_channels_whatever_the_picture_is_stored_as(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            grey = np.tile(np.arange(12, dtype=np.uint8) * 20, (8, 1))
            colours = np.stack([grey, 255 - grey, grey], axis=2)
            image.fromarray(colours).save(tmp_path / name / f"{number}.png")
    read, _ = ImageFolder(tmp_path, spec(tmp_path), MODEL).heldout(0)
    assert np.allclose(read[0], read[2]) and np.allclose(read[0], -read[1], atol=1e-3)


def test_a_sub_folder_without_pictures_is_no_class(folder: Path) -> None:
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").touch()
    (folder / "labels.npy").touch()
    assert opened(folder).classes == ["ant", "bee", "cat"]


def test_pillow_is_needed_for_pictures_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert opened(folder).count("train")
    (folder / "ant" / "0.png").touch()
    with pytest.raises(MachineError, match="Pillow") as raised:
        opened(folder)
    (problem,) = raised.value.problems
    assert (problem.code, problem.environment) == ("missing_package", True)
