"""The work that runners submit to a GPU, checked without one.

Fake tensors have a device, a type and a shape, but no values: code that mixes devices raises, and so does code that
reads a value, which would synchronise with the GPU and cannot be recorded in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tiny_engines import kv_slots
from tiny_models import VOCABULARY, tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from operators.rollout.cuda_graphs import CudaGraphs
from operators.rollout.direct_layers import LayerStack
from operators.rollout.direct_runner import DirectRunner
from operators.rollout.forward_runner import ForwardRunner, kv_geometry
from operators.rollout.kv_slots import KVSlots
from operators.rollout.runner import Runner
from operators.rollout.sampling import draw
from operators.rollout.sampling_columns import SamplingColumns
from operators.rollout.step_plan import Decode, Prefill, plan_extension, plan_prefill

STEP = Decode(np.array([1, 2, 3]), np.array([5, 9, 2]))


class Driver:
    """Replaces CUDA's streams and graphs, and records the calls in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.graphs = 0

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Stream", lambda: Stream(self, "aside"))
        patch.setattr(torch.cuda, "current_stream", lambda: Stream(self, "main"))
        patch.setattr(torch.cuda, "stream", lambda stream: self.within(stream.name))
        patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(self))
        patch.setattr(torch.cuda, "graph", self.graph)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # which fake tensors do not have

    def graph(self, graph: Graph, pool: str | None, capture_error_mode: str) -> AbstractContextManager[None]:
        assert capture_error_mode == "thread_local"  # else a thread that allocates memory ends the recording
        return self.within(f"{graph.name} in {pool}")

    @contextmanager
    def within(self, what: str) -> Iterator[None]:
        self.calls.append(f"begin {what}")
        yield
        self.calls.append(f"end {what}")


class Stream:
    def __init__(self, driver: Driver, name: str) -> None:
        self._driver, self.name = driver, name

    def wait_stream(self, other: Stream) -> None:
        self._driver.calls.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, driver: Driver) -> None:
        self._driver, self.name = driver, f"graph {driver.graphs}"
        driver.graphs += 1

    def replay(self) -> None:
        self._driver.calls.append(f"replay {self.name}")

    def pool(self) -> str:
        return "the pool"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    found.install(monkeypatch)
    return found


@contextmanager
def runner_of(kind: type[Any], family: str, dtype: torch.dtype, **options: Any) -> Iterator[Runner]:
    """A runner on a fake GPU; within the context, tensors on the GPU are fake."""
    geometry = kv_geometry(tiny_model(family))
    with FakeTensorMode(allow_non_fake_inputs=True):  # tensors from the host are real, and copied
        torch.set_default_dtype(dtype)
        try:
            with torch.device("cuda"):
                model = tiny_model(family)
        finally:
            torch.set_default_dtype(torch.float32)
        slots = kv_slots(model, geometry)
        with torch.inference_mode():
            yield kind(model, slots, **options)


def contexts(*lengths: int) -> list[np.ndarray]:
    """Contexts of at least two tokens: torch treats a host tensor of one element as a constant, which needs a GPU."""
    return [np.arange(length) % VOCABULARY for length in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "family", "options"),
    [
        (DirectRunner, "qwen2", {"fixed": False}),
        (DirectRunner, "qwen3", {"fixed": False}),
        (DirectRunner, "llama", {"fixed": False}),
        (DirectRunner, "qwen2", {}),
        (DirectRunner, "qwen3_tied", {}),
        (ForwardRunner, "gpt2", {}),
        (ForwardRunner, "gpt_neox", {}),
    ],
)
def test_runner_stays_on_gpu_without_synchronising(
    kind: type[Any], family: str, options: dict[str, Any], dtype: torch.dtype, driver: Driver
) -> None:
    with runner_of(kind, family, dtype, **options) as runner:
        runner.prefill(plan_prefill(contexts(5, 9, 2), [0, 1, 2], 1 << 20))
        for blocks in ((), plan_prefill(contexts(4), [3], 1 << 20)):
            logits = runner.decode(STEP, blocks)
            assert (logits.device.type, logits.dtype, tuple(logits.shape)) == ("cuda", dtype, (3, VOCABULARY))
    assert bool(driver.graphs) == (kind is DirectRunner and "fixed" not in options)


