"""What a role that is submitted needs of its configuration, of this machine and, before it is detached, of Kafka."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from infra.listening import is_loopback, resolved_address
from infra.machine import visible_gpus
from pipelines.config import Config, ConfigError, ConfigProblems, load_config
from pipelines.inspect.submissions import Submission
from pipelines.roles import WITH_ENGINE, WITH_STORE, Role
from pipelines.run.inputs import accept_inputs, changed_inputs, changed_text, record_inputs
from pipelines.run.learnability import unlearnable
from pipelines.run.paths import files_read
from pipelines.run.preflight import (
    absent_gpus,
    gateway_host_problems,
    missing_file,
    model_problems,
    port_problems,
    store_problems,
    unknown_environments,
)
from pipelines.run.run_names import UNNAMED
from pipelines.run.topics import existing_topics
from pipelines.shards import partitions_of
from schemas.topics import INBOX

_READS_MODEL = ("prompts", "rollout", "trainer", "evaluation")
_SECTIONS = {"evaluation": ("prompts",), **dict.fromkeys(WITH_STORE, ("relay",))}
"""Sections whose files a pipeline reads, beside that of its own name."""


def role_problems(config: Config, role: Role) -> Iterator[str]:
    """All reasons why `role` cannot run with `config` on this machine."""
    if not config.run.name:
        yield UNNAMED
    if role.pipeline in ("prompts", "rollout"):
        yield from unknown_environments(config)
    if role.pipeline in WITH_ENGINE and not config.emulated:
        yield from model_problems(config)
    elif role.pipeline in _READS_MODEL and not config.emulated:
        try:
            config.model_folder()
        except ConfigError as error:
            yield str(error)
    if role.pipeline == "agents":
        yield from gateway_host_problems(config)
    if role == Role("trainer") and config.trainer.ranks > 1:
        yield from _rank_0_problem(config.trainer.rank_0_host)
    if role.pipeline in ("experience", "trainer"):
        yield from unlearnable(config)
    sections = (role.pipeline, *_SECTIONS.get(role.pipeline, ()))
    files = ((key, path) for key, path in files_read(config) if key.partition(".")[0] in sections)
    yield from (missing_file(key, path) for key, path in files if not os.path.exists(path))
    if role.pipeline == "rollout":
        inboxes, hosted = len(partitions_of(config, INBOX)), config.rollout.hosted(role.index)
        if hosted.stop > inboxes:
            yield (
                f"rollout process {role.index} would host replica {hosted[-1]} (rollout.replicas), but the inbox topic "
                f"has {inboxes} partitions: placement.max_replicas is fixed when a run starts"
            )


def _rank_0_problem(host: str) -> Iterator[str]:
    """That rank 0 would listen at `host` where no other machine reaches it: /etc/hosts may give a machine's own name a
    loopback address."""
    if is_loopback(host):  # by intention: all ranks are here
        return
    with suppress(OSError):  # the name may be known later
        address = resolved_address(host)
        if is_loopback(address):
            yield (
                f"trainer.rank_0_host: {host} is {address} on this machine, which ranks on others do not reach: set "
                "the address by which they do, or correct /etc/hosts; for ranks on this machine alone set 127.0.0.1"
            )


def submission_problems(config: Config, submitted: Submission) -> Iterator[str]:
    """As `role_problems`, of all roles that `submitted` runs."""
    problems = (role_problems(config, role) for role in submitted.roles(config))
    yield from dict.fromkeys(problem for of_role in problems for problem in of_role)


def place_problems(config: Config, submitted: Submission) -> Iterator[str]:
    """Why the roles that `submitted` runs could not start now: ports, GPUs, space for weights on this machine, Kafka.

    Not for a resumed role, which waits until Kafka has started.
    """
    roles = submitted.roles(config)
    if any(role.pipeline in WITH_STORE for role in roles):
        yield from store_problems(config)
    if roles[0].pipeline in WITH_ENGINE:
        yield from absent_gpus(config, roles[0], visible_gpus())
    # The processes of a gateway share its port, and one that has lost its respawner is replaced.
    if submitted.index == 0 and submitted.working_process() is None:
        yield from port_problems(config, [role.pipeline for role in roles])
    yield from existing_topics(replace(config, kafka=config.kafka.for_role(roles[0].pipeline)))[1]


def trial_problems(
    config: Config, submitted: Submission, known: Sequence[str], replaced: Collection[str] = ()
) -> list[str]:
    """`known`, and the problems that a trial of the prompts and users' code finds which the roles of `submitted` use.

    `replaced` as for `all_problems`. Not for a start after the first, nor in the foreground: the errors of a running
    role are counted.
    """
    tried = {role.pipeline for role in submitted.roles(config) if _uses_own_code(config, role.pipeline)}
    if not tried or not config.run.check_timeout_s:
        return list(known)
    from pipelines.run.trial import all_problems  # imports torch

    return all_problems(config, known, roles=tried, replaced=replaced).problems


def _uses_own_code(config: Config, pipeline: str) -> bool:
    """Whether `pipeline` reads prompts, or runs code of the user; the imports of a trial take seconds."""
    buffer = config.experience
    names = {
        "score": [spec.name for rubric in config.score.tasks or (config.score,) for spec in rubric.rewards],
        "rollout": [spec.name for spec in config.rollout.environments],
        "trainer": [config.trainer.learner.name],
        "experience": [each.name for each in (buffer.sampler, *buffer.writers, *buffer.evictions)],
        "autoscaler": [] if config.autoscaling is None else [config.autoscaling.policy],
        "agents": [] if config.agents is None else [config.agents.function],
    }
    return pipeline == "prompts" or any(":" in name for name in names.get(pipeline, ()))


def check_submissions(
    folder: Path, submitted: Sequence[Submission], changes: Sequence[str] = (), *, accept_changes: bool
) -> None:
    """Raise ConfigProblems if one of `submitted`, of the run in `folder`, cannot run with its configuration.

    `changes` ("section.key=value") are made to each. Each problem names the configurations. Files that have changed
    since the submission are used with `accept_changes`.
    """
    found: dict[str, list[str]] = {}
    checked: list[tuple[Submission, Config, list[str]]] = []
    for each in submitted:
        try:
            config = load_config(each.config, changes)
            problems = list(submission_problems(config, each))
            checked.append((each, config, changed_inputs(config, each.inputs, sections_of(config, each))))
        except ConfigError as error:
            problems = [str(error), *getattr(error, "detail_lines", ())]
        for problem in problems:
            found.setdefault(problem, []).append(str(each.config))
    texts = [f"{problem} (in {', '.join(files)})" for problem, files in found.items()]
    changed = sorted({line for _, _, lines in checked for line in lines})
    if changed and not accept_changes:
        texts.append(changed_text(folder, changed, changes))
    if texts:
        raise ConfigProblems(texts)
    for each, config, changes in checked:
        if not each.inputs.exists():  # of an earlier release
            record_inputs(config, each.inputs, sections_of(config, each))
        elif changes:
            accept_inputs(config, each.inputs, changes, sections_of(config, each))


def sections_of(config: Config, submitted: Submission) -> frozenset[str]:
    """The sections whose files the roles of `submitted` read."""
    roles = [role.pipeline for role in submitted.roles(config)]
    read = {section for role in roles for section in (role, *_SECTIONS.get(role, ()))}
    return frozenset({*read, *(["model"] if any(role in _READS_MODEL for role in roles) else [])})
