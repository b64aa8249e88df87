"""`laminar deploy`: a run's deployment files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from infra.escaping import print_escaped
from pipelines.cli.option_sets import Commands
from pipelines.cli.options import JsonOption
from pipelines.cli.run import ConfigArgument, SetOption
from pipelines.present.output import Report

app = Commands()


@app.command()
def deploy(
    config: ConfigArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the files.")],
    changes: SetOption = None,
    json: JsonOption = False,
) -> Report:
    """Write a run's deployment files from CONFIG: a compose file and Kubernetes manifests.

    Roles, replicas and resources come from CONFIG, images, storage and machines from its section [deploy]; the same
    CONFIG always gives the same files. infra/deploy/files holds the files of examples/deployed.toml. --set changes
    only the files of the cluster, so it takes keys of [deploy] alone. The files of model, rows, rewards and
    environments must be below deploy.volume_path; the command lists what to copy there.

    \b
    Examples:
      laminar deploy examples/deployed.toml infra/deploy/files
      laminar deploy run.toml cluster --set deploy.image=registry.example/laminar:1 --set deploy.namespace=rl
      sh cluster/kubernetes/secrets.sh DIR && kubectl apply -k cluster/kubernetes
    """
    from pipelines.config import read_config
    from pipelines.run.deployment_checks import check_deployable, volume_files

    if other := [each for each in changes or () if not each.startswith("deploy.")]:
        raise typer.BadParameter(f"{other[0]}: set it in {config}, which the pods read", param_hint="--set")
    draft = read_config(config, changes or [])
    check_deployable(draft, config)  # before the imports below, which take seconds
    from pipelines.run.deployment import COMPOSE, files_of, plan_of

    plan = plan_of(config, tuple(changes or ()))
    if plan.note:
        print_escaped(plan.note, err=True)
    if needed := volume_files(draft.config):
        listed = ", ".join(f"{path} ({key})" for key, path in needed)
        print_escaped(
            f"copy to the volume before the roles start (docs/deploy.md has the commands): {listed}", err=True
        )
    files = files_of(plan)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    if COMPOSE in files:
        (folder / "run.toml").chmod(0o644)  # its containers read it as another user; it holds no secret
    elif (folder / COMPOSE).exists():
        print_escaped(f"{folder / COMPOSE} is of an earlier configuration: remove it", err=True)
    data = {"run": plan.run, "files": list(files)}
    return Report(data, lambda: "\n".join(str(folder / name) for name in files), json)
