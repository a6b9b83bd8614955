import json
import struct

import numpy as np
import pytest
from lab.problems import refused

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.data.huggingface.safetensors import make_header, open_checkpoint, read_header


def write(path, tensors):
    header = make_header({name: ("F32", value.shape) for name, value in tensors.items()})
    path.write_bytes(header + b"".join(value.tobytes() for value in tensors.values()))


@pytest.fixture
def tensors():
    return {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32([7])}


def test_what_is_written_is_read_by_the_library(tmp_path, tensors):
    library = pytest.importorskip("safetensors.numpy")
    write(tmp_path / "model.safetensors", tensors)
    read = library.load_file(tmp_path / "model.safetensors")
    assert {name: value.tolist() for name, value in read.items()} == {k: v.tolist() for k, v in tensors.items()}


def test_what_the_library_writes_is_found(tmp_path, tensors):
    library = pytest.importorskip("safetensors.numpy")
    library.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    entries = open_checkpoint(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    for name, value in tensors.items():
        entry = entries[name]
        assert (entry.dtype, entry.shape) == ("F32", value.shape)
        assert content[entry.start : entry.start + entry.bytes] == value.tobytes()


def test_a_file_that_was_cut_short_is_named(tmp_path, tensors):
    file = tmp_path / "model.safetensors"
    write(file, tensors)
    file.write_bytes(file.read_bytes()[:-1])
    with refused(MachineError, "bad_checkpoint", "", "model.safetensors", "b is not"):
        read_header(file)


@pytest.mark.parametrize("content", [b"", b"12345678{", struct.pack("<Q", 4) + b"[1,]", struct.pack("<Q", 2**62)])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with refused(MachineError, "bad_checkpoint", "", "model.safetensors"):
        open_checkpoint(tmp_path)


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path, tensors):
    write(tmp_path / "one.safetensors", tensors)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with refused(MachineError, "bad_checkpoint", "", "two.safetensors", "missing"):
        open_checkpoint(tmp_path)


def test_quantised_weights_are_refused(tmp_path):
    text = json.dumps({"q": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"12")
    with pytest.raises(RecipeError, match="q is of type F8_E4M3"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights(tmp_path):
    with refused(RecipeError, "missing_file", "init.from", "model.safetensors"):
        open_checkpoint(tmp_path)


def test_the_header_is_as_the_format_has_it():
    header = make_header({"a": ("F32", (2, 3)), "b": ("BF16", (1,))})
    (length,) = struct.unpack("<Q", header[:8])
    assert length % 8 == 0 and len(header) == 8 + length
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [1], "data_offsets": [24, 26]},
    }


@pytest.mark.parametrize(("dtype", "size"), [("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2)])
def test_each_format_has_its_size(tmp_path, dtype, size):
    file = tmp_path / "model.safetensors"
    file.write_bytes(make_header({"a": (dtype, (3,)), "b": (dtype, ())}) + bytes(4 * size))
    entries = open_checkpoint(tmp_path)
    assert (entries["a"].bytes, entries["b"].bytes) == (3 * size, size)
    assert entries["b"].start - entries["a"].start == 3 * size


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 7, "a\0b"])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with refused(MachineError, "bad_checkpoint", "", "in its folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]},
        {"dtype": "F32", "shape": [1] * 17, "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2]},
    ],
)
def test_a_tensor_that_cannot_be_there_is_refused(tmp_path, fields):
    text = json.dumps({"a": fields}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(MachineError):
        open_checkpoint(tmp_path)


def test_all_files_of_an_index_are_read(tmp_path, tensors):
    write(tmp_path / "one.safetensors", {"a": tensors["a"]})
    write(tmp_path / "two.safetensors", {"b": tensors["b"]})
    write(tmp_path / "model.safetensors", {"c": tensors["b"]})
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    entries = open_checkpoint(tmp_path)
    assert {name: entry.file.name for name, entry in entries.items()} == index["weight_map"]


@pytest.mark.parametrize("name", ["a" * length for length in range(1, 9)])
def test_tensors_begin_at_a_multiple_of_8_bytes(name):
    header = make_header({name: ("F32", (1,))})
    assert len(header) % 8 == 0
    assert struct.unpack("<Q", header[:8]) == (len(header) - 8,)


def test_a_tensor_may_have_16_dims(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(make_header({"a": ("F32", (1,) * 16)}) + bytes(4))
    assert open_checkpoint(tmp_path)["a"].shape == (1,) * 16


def test_a_header_may_have_its_largest_size_and_no_more(tmp_path, monkeypatch):
    header = make_header({"a": ("F32", (1,))})
    (tmp_path / "model.safetensors").write_bytes(header + bytes(4))
    monkeypatch.setattr("trainspec_cli.data.huggingface.safetensors.MAX_HEADER_BYTES", len(header) - 8)
    assert open_checkpoint(tmp_path)["a"].shape == (1,)
    monkeypatch.setattr("trainspec_cli.data.huggingface.safetensors.MAX_HEADER_BYTES", len(header) - 9)
    with refused(MachineError, "bad_checkpoint", "", "not a safetensors file"):
        open_checkpoint(tmp_path)


def test_a_file_too_short_for_a_header_is_no_safetensors_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"1234567")
    with refused(MachineError, "bad_checkpoint", "", "not a safetensors file"):
        open_checkpoint(tmp_path)


def test_an_index_that_is_no_json_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with refused(MachineError, "bad_checkpoint", "", "index.json", "not an index"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("header", [[], {"a": None}, {"a": {"dtype": "F32", "shape": None, "data_offsets": [0, 4]}},
                                    {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 5]}}, 3])  # fmt: skip
def test_a_header_of_another_shape_is_refused(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with refused(MachineError, "bad_checkpoint", "", "header"):
        open_checkpoint(tmp_path)
