"""`laminar agents`: play the episodes of a run with agents on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption, RunOption
from pipelines.inspect.run_folders import RUNS, folder_of, laminar_command
from pipelines.present.output import Report

app = Commands(no_args_is_help=True)
KEY_VARIABLE = "LAMINAR_WORKER_KEY"


@app.callback()
def agents() -> None:
    """Play the episodes of a run with agents on other machines.

    \b
    Examples:
      laminar agents serve
      laminar agents play https://host:8443/v1 -j 8 -- python my_agent.py
    """


@app.command()
def serve(
    run: RunOption = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="In a container of a deployed gateway: the run's configuration.")
    ] = None,
    json: JsonOption = False,
) -> Report:
    """Show where an active run hands out its episodes over HTTP, and the keys for it. Keep the keys secret.

    The gateway serves: a run with a section [gateway], or with [agents] without command and function, hands out every
    episode to a program that claims it, and again after `agents.timeout_s` seconds without a result. `laminar agents
    play` is such a program; others use three requests, see docs/agents.md. The key of people is for `laminar chat` and
    evaluation harnesses.

    \b
    Examples:
      laminar agents serve
      laminar agents serve --json | jq -r .worker_key
      kubectl exec laminar-NAME-gateway-0 -- laminar agents serve --config /etc/laminar/run.toml
    """
    from operators.io.episode_keys import PEOPLE, WORKERS
    from pipelines.run.gateway_access import access_of, deployed_access, url_elsewhere

    if config is not None:
        workers, people = (deployed_access(config, holder) for holder in (WORKERS, PEOPLE))
    else:
        folder = folder_of(RUNS, run)
        workers, people = (access_of(folder, holder) for holder in (WORKERS, PEOPLE))
    found = {"url": url_elsewhere(workers.url), "worker_key": workers.key, "people_key": people.key}
    return Report(found, lambda: _served_text(found), as_json=json)


def _served_text(found: dict[str, Any]) -> str:
    return (
        f"url         {found['url']}\nworker key  {found['worker_key']}\npeople key  {found['people_key']}\n\n"
        f"{KEY_VARIABLE}={found['worker_key']} {laminar_command()} agents play {found['url']} -- python my_agent.py"
    )


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def play(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="The run's gateway, e.g. https://host:8443/v1.")],
    key: Annotated[
        str, typer.Option("--key", envvar=KEY_VARIABLE, help="The worker key, see `laminar agents serve`.")
    ] = "",
    concurrency: Annotated[int, typer.Option("--concurrency", "-j", min=1, help="Agents at once.")] = 4,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=1, help="Seconds of an attempt, at most those of the run.")
    ] = None,
    transcripts: Annotated[
        Path | None, typer.Option("--transcripts", metavar="DIR", help="Keep the output of each agent here.")
    ] = None,
    episodes: Annotated[int | None, typer.Option("--episodes", min=1, help="End after so many episodes.")] = None,
) -> None:
    """Play episodes of a run, by a command that follows `--`, until stopped.

    The command gets the variables that agents of a run get: OPENAI_BASE_URL, OPENAI_API_KEY, LAMINAR_TASK,
    LAMINAR_TASK_FILE and LAMINAR_REPORT. An attempt that fails or takes too long is given back to the run, which
    hands it out again.

    \b
    Examples:
      laminar agents play https://host:8443/v1 --key lm-workers-… -- python my_agent.py
      LAMINAR_WORKER_KEY=lm-workers-… laminar agents play http://127.0.0.1:8000/v1 -j 16 -- ./agent
    """
    from pipelines.run.agents_elsewhere import RemoteAgents, print_event
    from pipelines.run.gateway_access import GatewayAccess

    command = [word for word in context.args if word != "--"]
    if not command:
        raise typer.BadParameter("give the command of an agent after `--`", param_hint="COMMAND")
    if not key:
        raise typer.BadParameter(f"give the worker key, with --key or in {KEY_VARIABLE}", param_hint="--key")
    gateway = GatewayAccess(url, key)
    RemoteAgents(gateway, tuple(command), concurrency, timeout, transcripts, episodes, print_event).run()
