"""The configuration of rollout processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from infra.machine import check_gpu_list
from infra.name_lookup import suggest_name
from infra.setting_types import CheckedSettings, NonNegative, NonNegativeInt, Positive, PositiveInt
from operators.rollout.emulation_config import EngineEmulation
from operators.rollout.environments.config import ENVIRONMENTS, EnvironmentSpec
from operators.rollout.vllm_options import reject_own
from schemas.records import TokenSampler

_DEFAULT_SLOTS = 128


@dataclass(frozen=True)
class RolloutConfig(CheckedSettings):
    """The engine that generates, its processes and their limits. Raises ValueError naming the field that is invalid."""

    engine: Literal["transformers", "vllm", "emulated"] = "transformers"
    """`vllm` requires vLLM (extra `vllm`). `emulated` emulates the timing of other accelerators and generates synthetic
    responses; the whole run is then an emulation."""
    processes: PositiveInt = 1
    """Rollout processes. Each hosts `replicas` replicas and steps their engines in turn."""
    replicas: PositiveInt = 1
    """Replicas in each rollout process."""
    slots: PositiveInt | None = None
    """Trajectories that a replica generates at once. Unset: 128, or as many as the free memory of its GPU has room for
    with KV of `context` tokens each, if these are fewer; vLLM takes 128."""
    context: int | None = None
    """Maximum tokens of prompt and response together; unset: the model's maximum position. On a GPU the KV of slots ×
    context tokens is allocated at the start, except by vLLM: a context as short as the longest trajectory makes room
    for more slots."""
    kv_capacity: int | None = None
    """KV capacity of a replica in tokens; unset: slots × context, or with vLLM on a GPU what fits its memory."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The data type of the replicas' computation, to which the trainer's float32 weights are rounded. Unset: bfloat16
    if `trainer.device` is a GPU, else float32."""
    threads: PositiveInt = 1
    """CPU threads of the model code in each process."""
    step_s: NonNegative = 0.03
    """Engine time between two polls of the inbox, in seconds."""
    linger_s: NonNegative = 0.2
    """How long a finished trajectory may wait for others in the same transaction, in seconds."""
    heartbeat_s: Positive = 1.0
    """Time between heartbeats of a replica; at most a third of placement.heartbeat_timeout_s."""
    tensor_parallel: PositiveInt = 1
    """GPUs per replica; more than one requires vLLM. The processes of a machine take its GPUs in order: process n takes
    the n-th group of so many."""
    gpus: tuple[NonNegativeInt, ...] = ()
    """The numbers of the GPUs of a machine that rollouts use, the same on every machine; empty: all that are
    visible."""
    vllm: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Additional engine arguments of vLLM, by name. Those that have a setting of their own are refused, and names that
    vLLM does not have."""
    token_sampler: TokenSampler = "laminar"
    """How tokens are drawn. `laminar`: each draw is a function of seed, trajectory and position, so any engine repeats
    it after a move. `vllm`: vLLM's own sampler, without a pass over the vocabulary in float64; a seed repeats a
    response only if it was never interrupted. Requires engine `vllm`. Each trajectory's record names it."""
    speculation: bool = False
    """Whether steps of few trajectories draft several tokens from recent texts and verify them in one pass. Tokens and
    logprobs do not change. Not with `vllm`."""
    emulation: EngineEmulation = field(default_factory=EngineEmulation)
    """The machine that the emulated engine emulates."""
    progress_tokens: PositiveInt = 512
    """A trajectory's progress is published after so many new tokens; they are the most that a killed process loses."""
    progress_s: NonNegative = 5.0
    """A trajectory's progress is published after so many seconds at the latest. Shorter trajectories publish none."""
    termination_notice_s: NonNegative = 0.0
    """After SIGTERM a process runs on for at most so many seconds, in which its trajectories move to others with
    their KV; then it publishes what is left of them, and ends. At most the time after which the system kills it (the
    notice of a spot machine, the grace period of a pod). 0: it publishes and ends at once, as after SIGINT."""
    step_timeout_s: Positive = 600.0
    """A step that takes longer than so many seconds ends its process; other replicas resume its trajectories."""
    kv_megabytes: NonNegativeInt = 1024
    """Memory for the KV of handed-over trajectories, in MB, kept for a few seconds until it is fetched; 0: the next
    owner recomputes it."""
    agent_kv_megabytes: NonNegativeInt = 256
    """Memory of a replica, in MB, for the KV of episodes that wait for their agent, so that the next turn need not
    recompute it; 0: it is recomputed. vLLM ignores it and uses its prefix cache."""
    reserve_s: NonNegative = 30.0
    """A replica's reservation for moved trajectories expires after so many seconds."""
    environments: tuple[EnvironmentSpec, ...] = ()
    """The environments of multi-turn episodes; prompts name them."""

    def _check(self) -> None:
        check_gpu_list("gpus", self.gpus)
        if self.gpus and len(self.gpus) % self.tensor_parallel:
            raise ValueError(
                f"gpus must be a multiple of tensor_parallel = {self.tensor_parallel} GPUs, not {list(self.gpus)}"
            )
        if self.engine != "vllm" and (self.vllm or self.tensor_parallel > 1):
            raise ValueError(f"tensor_parallel > 1 and vllm require engine 'vllm', not {self.engine!r}")
        if self.engine != "vllm" and self.token_sampler != "laminar":
            raise ValueError(
                f"token_sampler {self.token_sampler!r} requires engine 'vllm', not {self.engine!r}: set "
                "rollout.token_sampler = 'laminar'"
            )
        reject_own(self.vllm)
        if self.engine == "vllm" and self.speculation:
            raise ValueError(
                "speculation requires engine 'transformers' or 'emulated', not 'vllm', which verifies drafts with "
                "draws of its own: set rollout.speculation = false"
            )
        if self.engine == "emulated" and self.environments:
            raise ValueError("environments require an engine that generates text, not 'emulated'")
        names = [spec.resolved_name for spec in self.environments]
        if len(set(names)) < len(names):
            raise ValueError(f"environments: the names {sorted(names)} are not unique; set label")

    def environment_problem(self, name: str) -> str | None:
        """Why prompts cannot name the environment `name`, if they cannot; "" stands for no environment."""
        names = [spec.resolved_name for spec in self.environments]
        if not name or name in names:
            return None
        known = dict.fromkeys([*names, *ENVIRONMENTS])
        return f"there is no environment {name!r} in rollout.environments{suggest_name(name, known)}"

    @property
    def weights_dtype(self) -> str:
        """`dtype`, or float32 where no configuration of a run has decided it."""
        return self.dtype or "float32"

    @property
    def recorded_sampler(self) -> TokenSampler | None:
        """`token_sampler`, or None for synthetic tokens, which are not drawn from a model."""
        return None if self.engine == "emulated" else self.token_sampler

    @property
    def most_slots(self) -> int:
        """`slots`, or the number that a replica has at most if they are unset."""
        return self.slots or _DEFAULT_SLOTS

    @property
    def total_replicas(self) -> int:
        """The number of replicas of the run."""
        return self.processes * self.replicas

    def gpus_of(self, process: int, visible: Sequence[str]) -> tuple[str, ...]:
        """The GPUs that process `process` takes of those `visible` on its machine; empty without GPUs.

        If a machine has too few for all processes, the other processes run on other machines. Raises ValueError if
        there are too few for one replica, or if several replicas would share them.
        """
        if not visible and self.tensor_parallel == 1 and not self.gpus:
            return ()
        if absent := [gpu for gpu in self.gpus if gpu >= len(visible)]:
            raise ValueError(f"rollout.gpus has {absent[0]}, but this machine has {len(visible)} GPUs, numbered from 0")
        visible = [visible[gpu] for gpu in self.gpus] or visible
        if len(visible) < self.tensor_parallel:
            raise ValueError(
                f"rollout.tensor_parallel = {self.tensor_parallel}, but this machine has {len(visible)} GPUs"
            )
        if self.replicas > 1:
            raise ValueError(
                f"rollout.replicas = {self.replicas}: on GPUs each replica needs its own process; set "
                f"rollout.processes = {self.total_replicas} and rollout.replicas = 1"
            )
        first = process % (len(visible) // self.tensor_parallel) * self.tensor_parallel
        return tuple(visible[first : first + self.tensor_parallel])

    def hosted(self, process: int) -> range:
        """Indices of the replicas that process `process` hosts."""
        return range(process * self.replicas, (process + 1) * self.replicas)