def test_cuda_graphs_record_each_shape_once_after_warm_up(driver: Driver) -> None:
    with runner_of(DirectRunner, "qwen2", torch.bfloat16) as runner:
        for step in (STEP, STEP, Decode(np.arange(6), np.arange(6)), STEP):
            runner.decode(step)
    recorded = ["aside waits for main", "begin aside", "end aside", "main waits for aside"]
    assert driver.calls == [
        *[*recorded, "begin graph 0 in None", "end graph 0 in None", "replay graph 0"],
        "replay graph 0",
        *[*recorded, "begin graph 1 in the pool", "end graph 1 in the pool", "replay graph 1"],
        "replay graph 0",
    ]


def test_cuda_graphs_cannot_record_a_read_of_a_value(driver: Driver) -> None:
    """The tests above detect such a read."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        CudaGraphs().record(lambda: torch.zeros(int(torch.ones(2, device="cuda").sum()), device="cuda"))


@pytest.mark.parametrize("sampling", ["plain", "cut", "greedy"])
def test_draw_stays_on_gpu(sampling: str) -> None:
    columns = SamplingColumns(
        temperature=None if sampling == "plain" else np.full(3, 0.7),
        cut=(np.full(3, 5), np.full(3, 0.9)) if sampling == "cut" else None,
        greedy=np.array([True, False, True]) if sampling == "greedy" else None,
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.zeros(3, VOCABULARY, dtype=torch.bfloat16, device="cuda")
        tokens, logprobs = draw(logits, columns, np.full(3, 0.5))
    assert (tokens.device.type, tokens.dtype, tuple(tokens.shape)) == ("cuda", torch.int64, (3,))
    assert (logprobs.device.type, logprobs.dtype, tuple(logprobs.shape)) == ("cuda", torch.float64, (3,))


def test_kv_of_a_row_reaches_a_gpu_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, ...]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    model = tiny_model("qwen2")
    layers, heads, size = kv_geometry(model)
    kv = kv_slots(model).export_row(1, 9)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        slots = KVSlots(
            layers=layers,
            rows=4,
            heads=heads,
            context=64,
            head_size=size,
            dtype=model.dtype,
            device=torch.device("cuda"),
        )
        assert slots.import_row(2, kv, 7)
        assert slots.write_row(3, 9, 5, {0: kv.data[: len(kv.data) // layers]}) == {0}
        slots.permute(np.array([1, 0]), 8)
    assert pinned == [(layers, 2, heads, 7, size), (2, heads, 5, size), (2,)]


def test_rows_keep_their_order_on_a_gpu(driver: Driver) -> None:
    """Masking padding is faster there than moving rows."""
    with runner_of(DirectRunner, "qwen2", torch.float32, fixed=False) as runner:
        for _ in range(40):
            runner.decode(Decode(np.array([1, 2, 3]), np.array([1, 1, 30])))
            assert runner.preferred_order is None


def test_mask_of_a_resumed_block_is_made_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in each layer: a pass over several layers takes it from the plan."""
    made: list[torch.Tensor | None] = []
    mask_of = LayerStack._mask_of

    def counted(stack: LayerStack, block: Prefill) -> torch.Tensor | None:
        made.append(mask_of(stack, block))
        return made[-1]

    monkeypatch.setattr(LayerStack, "_mask_of", counted)
    model = tiny_model("qwen2")
    runner = DirectRunner(model, kv_slots(model))
    with torch.inference_mode():
        runner.prefill([plan_extension(np.array([8, 9]), 2, 4)])
    assert [None if mask is None else tuple(mask.shape) for mask in made] == [(2, 6)]
    assert len(runner.modules.layers) > 1
