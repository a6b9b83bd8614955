import json
import struct

import numpy as np
import pytest

from trainspec_cli.errors import MachineError, RecipeError
from trainspec_cli.huggingface.safetensors import make_header, open_checkpoint, read_header


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
    with pytest.raises(MachineError, match=r"model.safetensors is cut short or altered: b is not where"):
        read_header(file)


@pytest.mark.parametrize("content", [b"", b"12345678{", struct.pack("<Q", 4) + b"[1,]", struct.pack("<Q", 2**62)])
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(MachineError, match=r"model.safetensors (is not a safetensors|has a header)"):
        open_checkpoint(tmp_path)


def test_a_file_of_the_index_that_is_missing_is_named(tmp_path, tensors):
    write(tmp_path / "one.safetensors", tensors)
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MachineError, match=r"two.safetensors is missing, but the index names it"):
        open_checkpoint(tmp_path)


def test_quantised_weights_are_refused(tmp_path):
    text = json.dumps({"q": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"12")
    with pytest.raises(RecipeError, match="q is of type F8_E4M3"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(RecipeError, match=r"holds neither model.safetensors nor"):
        open_checkpoint(tmp_path)
