"""A serving process with a scripted engine: `python scripted_serving.py`; it ends itself at a request of 13 tokens."""

from __future__ import annotations

import json
import os
import sys

CONTENT = {"v1": "one", "latest": "new"}


def main() -> None:
    """Respond to each order with a letter a line."""
    for line in sys.stdin:
        order = json.loads(line)
        if "cancel" in order:
            continue
        if "list" in order:
            event = {"id": order["id"], "versions": ["1.1", "1.2"]}
            print(json.dumps(event), flush=True)
            continue
        if len(order["tokens"]) == 13:
            os._exit(1)
        text = CONTENT.get(order["version"])
        if text is None:
            failed = {"id": order["id"], "tokens": [], "logprobs": [], "finish": "failed", "error": "no such version"}
            print(json.dumps(failed), flush=True)
            continue
        text = text[: order["max_tokens"]]
        for at, letter in enumerate(text):
            finish = "stop" if at == len(text) - 1 else None
            event = {"id": order["id"], "tokens": [ord(letter) + 100], "logprobs": [-0.5], "finish": finish}
            print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main()
