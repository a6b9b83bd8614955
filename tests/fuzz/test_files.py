"""Checkpoints, templates, texts, token files, tables and certificates of strangers."""

from __future__ import annotations

import csv
import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz.conftest import damaged_bytes, ends, some_variants, strange_variants, tell
from lab.drawing import slow_after
from lab.published import MODELS, SIZES

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.data.corpus import bpe
from trainspec_cli.data.huggingface import chat_template
from trainspec_cli.data.huggingface.chat_template import ChatTemplate
from trainspec_cli.data.huggingface.config import read_model
from trainspec_cli.data.huggingface.safetensors import make_header, open_checkpoint
from trainspec_cli.run.tools import read_probe
from trainspec_cli.wings.certify.certificate import digest

CONFIG = {
    **SIZES,
    **MODELS["qwen3_moe"],
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    "_name_or_path": "${oc.env:HOME}",
}
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
MEASURED = Path(__file__).parent.parent / "data/measured/throughput.csv"


def refuses(read: Callable[[], object]) -> None:
    """The file is read, or the error is one for people."""
    with ends():
        try:
            read()
        except TrainspecError as error:
            assert error.exit_code in (2, 4)


def test_configs_of_checkpoints_with_strange_values(project: Path) -> None:
    for variant in strange_variants(CONFIG):
        if isinstance(variant, dict):
            refuses(lambda variant=variant: read_model(variant, "config.json"))
    (project / "hf").mkdir()
    for variant in some_variants(CONFIG, 4):
        (project / "hf/config.json").write_text(json.dumps(variant))
        assert tell("validate", "recipe=tiny", "init.from=hf:hf", "model=auto")[0] == 2


def test_headers_of_weights(project: Path) -> None:
    tensors = {"a.weight": ("F32", (2, 3)), "b.weight": ("BF16", (4,))}
    whole = make_header(tensors) + bytes(32)
    header = json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])
    for damaged in damaged_bytes(whole, 300):
        (project / "model.safetensors").write_bytes(damaged)
        refuses(lambda: open_checkpoint(project))
    for variant in strange_variants(header):
        text = json.dumps(variant).encode()
        (project / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(32))
        refuses(lambda: open_checkpoint(project))
    for variant in strange_variants({"weight_map": {"a": "model.safetensors", "b": "../x"}}):
        (project / "model.safetensors.index.json").write_text(json.dumps(variant))
        refuses(lambda: open_checkpoint(project))


@pytest.mark.parametrize(
    ("source", "words"),
    slow_after(
        3,
        [
            ("{{ 1 / 0 }}", "ZeroDivisionError"),
            ("{{ messages + 1 }}", "TypeError"),
            ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 1 s"),
            ("{{ 'x' * 10**10 }}", "memory"),
            ("{{ '%9999999999d' | format(1) }}", "chat template failed"),
            (
                "{% set n = namespace(s='x' * 1024) %}{% for a in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
                "memory",
            ),
            ("{{ 'x' * 20000000 }}", "characters"),
            ("{{ messages[0].__class__.__mro__ }}", "chat template failed"),
        ],
    ),
)
def test_templates_that_fail_or_do_not_end(monkeypatch: pytest.MonkeyPatch, source: str, words: str) -> None:
    if words != "memory":
        monkeypatch.setattr(chat_template, "CPU_LIMIT_S", 1.0)
    template = ChatTemplate(source, {})
    for _ in range(2):  # and the process is there again for the next conversation
        with ends(), pytest.raises(ValueError, match="chat template failed") as refused:
            template.render(TALK)
        assert words in str(refused.value)


@pytest.mark.slow
def test_a_template_that_is_never_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CPU_LIMIT_S", 1.0)
    with ends(), pytest.raises(TrainspecError, match="more than 1 s"):
        ChatTemplate("{{ 9 ** (9 ** 9) }}", {}).render(TALK)


