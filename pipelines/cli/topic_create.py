"""`laminar topics create`: a run's topics, created by an administrator."""

from __future__ import annotations

import typer

from infra.escaping import print_escaped
from pipelines.cli.options import JsonOption
from pipelines.cli.run import ConfigArgument
from pipelines.present.output import Report

app = typer.Typer()


@app.command()
def create(config: ConfigArgument, json: JsonOption = False) -> Report:
    """Create the topics of CONFIG's run that do not exist, and check the settings of those that do.

    `laminar run` and `laminar submit` do the same; a cluster with ACLs needs an administrator for it. With
    kafka.client_properties = ".../{role}.properties" the file of the user `admin` is used.

    \b
    Examples:
      laminar topics create run.toml
    """
    from infra.kafka.readiness import wait_for_brokers
    from pipelines.config import ConfigError, load_config
    from pipelines.run.run_kafka import WAIT_S
    from pipelines.run.topics import make_topics
    from schemas.topics import CATALOGUE

    loaded = load_config(config)
    if not loaded.run.name:
        raise ConfigError(f"{config}: run.name is not set; it names the run whose topics are created")
    wait_for_brokers(loaded.kafka.client(), WAIT_S, lambda _, line: print_escaped(line, err=True))
    make_topics(loaded, lambda line: print_escaped(line, err=True))
    names = [topic.name(loaded.run.name) for topic in CATALOGUE.values()]
    data = {"run": loaded.run.name, "topics": names}
    return Report(data, lambda: f"run {loaded.run.name} has its {len(names)} topics", json)
