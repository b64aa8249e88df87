"""How rollouts run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from infra.name_lookup import suggest_name
from operators.rollout.emulation_config import EngineEmulation
from operators.rollout.environments.config import EnvironmentSpec


@dataclass(frozen=True)
class RolloutConfig:
    """Raises ValueError naming the field that does not fit."""

    engine: Literal["transformers", "vllm", "emulated"] = "transformers"
    """`vllm` needs vLLM installed (extra `vllm`). `emulated` takes the time of other accelerators and makes answers up:
    the whole run is then an emulation."""
    processes: int = 1
    """Rollout processes; each hosts `replicas` replicas and steps their engines in turn."""
    replicas: int = 1
    slots: int = 128
    """Trajectories a replica generates at once."""
    context: int | None = None
    """Tokens of prompt and response together; None: what the model's positions allow."""
    kv_capacity: int | None = None
    """Tokens of KV a replica may use; None: slots × context, or what vLLM finds room for on a GPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What replicas compute in; the trainer's float32 weights are rounded to it."""
    threads: int = 1
    """CPU threads of the model code in one process."""
    step_s: float = 0.03
    """Engine time between two looks at the inbox, in seconds."""
    linger_s: float = 0.2
    """How long a finished trajectory may wait for others to share its transaction, in seconds."""
    heartbeat_s: float = 1.0
    gpus: int = 1
    """GPUs that share each layer of a replica's model (tensor parallelism), several where the engine is vLLM. Of the
    GPUs of a machine process n takes the n-th so many."""
    vllm: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """More of vLLM's own engine arguments, by name."""
    emulation: EngineEmulation = field(default_factory=EngineEmulation)
    """What the emulated engine stands for."""
    progress_tokens: int = 512
    """Tokens that a trajectory gains before placement is told of them: what is lost at most where a process dies."""
    progress_s: float = 5.0
    """How long what a trajectory has gained may go untold, in seconds. A shorter trajectory costs nothing."""
    step_timeout_s: float = 600.0
    """A step that takes longer than so many seconds ends its process, whose work goes on elsewhere."""
    kv_megabytes: int = 1024
    """Memory for the KV of trajectories that move away, which waits there to be fetched, a few seconds at most; 0: what
    moves is computed anew where it goes on."""
    reserve_s: float = 30.0
    """How long a replica keeps room for trajectories that do not come, in seconds."""
    environments: tuple[EnvironmentSpec, ...] = ()
    """What answers the model between the turns of an episode; prompts name them."""

    def __post_init__(self) -> None:
        for name in ("processes", "replicas", "slots", "threads", "progress_tokens", "gpus"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.kv_megabytes < 0:
            raise ValueError(f"kv_megabytes must not be negative, not {self.kv_megabytes}")
        if self.engine != "vllm" and (self.vllm or self.gpus > 1):
            raise ValueError(f"gpus and vllm are for engine 'vllm', not {self.engine!r}")
        if self.engine == "emulated" and self.environments:
            raise ValueError("environments need an engine that writes text, not 'emulated'")
        called = [spec.resolved_name for spec in self.environments]
        if len(set(called)) < len(called):
            raise ValueError(f"environments: two are called the same, of {sorted(called)}; set label")
        for name in ("step_s", "linger_s", "heartbeat_s", "progress_s", "reserve_s", "step_timeout_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")

    def check_environment(self, name: str) -> None:
        """Raise ValueError if there is no environment called `name`; "" is none, and needs none."""
        called = [spec.resolved_name for spec in self.environments]
        if name and name not in called:
            raise ValueError(f"there is no environment {name!r} in rollout.environments{suggest_name(name, called)}")

    @property
    def total_replicas(self) -> int:
        """Replicas of the whole run."""
        return self.processes * self.replicas

    def gpus_of(self, process: int, visible: Sequence[str]) -> tuple[str, ...]:
        """Which of the `visible` GPUs of its machine process `process` takes; none where there are none.

        Where there are fewer than all processes need the others are on other machines. Raises ValueError where there
        are too few for one replica, or several replicas would share them.
        """
        if not visible and self.gpus == 1:
            return ()
        if len(visible) < self.gpus:
            raise ValueError(f"rollout.gpus = {self.gpus}, but this machine has {len(visible)} GPUs")
        if self.replicas > 1:
            raise ValueError(
                f"rollout.replicas = {self.replicas}: on GPUs each replica needs a process of its own, set "
                f"rollout.processes = {self.total_replicas} and rollout.replicas = 1"
            )
        first = process % (len(visible) // self.gpus) * self.gpus
        return tuple(visible[first : first + self.gpus])

    def hosted(self, process: int) -> range:
        """The indices of the replicas that process `process` hosts."""
        return range(process * self.replicas, (process + 1) * self.replicas)
