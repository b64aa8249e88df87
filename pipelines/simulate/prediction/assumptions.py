"""Assumptions for predicting a run with a real engine before its first start: times of engine and trainer, lengths.

Without a table of the user's, times are those of the emulated engine's default, Qwen2.5-32B on four H800 (decode steps
measured by the Laminar paper) and a trainer of 16 H800, with the weights, layers and arithmetic of the run's model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.models.sizes import ELEMENT_BYTES, context_length, kv_values, readable_config
from operators.rollout.emulation_config import EngineEmulation, LengthsConfig, RooflineConfig
from operators.trainer.emulation import TrainerEmulation
from operators.trainer.memory_plan import TARGETS, shape_of_config
from pipelines.config import Config, ConfigError, load_config
from pipelines.simulate.prediction.cluster import Cluster, uncalibrated
from pipelines.simulate.prediction.emulated_config import emulated_config
from pipelines.simulate.prediction.search import DECLINE

TABLE_PARAMETERS, TABLE_GPUS, TABLE_TRAIN_GPUS = 32.8e9, 4, 16
"""The model of the default times, the GPUs of its replica, and those of its trainer."""
GPU_BYTES_PER_S, GPU_OPERATIONS_PER_S, NETWORK_BYTES_PER_S = 3.35e12, 989e12, 100e9
LAYER_MS = {False: 0.06, True: 0.09}
"""Milliseconds of a layer of a decode step beside reading and arithmetic: launches, on several GPUs two all-reduces."""
STEPS = 6
"""Optimizer steps that are predicted."""
PROMPT_TOKENS = 512
SHORTER = 8
"""The 99th percentile of response lengths over their median: 16K over 2K tokens in the Laminar paper."""


@dataclass(frozen=True)
class ModelSize:
    """A model's parameters, all and those that a token passes, its layers, and the numbers in a token's KV."""

    name: str
    parameters: float
    active: float
    layers: int
    kv_values: int


@dataclass(frozen=True)
class Assumptions:
    """The choices of a user; None is assumed. `table` is the configuration of an emulated run, whose times hold for the
    run's replicas and trainer as they are. `prompt_tokens`, `p50` and `p99` are lengths in tokens.
    """

    table: Path | None = None
    prompt_tokens: int | None = None
    p50: float | None = None
    p99: float | None = None

    def cluster(self, config: Config, train_gpus: int, gpus_per_replica: int) -> Cluster:
        """The cluster of `config`, whose engine is real; `assumed` says what was assumed. Raises ConfigError, and
        ValueError for invalid lengths."""
        if reason := uncalibrated(config):
            raise ConfigError(reason)
        tasks, rollout, size = config.prompts.mixture, config.rollout, model_size(config)
        longest, folder = max(task.max_new_tokens for task in tasks), Path(config.model.path)
        context = rollout.context or (context_length(folder) if (folder / "config.json").is_file() else 0)
        left = max(context - longest, context // 8) if context else PROMPT_TOKENS
        prompt = self.prompt_tokens or min(PROMPT_TOKENS, left)
        context = context or prompt + longest
        if self.table is not None:
            engine, trainer, measured = self._times_of_table(self.table)
            times = [f"engine and trainer: the times of {self.table}, as they are for these replicas and this trainer"]
        elif size is None:
            known = ", ".join(target.model for target in TARGETS)
            raise ConfigError(
                f"the size of the model {str(folder)!r} is not known here: it has no readable config.json of a Qwen or "
                f"Llama model, and is none of {known}. Give times with --emulation FILE, or let the run generate for "
                "some minutes and give its folder: --calibrate runs/NAME"
            )
        else:
            engine = EngineEmulation(roofline_of(size, gpus_per_replica), pull_s=_pull_s(size, gpus_per_replica))
            trainer, times = trainer_of(size, train_gpus), _built_in(size, train_gpus, gpus_per_replica)
            measured = None
        lengths = self._lengths(measured, longest)
        held = rollout.kv_capacity or rollout.most_slots * context
        emulated = emulated_config(
            config, prompt, replace(engine, lengths=lengths), trainer, context=context, slots=rollout.most_slots
        )
        shown = f"{lengths.p50:,.0f} tokens at the median, {lengths.p99:,.0f} at the 99th percentile"
        environments = sorted({task.environment for task in tasks if task.environment})
        assumed = (
            *times,
            f"responses: {f'lengths of {lengths.file}' if lengths.file else shown}, at most {longest:,} (--p50, --p99)",
            f"prompts: {prompt:,} tokens (--prompt-tokens)",
            f"KV of a replica: {held:,} tokens ({_held(config)})",
            *(["GPUs: trainer.device is 'cpu', its ranks count as GPUs"] if config.trainer.device == "cpu" else []),
            *([f"not counted: turns and waits of environments ({', '.join(environments)})"] if environments else []),
        )
        element = ELEMENT_BYTES[rollout.weights_dtype]
        return Cluster(
            replace(emulated, trainer=replace(emulated.trainer, optimizer_steps=STEPS)),
            train_gpus=train_gpus,
            gpus_per_replica=gpus_per_replica,
            assumed=assumed,
            weights_gb=0.0 if size is None else element * size.parameters / 1e9,
        )

    def _times_of_table(self, table: Path) -> tuple[EngineEmulation, TrainerEmulation, LengthsConfig | None]:
        """The times of `table`, and its lengths if it has any, in real tokens. Raises ConfigError."""
        given = load_config(table)
        if not given.emulated:
            raise ConfigError(f"--emulation {table}: rollout.engine is {given.rollout.engine!r}, not 'emulated'")
        engine, lengths = given.rollout.emulation, given.rollout.emulation.lengths
        if lengths.file and engine.stride > 1:
            raise ConfigError(f"--emulation {table}: lengths of a file cannot have a stride ({engine.stride})")
        real = replace(lengths, p50=lengths.p50 * engine.stride, p99=lengths.p99 * engine.stride)
        return replace(engine, stride=1), given.trainer.emulation, None if lengths == LengthsConfig() else real

    def _lengths(self, measured: LengthsConfig | None, longest: int) -> LengthsConfig:
        if self.p50 is None and self.p99 is None and measured is not None:
            return measured
        p99 = self.p99 or max(longest, self.p50 or 1.0)
        return LengthsConfig(self.p50 or max(1.0, p99 / SHORTER), p99)


def model_size(config: Config) -> ModelSize | None:
    """The size of the run's model: by its config.json, or by its name if that is a target of docs/training.md."""
    folder = Path(config.model.path)
    known: dict[str, Mapping[str, Any]] = {target.model: target.config for target in TARGETS}
    found = (readable_config(folder) if config.model.path else {}) or known.get(folder.name, {})
    experts = next((name for name in ("num_experts", "num_local_experts") if found.get(name)), None)
    passed = found if experts is None else {**found, experts: found.get("num_experts_per_tok", 1)}
    try:
        shape, active = shape_of_config(found), shape_of_config(passed)
        return ModelSize(folder.name, shape.parameters, active.parameters, shape.layers, kv_values(found))
    except (KeyError, TypeError, ValueError):
        return None


