"""The layout equals that of the safetensors library, byte for byte."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save

from infra.store.layout import Layout
from schemas.records import TensorSpec

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor with increasing bytes."""
    count = torch.zeros(shape, dtype=dtype).nbytes
    data = torch.arange(count, dtype=torch.int64) % (2 if dtype == torch.bool else 251)
    return data.to(torch.uint8).view(dtype).reshape(shape)


MODELS = {
    "every dtype": {f"layer.{name}": tensor(dtype, 3, 5) for name, dtype in DTYPES.items()},
    "names": {name: tensor(torch.float32, 2) for name in ("b", "a.10", "a.9", 'é"\\', "ж/\x07", "B", "")},
    "shapes": {
        "scalar": tensor(torch.float32),
        "empty": tensor(torch.float16, 0, 4),
        "deep": tensor(torch.int8, 1, 2, 3),
    },
    "nothing": {},
}


@pytest.mark.parametrize("model", MODELS)
def test_layout_equals_that_of_the_library(model: str) -> None:
    tensors = MODELS[model]
    names = {dtype: name for name, dtype in DTYPES.items()}
    layout = Layout([TensorSpec(name, names[t.dtype], tuple(t.shape)) for name, t in tensors.items()])
    file = bytearray(layout.size)
    file[: len(layout.header)] = layout.header
    for name, place in layout.tensor_views(memoryview(file)).items():
        place[:] = tensors[name].reshape(-1).view(torch.uint8).numpy()
    assert bytes(file) == save(tensors, metadata={"format": "pt"})
    assert layout.names == tensors.keys()


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([TensorSpec("w", "F7", (1,))], "'w' has unknown dtype 'F7', not one of U64"),
        ([TensorSpec("w", "F32", (2, -1))], r"'w' has a negative dimension: shape \(2, -1\)"),
        ([TensorSpec("w", "F32", (1,)), TensorSpec("w", "F16", (1,))], "'w' is listed twice"),
    ],
)
def test_layout_raises_for_invalid_specs(specs: list[TensorSpec], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(specs)


def test_tensor_views_raises_for_a_file_of_another_size() -> None:
    layout = Layout([TensorSpec("w", "F32", (4,))])
    with pytest.raises(ValueError, match=f"the file has {layout.size - 1} bytes, the layout {layout.size}"):
        layout.tensor_views(memoryview(bytearray(layout.size - 1)))
