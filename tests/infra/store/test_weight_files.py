"""Safetensors files and Hugging Face folders, read in place."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from infra.store.layout import tensor_bytes
from infra.store.publisher import Publisher
from infra.store.weight_files import folder_tensors, tensor_places, weights_sample
from infra.store.weight_store import WeightStore
from schemas.records import PolicyVersion, TensorSpec, WeightVersion

ONE, TWO = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2], np.uint8)


def shards(folder: Path, **places: str) -> Path:
    """A folder whose tensors are in several files."""
    save_file({"one": ONE}, folder / "first.safetensors")
    save_file({"two": TWO}, folder / "second.safetensors")
    found = {"one": "first.safetensors", "two": "second.safetensors"} | places
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))
    return folder


def test_folder_tensors_reads_several_files(tmp_path: Path) -> None:
    found = folder_tensors(shards(tmp_path))
    assert {name: spec for name, (spec, _) in found.items()} == {
        "one": TensorSpec("one", "F32", (2, 3)),
        "two": TensorSpec("two", "U8", (2,)),
    }
    assert found["one"][1].tobytes() == ONE.tobytes()


def test_folder_tensors_can_be_published(tmp_path: Path) -> None:
    found = folder_tensors(shards(tmp_path))
    manifests: list[WeightVersion] = []
    how = {"step": 1, "batches": (), "batch_offsets": (), "trajectories_trained": 0}
    with WeightStore(tmp_path / "store") as store:
        publisher = Publisher(store, manifests.append, [spec for spec, _ in found.values()])
        publisher.publish({name: data for name, (_, data) in found.items()}, PolicyVersion(0, 1), **how)
        publisher.close()
        assert store.seal(PolicyVersion(0, 1)).blake3 == manifests[0].blake3
        with store.pin(PolicyVersion(0, 1)) as path:
            assert path.read_bytes().endswith(ONE.tobytes() + TWO.tobytes())


def test_sample_of_weights_depends_on_names_and_values(tmp_path: Path) -> None:
    """And not on the files in which they are."""

    def sample(name: str, **tensors: np.ndarray) -> str:
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        return weights_sample(tmp_path / name)

    large = np.zeros(10_000, np.float32)
    samples = [
        sample("same", one=ONE, two=TWO),
        sample("empty", one=ONE, two=TWO[:0]),
        sample("named", one=ONE, to=TWO),
    ]
    samples += [sample(f"changed at {place}", w=np.where(np.arange(10_000) == place, 1, large)) for place in (0, 9999)]
    samples += [sample("large", w=large)]
    assert len(set(samples)) == 6
    (tmp_path / "shards").mkdir()
    assert weights_sample(shards(tmp_path / "shards")) == samples[0]


@pytest.mark.parametrize("data", [b"", b"short", bytes(range(64))])
def test_sample_of_weights_names_an_invalid_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a safetensors file"):
        weights_sample(tmp_path)


ENTRY = {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}


def file_with_header(header: dict[str, Any], size: int = 0) -> bytes:
    """A file with this header and `size` zero bytes."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_tensor_places_of_random_bytes_are_in_range(head: bytes, body: bytes) -> None:
    text = b'{"w": ' + head + b"}"
    for data in (head, len(text).to_bytes(8, "little") + text + body):
        with suppress(ValueError):
            for spec, start, end in tensor_places(memoryview(data)).values():
                assert 0 <= start <= end <= len(data)
                assert tensor_bytes(spec) == end - start


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot mmap an empty file"),
        (b"\xff" * 100, "its header has"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ((4).to_bytes(8, "little") + b"{[}]", "not a safetensors file"),
        (file_with_header({"w": ENTRY}), "is at bytes 0 to 36 of 0"),
        (file_with_header({"w": ENTRY | {"data_offsets": [0, 20]}}, 36), "has 36 bytes but is at bytes 0 to 20"),
        (file_with_header({"w": ENTRY | {"data_offsets": [-36, 0]}}, 36), "is at bytes -36 to 0"),
        (file_with_header({"w": ENTRY | {"data_offsets": [0.0, 36.0]}}, 36), "at bytes 0.0 to 36.0"),
        (file_with_header({"w": ENTRY | {"data_offsets": [0]}}, 36), "not a safetensors file"),
        (file_with_header({"w": ENTRY | {"shape": [-3, -3]}}, 36), r"shape \(-3, -3\)"),
        (file_with_header({"w": ENTRY | {"shape": 9}}, 36), "not a safetensors file"),
        (file_with_header({"w": ENTRY | {"dtype": "F33"}}, 36), "unknown dtype 'F33'"),
        (file_with_header({"w": ENTRY | {"dtype": []}}, 36), "not a safetensors file"),
        (file_with_header({"w": {}}), "not a safetensors file"),
        (file_with_header({"w": 9}), "not a safetensors file"),
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "not a safetensors file"),
    ],
)
def test_folder_tensors_names_an_invalid_file(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        folder_tensors(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def test_folder_tensors_rejects_paths_outside_of_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names files outside of its folder"):
        folder_tensors(shards(tmp_path, two="../second.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a valid index"):
        folder_tensors(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither"):
        folder_tensors(tmp_path / "nowhere")
