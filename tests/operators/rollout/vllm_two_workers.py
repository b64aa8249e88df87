"""Run by test_vllm_engine.py: an engine with two workers. It prints its tokens, and then waits.

python vllm_two_workers.py MODEL_FOLDER WEIGHTS
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the default may require more cores than there are


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tiny_engines import mixed, run
    from tiny_models import CONTEXT

    from operators.rollout.vllm_engine import VllmEngine, open_vllm
    from schemas.records import PolicyVersion

    vllm = open_vllm(Path(sys.argv[1]), slots=8, context=CONTEXT, gpus=2, distributed_executor_backend="mp")
    engine = VllmEngine(vllm)
    engine.load(Path(sys.argv[2]), PolicyVersion(1, 1))
    done = run(engine, mixed(6))
    print(json.dumps({name: each.generated.token_ids.tolist() for name, each in done.items()}), flush=True)
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    main()
