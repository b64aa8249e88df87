"""The roofs beside which the other figures are read, products and copies; and the model of the check."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu.figures import Figure, seconds
from benchmarks.gpu.settings import Settings
from benchmarks.models import NO_END


def roofs(settings: Settings, model: Path) -> list[Figure]:
    """Rates of matrix products, and of copies within the device and between it and the host."""
    device, size, count = settings.device, settings.matrix, settings.copy_bytes
    figures = []
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        rate = 2 * size**3 / seconds(device, lambda a=left, b=right: a @ b, 5, 3)  # type: ignore[misc]
        figures.append(Figure(f"matrix product, {name}", rate / 1e12, "TFLOP/s"))
    on_device = torch.zeros(count, dtype=torch.uint8, device=device)
    other = torch.zeros_like(on_device)
    pageable = torch.zeros(count, dtype=torch.uint8)
    pinned = torch.zeros(count, dtype=torch.uint8, pin_memory=device != "cpu")
    copies = {
        "device to device": (other, on_device),
        "device to pinned memory": (pinned, on_device),
        "device to pageable memory": (pageable, on_device),
        "pinned memory to device": (on_device, pinned),
        "pageable memory to device": (on_device, pageable),
        "pinned to pageable memory": (pageable, pinned),
    }
    for name, (target, source) in copies.items():
        took = seconds(device, lambda t=target, s=source: t.copy_(s), settings.repetitions)  # type: ignore[misc]
        figures.append(Figure(f"copy, {name}", count / took / 1e9, "GB/s"))
    return figures


def make_model(settings: Settings, model: Path) -> list[Figure]:
    """Make the model with random weights on the device, and save it in folder `model`."""
    torch.manual_seed(0)
    config = Qwen2Config(**settings.shape.config, **NO_END)  # type: ignore[arg-type]
    with torch.device(settings.device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(model)
    return [Figure("parameters", sum(each.numel() for each in made.parameters()) / 1e6, "M", note=settings.shape.name)]
