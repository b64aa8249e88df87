"""Run by test_vllm_engine.py: an engine with two workers. It prints its tokens and how many bytes of the weights each
worker copies, and then waits for the end of its input.

python vllm_two_workers.py MODEL_FOLDER WEIGHTS TOKEN_SAMPLER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the default may require more cores than there are


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tiny_engines import mixed, run
    from tiny_models import CONTEXT

    from operators.rollout.vllm_engine import VllmEngine, open_vllm
    from schemas.records import PolicyVersion

    folder, weights, token_sampler = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    options: dict[str, Any] = {"slots": 8, "context": CONTEXT, "gpus": 2, "distributed_executor_backend": "mp"}
    vllm = open_vllm(folder, token_sampler=token_sampler, **options)  # type: ignore[arg-type]
    engine = VllmEngine(vllm)
    engine.load(weights, PolicyVersion(1, 1))
    done = run(engine, mixed(6))
    tokens = {name: each.generated.token_ids.tolist() for name, each in done.items()}
    copied = vllm.collective_rpc(copied_bytes, args=(str(weights),))
    print(json.dumps({"tokens": tokens, "copied": copied}), flush=True)
    sys.stdin.read()
    engine.close()


def copied_bytes(worker: Any, file: str) -> int:
    """How many bytes of the mapped weights `load_worker_weights` copies in `worker`."""
    from unittest.mock import patch

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from infra.models import weights
    from operators.rollout import vllm_worker

    mapped: set[int] = set()

    def mapped_tensors(path: Path) -> list[tuple[str, torch.Tensor]]:
        found = weights.mapped_tensors(path)
        mapped.update(tensor.untyped_storage().data_ptr() for _, tensor in found)
        return found

    class Copies(TorchDispatchMode):
        copied = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.copy_.default and args[1].untyped_storage().data_ptr() in mapped:
                self.copied += args[1].numel() * args[1].itemsize
            return function(*args, **(kwargs or {}))

    with patch.object(vllm_worker, "mapped_tensors", mapped_tensors), Copies() as copies:
        vllm_worker.load_worker_weights(worker, file)
    return copies.copied


if __name__ == "__main__":
    main()
