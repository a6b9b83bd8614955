"""A folder of volumes with labels: FOLDER/images/NAME and FOLDER/labels/NAME, as .npy, .nii or .nii.gz.

An image has the shape (D, H, W), or (C, D, H, W) with several contrasts (last dimension in NIfTI). Its label has the
shape (D, H, W) and contains class numbers. Two-dimensional slices are stored in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.reading.files import ANY_DAMAGE, check_regular
from trainspec_cli.data.corpus.imaging.images import load_reader
from trainspec_cli.data.corpus.samples import hold_out
from trainspec_cli.data.corpus.shards import Split
from trainspec_cli.recipe.keys.model import ConvModel
from trainspec_cli.recipe.keys.run import DataSpec

SUFFIXES = (".npy", ".nii", ".nii.gz")


class VolumeFolder:
    """Pairs of image and label, in alphabetical order. A hash of each name determines whether the pair is held out."""

    def __init__(self, folder: Path, data: DataSpec, model: ConvModel):
        self.model = model
        pairs = find_pairs(folder)
        self._moments: dict[Path, tuple[float, float]] = {}
        for image, label in pairs:
            self._check(image, label)
        held = hold_out([image.name for image, _ in pairs], data.heldout_fraction)
        self._pairs = {
            "train": [pair for pair in pairs if pair[0].name not in held],
            "heldout": [pair for pair in pairs if pair[0].name in held],
        }

    def count(self, split: Split) -> int:
        return len(self._pairs[split])

    def train(self, index: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return a random crop with the size of the model's input."""
        pair = self._pairs["train"][index]
        free = [
            max(0, extent - wanted) for extent, wanted in zip(shape_of(pair[1]), self.model.input_size, strict=True)
        ]
        return self._read(pair, [int(generator.integers(room + 1)) for room in free])

    def heldout(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the centre crop."""
        pair = self._pairs["heldout"][index]
        sizes = zip(shape_of(pair[1]), self.model.input_size, strict=True)
        return self._read(pair, [max(0, extent - wanted) // 2 for extent, wanted in sizes])

    def _check(self, image: Path, label: Path) -> None:
        dims = len(self.model.input_size)
        channels = self.model.in_channels
        space = shape_of(label)
        if len(space) != dims:
            message = f"{label} has shape {space}, but the model takes {dims} dimensions (model.input_size)"
            raise RecipeError(Problem("wrong_shape", message, "data.path"))
        shape = shape_of(image)
        # In NIfTI, the contrasts are the last dimension.
        full = shape if image.suffix == ".npy" else (shape[-1], *shape[:-1])
        if ((1, *shape) if len(shape) == dims else full) != (channels, *space):
            message = f"{image} has shape {shape}, but its label {space}, with model.in_channels={channels}"
            raise RecipeError(Problem("wrong_shape", message, "data.path", "image and label must have the same size"))

    def _read(self, pair: tuple[Path, Path], start: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Read a crop. Raises MachineError, naming the pair, if its data cannot be read."""
        try:
            image = open_array(pair[0])
            if image.ndim == len(self.model.input_size):
                image = image[None]
            elif pair[0].suffix != ".npy":
                image = np.moveaxis(np.asarray(image), -1, 0)  # in NIfTI, the contrasts are the last dimension
            label = open_array(pair[1])
            # Scale by the tissue only, because air (0) fills most of a scan and would dominate the scale. This requires
            # reading each file in full once.
            path = pair[0]
            if path not in self._moments:
                voxels = np.asarray(image, dtype=np.float32)
                tissue = voxels[voxels != 0]
                self._moments[path] = (float(tissue.mean()), float(tissue.std()) + 1e-6) if tissue.size else (0.0, 1.0)
            mean, std = self._moments[path]
            part = tuple(slice(first, first + size) for first, size in zip(start, self.model.input_size, strict=True))
            voxels = (np.asarray(image[(slice(None), *part)], dtype=np.float32) - mean) / std
            classes = np.asarray(label[part]).astype(np.int64)
            if classes.size and not 0 <= classes.min() <= classes.max() < self.model.num_classes:
                message = f"{pair[1]} labels voxels {classes.min()} to {classes.max()}"
                known = self.model.num_classes - 1
                hint = f"the model has classes 0 to {known}: set model.num_classes={classes.max() + 1}"
                raise MachineError(message, code="wrong_classes", hint=hint)
            return self._pad(voxels), self._pad(classes[None])[0]
        except MachineError:
            raise
        except ANY_DAMAGE as error:
            message = f"{pair[0]} or its label cannot be read as a volume: {error}"
            raise MachineError(message, code="unreadable_file") from error

    def _pad(self, array: np.ndarray) -> np.ndarray:
        """Pad with zeros at the end if a volume is smaller than the model's input."""
        missing = [wanted - extent for wanted, extent in zip(self.model.input_size, array.shape[1:], strict=True)]
        return np.ascontiguousarray(np.pad(array, [(0, 0), *((0, more) for more in missing)]))


def find_pairs(folder: Path) -> list[tuple[Path, Path]]:
    """Return every image together with the label of the same name (the suffixes may differ)."""
    # For example, an image may be .nii.gz and its label .npy.
    images = _by_stem(folder / "images")
    labels = _by_stem(folder / "labels")
    if not images:
        message = f"{folder.absolute()} has no images/ with {', '.join(SUFFIXES)} files"
        raise RecipeError(Problem("no_samples", message, "data.path", "put volumes in images/ and labels/"))
    alone = sorted(images.keys() ^ labels.keys())
    if alone:
        unpaired = images.get(alone[0]) or labels[alone[0]]
        message = f"{unpaired} has no counterpart of the same name in {'labels' if alone[0] in images else 'images'}/"
        more = f", and {len(alone) - 1} others have none either" if len(alone) > 1 else ""
        raise RecipeError(Problem("no_partner", message + more, "data.path", "every image needs a label"))
    return [(images[stem], labels[stem]) for stem in sorted(images)]


def _by_stem(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        return {}
    files = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES))
    return {path.name.removesuffix(".gz").rsplit(".", 1)[0]: path for path in files}


def shape_of(path: Path) -> tuple[int, ...]:
    """Return a volume's shape from its header alone."""
    return tuple(int(extent) for extent in open_array(path).shape)


def open_array(path: Path) -> Any:
    """Return an array that reads only the requested slices from disk. Raises MachineError, naming the file."""
    try:
        check_regular(path)
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r")
        else:
            array = load_reader("nibabel", "nibabel", "NIfTI volumes", "nifti").load(path).dataobj
        if array.dtype.kind not in "buif":
            raise ValueError(f"it holds {array.dtype}, not numbers")
        return array
    except MachineError:
        raise
    except Exception as error:  # nibabel raises a different error for each format
        raise MachineError(f"{path} cannot be read as a volume: {error}", code="unreadable_file") from error