def test_conversations_of_strange_shapes(project: Path) -> None:
    bpe.train(["the quick brown fox " * 9], 300).save(str(project / "tokenizer.json"))
    for number, variant in enumerate(some_variants({"messages": TALK}, 15, seed=1)):
        (project / "talk.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ({"messages": TALK}, variant)))
        options = ["--path", "talk.jsonl", "--tokenizer", "tokenizer.json", "--chat-template", "chatml"]
        tell("data", "prepare", "--source", "chat", "--output", f"out{number}", *options)


@pytest.mark.slow
def test_one_word_of_half_a_megabyte(project: Path) -> None:
    chance = random.Random(0)
    (project / "word.txt").write_text("".join(chance.choice("abcdefgh") for _ in range(2**19)))
    assert tell("data", "prepare", "--source", "text", "--path", "word.txt", "--output", "out")[0] == 0


@pytest.mark.parametrize("line", ["[" * 5000, '{"text": ' + "9" * 5000 + "}", '{"text": {"a": 1}}', "\x00", '{"text": "\\ud800"}', "null", '{"text": 1e999}'])  # fmt: skip # noqa: E501
def test_lines_of_json(project: Path, line: str) -> None:
    (project / "a.jsonl").write_text(f'{{"text": "whole"}}\n{line}\n')
    code, said = tell("data", "prepare", "--source", "jsonl", "--path", "a.jsonl", "--output", "out")
    assert code == 2 and "a.jsonl:2" in said


def test_paths_that_are_no_files(project: Path) -> None:
    os.mkfifo(project / "pipe")
    for path in ("pipe", "/dev/zero", "x" * 5000, "~nobody-at-all/x", "\ud800"):
        for source in ("text", "jsonl", "parquet"):
            assert tell("data", "prepare", "--source", source, "--path", path, "--output", "out")[0] in (2, 4)
        assert tell("backtest", path)[0] in (2, 4)
        assert tell("certify", "--verify", path)[0] in (2, 4)
        assert tell("data", "info", path)[0] in (2, 4)


@pytest.mark.slow
def test_manifests_of_token_folders(project: Path) -> None:
    (project / "a.txt").write_text("to be or not to be\n" * 200)
    assert tell("data", "prepare", "--source", "text", "--path", "a.txt", "--output", "out")[0] == 0
    manifest = project / "out/manifest.json"
    content = manifest.read_bytes()
    variants = [json.dumps(variant).encode() for variant in some_variants(json.loads(content), 60, seed=2)]
    for damaged in (*variants, *damaged_bytes(content, 40)):
        manifest.write_bytes(damaged)
        tell("data", "info", "out", "--verify")
    manifest.write_bytes(content)
    for name in ("train_00000.bin", "tokenizer.json"):
        whole = (project / "out" / name).read_bytes()
        for damaged in damaged_bytes(whole, 10):
            (project / "out" / name).write_bytes(damaged)
            tell("data", "info", "out", "--verify")
            given = ["--source", "text", "--path", "a.txt", "--output", "two", "--tokenizer", f"out/{name}"]
            tell("data", "prepare", *given)
        (project / "out" / name).write_bytes(whole)


@pytest.mark.slow
def test_pictures_and_volumes(project: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    nibabel = pytest.importorskip("nibabel")
    array = np.arange(64, dtype=np.uint8).reshape(8, 8)
    (project / "pictures/one").mkdir(parents=True)
    (project / "pictures/two").mkdir()
    for folder in ("images", "labels"):
        (project / "volumes" / folder).mkdir(parents=True)
        nibabel.save(
            nibabel.Nifti1Image(np.zeros((8, 8, 8), np.int16), np.eye(4)), project / "volumes" / folder / "a.nii"
        )
    np.save(project / "pictures/one/a.npy", array)
    image.fromarray(array).save(project / "pictures/two/b.png")
    files = ["pictures/one/a.npy", "pictures/two/b.png", "volumes/images/a.nii", "volumes/labels/a.nii"]
    from trainspec_cli.data.corpus.labelled import open_samples
    from trainspec_cli.recipe.keys.model import ConvModel
    from trainspec_cli.recipe.keys.run import DataSpec

    def look(name: str) -> None:
        kind = name.partition("/")[0]
        flat = kind == "pictures"
        model = ConvModel("resnet", (8, 8), (8,), in_channels=1, num_classes=2) if flat else None
        model = model or ConvModel("unet", (8, 8, 8), (8,), in_channels=1, num_classes=2)
        data = DataSpec(seq_len=1, source="images" if flat else "volumes", path=kind)
        samples = open_samples(data, model, project / kind)
        for split in ("train", "heldout"):
            for index in range(samples.count(split)):
                samples.train(index, np.random.default_rng(0)) if split == "train" else samples.heldout(index)

    for name in files:
        whole = (project / name).read_bytes()
        for damaged in damaged_bytes(whole, 60):
            (project / name).write_bytes(damaged)
            refuses(lambda name=name: look(name))
        (project / name).write_bytes(whole)


def test_tables_of_measured_runs(project: Path) -> None:
    rows = list(csv.reader(MEASURED.read_text().splitlines()[:3]))
    chance = random.Random(4)
    strange = ["nan", "inf", "-1", "0", "1e308", "9" * 5000, "x" * 300, "\x00", "é", "1e18", ""]
    for _ in range(60):
        changed = [list(row) for row in rows]
        for _ in range(3):
            changed[chance.choice([1, 2])][chance.randrange(len(rows[0]))] = chance.choice(strange)
        with (project / "t.csv").open("w", newline="") as file:
            csv.writer(file).writerows(changed)
        tell("backtest", "t.csv", *chance.choice([[], ["--json"]]))
    for damaged in damaged_bytes("\n".join(MEASURED.read_text().splitlines()[:3]).encode(), 30):
        (project / "t.csv").write_bytes(damaged)
        tell("backtest", "t.csv")


@pytest.mark.slow
def test_certificates(project: Path) -> None:
    body = {
        "schema": "trainspec.certificate/3",
        "date": "2026-01-01",
        "signer": {"public_key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAA", "fingerprint": "SHA256:x"},
        "signature": "AAAA",
        "verdict": "kept",
        "spec_version": "1",
        "whole": True,
        "machine": {"gpu_names": [], "cpu_cores": 2},
        "clauses": [{"id": "A", "level": "MUST", "title": "t", "cases": 1, "failed": 0, "worst": 0.1, "bound": 0.2}],
        "findings": [{"clause": "A", "case": "c", "passed": False, "figures": {"error": 0.1}}],
    }
    for variant in some_variants(body, 250):
        if isinstance(variant, dict):
            try:
                variant["digest"] = digest(variant)
            except ValueError:
                variant["digest"] = "none"
        (project / "c.json").write_text(json.dumps(variant))
        tell("certify", "--verify", "c.json")


def test_figures_in_the_cache(project: Path) -> None:
    """Whatever the file contains, the machine is measured again."""
    for content in (b"", b"[]", b"{}", b"\xff", b"[" * 5000, b'{"processes": 1e999}', b"9" * 5000):
        (project / "probe.json").write_bytes(content)
        assert read_probe(project / "probe.json") is None
