"""A folder of images with one sub-folder per class, containing .npy arrays or, if Pillow is installed, .png, .jpg, .bmp
or .tif files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.reading.files import ANY_DAMAGE, check_regular
from trainspec_cli.data.corpus.samples import hold_out
from trainspec_cli.data.corpus.shards import Split
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import DataSpec

MAX_PIXELS = 2**28
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff")
CROP_AREA = (0.25, 1.0)
"""Range of the fraction of an image that a training crop covers. Its aspect ratio changes by up to 4/3
(arXiv:1409.4842)."""
MAX_STRETCH = 4 / 3
HELDOUT_CROP = 0.875
"""Fraction of each side that the centre crop of a held-out image keeps."""


class ImageFolder:
    """The classes are the sub-folders, in alphabetical order. A hash of each file's name determines whether the file is
    held out."""

    def __init__(self, folder: Path, data: DataSpec, model: ConvModel):
        self.folder = folder
        self.model = model
        try:
            is_folder = folder.is_dir()
        except (OSError, ValueError):
            is_folder = False
        if not is_folder:
            raise RecipeError(Problem("missing_file", f"{str(folder)[:300]} is not a folder", "data.path"))
        self.classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and list_pictures(path))
        if not self.classes:
            message = f"{folder.absolute()} has no sub-folder with images (.npy, {', '.join(PICTURES)})"
            raise RecipeError(Problem("no_samples", message, "data.path", "create one sub-folder per class"))
        if len(self.classes) > model.num_classes:
            found = f"{folder.absolute()} has {len(self.classes)} classes (sub-folders)"
            message = f"{found}, but the model has {model.num_classes}"
            hint = f"set model.num_classes={len(self.classes)}"
            raise RecipeError(Problem("wrong_classes", message, "model.num_classes", hint))
        files = [(path, label) for label, name in enumerate(self.classes) for path in list_pictures(folder / name)]
        # The split is based on names, so that adding an image does not move other images between the splits.
        names = [path.relative_to(folder).as_posix() for path, _ in files]
        held = hold_out(names, data.heldout_fraction)
        self._files = {
            "train": [file for name, file in zip(names, files, strict=True) if name not in held],
            "heldout": [file for name, file in zip(names, files, strict=True) if name in held],
        }
        # Import the package here, so that a missing package is reported before the first step instead of during one.
        if any(path.suffix != ".npy" for path, _ in files):
            load_reader("PIL", "Pillow", "pictures", "images")
        self._load(files[0][0])

    def count(self, split: Split) -> int:
        return len(self._files[split])

    def train(self, index: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return a randomly resized crop, mirrored half of the time, and its class."""
        path, label = self._files["train"][index]
        picture = random_part(self._load(path), generator)
        if generator.random() < 0.5:
            picture = picture[:, :, ::-1]
        return self._finish(picture), np.asarray(label, dtype=np.int64)

    def heldout(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        path, label = self._files["heldout"][index]
        return self._finish(middle_part(self._load(path))), np.asarray(label, dtype=np.int64)

    def _load(self, path: Path) -> np.ndarray:
        """Return (C, H, W) in fp32. Raises MachineError, naming the file, if the file is not such an image."""
        try:
            pixels = self._read(path)
        except ANY_DAMAGE as error:
            raise MachineError(f"{path} cannot be read as an image: {error}", code="unreadable_file") from error
        if pixels.ndim == 2:
            pixels = pixels[:, :, None]
        if pixels.ndim != 3 or 0 in pixels.shape or pixels.shape[2] != self.model.in_channels:
            wanted = f"(H, W, {self.model.in_channels}), or (H, W) if model.in_channels is 1"
            raise MachineError(f"{path} has shape {pixels.shape}; expected {wanted}", code="wrong_shape")
        return pixels.transpose(2, 0, 1).astype(np.float32)

    def _read(self, path: Path) -> np.ndarray:
        check_regular(path)
        if path.suffix != ".npy":
            from PIL import Image

            with Image.open(path) as picture:
                return np.asarray(picture.convert("L" if self.model.in_channels == 1 else "RGB"))
        pixels = np.load(path, mmap_mode="r")
        if pixels.size > MAX_PIXELS or pixels.dtype.kind not in "buif":
            raise ValueError(f"{pixels.size:,} values of {pixels.dtype}; at most {MAX_PIXELS:,} numbers are allowed")
        return np.array(pixels)

    def _finish(self, picture: np.ndarray) -> np.ndarray:
        """Resize to the model's input, and normalise each channel to mean 0 and variance 1."""
        resized = resize(picture, self.model.input_size)
        mean, std = (moment(axis=(1, 2), keepdims=True) for moment in (resized.mean, resized.std))
        return np.ascontiguousarray((resized - mean) / (std + 1e-6), dtype=np.float32)


def list_pictures(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".npy", *PICTURES))


def load_reader(module: str, package: str, what: str, extra: str) -> Any:
    """Import an optional package that reads a format. If it is missing, raise MachineError with the command that
    installs it. `extra`: the trainspec extra that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{what} are read with {package}, which is not installed"
        hint = f"run pip install 'trainspec[{extra}]', or save them as .npy"
        problem = Problem("missing_package", message, "data.source", hint, environment=True)
        raise MachineError(problem) from error


# Crop and resize images of shape (C, H, W)


def random_part(picture: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    area = generator.uniform(*CROP_AREA)
    stretch = MAX_STRETCH ** generator.uniform(-0.5, 0.5)
    sides = np.sqrt(area) * np.array([stretch, 1 / stretch])
    height, width = (
        max(1, round(min(1.0, side) * extent)) for side, extent in zip(sides, picture.shape[1:], strict=True)
    )
    top = generator.integers(picture.shape[1] - height + 1)
    left = generator.integers(picture.shape[2] - width + 1)
    return picture[:, top : top + height, left : left + width]


def middle_part(picture: np.ndarray) -> np.ndarray:
    height, width = (max(1, round(HELDOUT_CROP * extent)) for extent in picture.shape[1:])
    top = (picture.shape[1] - height) // 2
    left = (picture.shape[2] - width) // 2
    return picture[:, top : top + height, left : left + width]


def resize(picture: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """Resize (C, H, W) to (C, *size), with linear interpolation between pixels, and averaging when shrinking (no
    aliasing)."""
    rows, columns = (weights(extent, wanted) for extent, wanted in zip(picture.shape[1:], size, strict=True))
    resized: np.ndarray = rows @ picture @ columns.T
    return resized


def weights(extent: int, wanted: int) -> np.ndarray:
    """Return an array (wanted, extent) with the weight of each old pixel in each new one. The weights form a triangular
    filter that is as wide as a new pixel."""
    scale = extent / wanted
    centres = (np.arange(wanted) + 0.5) * scale - 0.5
    distance = np.abs(np.arange(extent)[None, :] - centres[:, None]) / max(1.0, scale)
    triangle = np.maximum(0.0, 1 - distance)
    normal: np.ndarray = (triangle / triangle.sum(axis=1, keepdims=True)).astype(np.float32)
    return normal
