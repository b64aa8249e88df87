"""`laminar deploy`: a run's deployment files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.options import JsonOption
from pipelines.cli.run import ConfigArgument
from pipelines.present.output import Report

app = typer.Typer()


@app.command()
def deploy(
    config: ConfigArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the files.")],
    json: JsonOption = False,
) -> Report:
    """Write a run's deployment files from CONFIG: a compose file and Kubernetes manifests.

    Roles, replicas and indices come from CONFIG; the same CONFIG always gives the same files. infra/deploy/files holds
    the files of examples/deployed.toml.

    \b
    Examples:
      laminar deploy examples/deployed.toml infra/deploy/files
      kubectl apply -f infra/deploy/files/kubernetes.yaml
    """
    from pipelines.config import ConfigError
    from pipelines.run.deployment import files_of, plan_of

    plan = plan_of(config)
    if not plan.run:
        raise ConfigError(f"{config}: run.name is not set; it names the run whose topics the roles read and write")
    files = files_of(plan)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return Report(
        {"run": plan.run, "files": list(files)}, lambda: "\n".join(str(folder / name) for name in files), json
    )
