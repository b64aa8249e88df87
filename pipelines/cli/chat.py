"""`laminar chat`: talk to a weight version of a run while it trains."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infra.escaping import escape_json, print_escaped
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption, RunOption
from pipelines.inspect.run_folders import RUNS, folder_of
from pipelines.present.progress import ProgressPrinter

if TYPE_CHECKING:
    from pipelines.run.gateway_access import GatewayAccess

app = Commands()
_DATA = b"data: "
WAIT_S, AGAIN_S = 3.0, 15.0
"""When a wait for an answer is reported, and how often again."""


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(metavar="[QUESTION]", help="One question; without it, a conversation.")
    ] = None,
    run: RunOption = None,
    version: Annotated[
        str, typer.Option("--version", "-v", metavar="VERSION", help="epoch.number (1.120), or `latest`.")
    ] = "latest",
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=2, help="0: greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens of a response.")] = 512,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="A gateway elsewhere, e.g. https://host:8443/v1.")
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", envvar="OPENAI_API_KEY", help="The key of people, see `laminar agents serve`."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Talk to a weight version of an active run. Nothing of it is trained, and training does not wait for it.

    The run needs a section [gateway] or [agents]. The versions are those of this machine's weight store; older
    ones are pulled first, see `laminar weights pull`. In a conversation, end with Ctrl-D.

    \b
    Examples:
      laminar chat "12+34="
      laminar chat --version 1.20 --temperature 1
      laminar chat "12+34=" --json | jq .choices[0].message.content
    """
    access = _access(run, url, key)
    settings = {"model": f"laminar:{version}", "temperature": temperature, "max_tokens": max_tokens}
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    if json:
        if question is None:
            raise typer.BadParameter("--json needs a question", param_hint="QUESTION")
        body = {**settings, "messages": [*messages, {"role": "user", "content": question}]}
        with _waiting(version, access.log), access.post("chat/completions", body) as response:
            print_escaped(escape_json(json_module.dumps(json_module.load(response), indent=2, ensure_ascii=False)))
        return
    for asked in [question] if question is not None else _questions():
        messages.append({"role": "user", "content": asked})
        answer = ""
        with ExitStack() as before_text:
            before_text.enter_context(_waiting(version, access.log))
            for part in _answer(access, {**settings, "messages": messages}):
                before_text.close()
                answer += part
                print_escaped(part, end="")
        print_escaped()
        messages.append({"role": "assistant", "content": answer})


def _waiting(version: str, log: Path | None) -> ProgressPrinter:
    """Return the lines on standard error while there is no text of an answer; `log` is that of the serving process."""
    what = "the first question starts a process that loads the model, later ones load another version"
    what += f"; its log is {log}" if log is not None else ""
    subject = f"waiting for the gateway to answer under version {version}: {what}"
    return ProgressPrinter(subject, every_s=AGAIN_S, first_s=WAIT_S, only_slow=True)


def _access(run: str | None, url: str | None, key: str | None) -> GatewayAccess:
    from operators.io.episode_keys import PEOPLE
    from pipelines.run.gateway_access import GatewayAccess, access_of, url_here

    if url is not None:
        if not key:
            raise typer.BadParameter("--url needs --key, see `laminar agents serve`", param_hint="--key")
        return GatewayAccess(url, key)
    access = access_of(folder_of(RUNS, run), PEOPLE)
    return replace(access, url=url_here(access.url))


def _questions() -> Iterator[str]:
    """Yield the lines that a person types, until the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            return
        if line.strip():
            yield line


def _answer(access: GatewayAccess, body: dict[str, Any]) -> Iterator[str]:
    """Yield the text of a response as it arrives. Raises GatewayError."""
    from pipelines.run.gateway_access import GatewayError

    with access.post("chat/completions", {**body, "stream": True}) as response:
        for line in response:
            data = line.strip().removeprefix(_DATA)
            if not line.startswith(_DATA) or data == b"[DONE]":
                continue
            chunk = json_module.loads(data)
            if "error" in chunk:
                raise GatewayError(str(chunk["error"].get("message")))
            for choice in chunk.get("choices", ()):
                if content := choice.get("delta", {}).get("content"):
                    yield str(content)