def roofline_of(size: ModelSize, gpus: int) -> RooflineConfig:
    """The steps of a replica of `gpus` H800, in bfloat16: the default's, with reading and arithmetic of `size`."""
    default = RooflineConfig()
    parts, kv_bytes = size.parameters / gpus, 2 * size.kv_values / gpus
    fixed = 1e3 * 2 * parts / GPU_BYTES_PER_S + LAYER_MS[gpus > 1] * size.layers
    arithmetic = size.active / gpus / (TABLE_PARAMETERS / TABLE_GPUS)
    read_ms = 1e3 * default.decode_context * kv_bytes / GPU_BYTES_PER_S
    default_ms = 1e-6 * default.decode_context * default.kv_ns
    first = default.decode_ms[0][1] - default_ms
    rows = tuple(
        (batch, fixed + arithmetic * (ms - default_ms * batch - first) + read_ms * batch)
        for batch, ms in default.decode_ms
    )
    return RooflineConfig(
        decode_ms=rows,
        kv_ns=1e9 * kv_bytes / GPU_BYTES_PER_S,
        prefill_us=1e6 * 2 * size.active / (gpus * GPU_OPERATIONS_PER_S * 0.5),
        kv_move_us=1e6 * kv_bytes * gpus / NETWORK_BYTES_PER_S,
    )


def trainer_of(size: ModelSize, gpus: int) -> TrainerEmulation:
    """The trainer on `gpus` H800: the default's, with the arithmetic and the weights of `size`."""
    default = TrainerEmulation()
    fixed, weights = default.seconds(0), size.parameters / TABLE_PARAMETERS
    slower = size.active / TABLE_PARAMETERS / (gpus / TABLE_TRAIN_GPUS) ** (1 - DECLINE)
    return TrainerEmulation(
        tuple((tokens, fixed + (seconds - fixed) * slower) for tokens, seconds in default.step_s),
        default.stall_s * weights,
        default.broadcast_s * weights,
    )


def _pull_s(size: ModelSize, gpus: int) -> float:
    return EngineEmulation().pull_s * size.parameters / gpus / (TABLE_PARAMETERS / TABLE_GPUS)


def _built_in(size: ModelSize, train_gpus: int, gpus: int) -> list[str]:
    experts = f", of which a token passes {size.active / 1e9:.1f}" if size.active < size.parameters else ""
    return [
        f"model: {size.name}, {size.parameters / 1e9:.1f} billion parameters{experts}",
        f"engine: the built-in table of Qwen2.5-32B on {TABLE_GPUS} H800, with the weights, layers and arithmetic of "
        f"this model on {gpus} (--emulation)",
        f"trainer: the built-in table of 32B on {TABLE_TRAIN_GPUS} H800, with the arithmetic of this model; "
        f"{train_gpus} GPUs train (n/{TABLE_TRAIN_GPUS})^{1 - DECLINE:.3f} times as fast (--emulation)",
    ]


def _held(config: Config) -> str:
    return "rollout.kv_capacity" if config.rollout.kv_capacity else "rollout.slots × rollout.context"
