"""The release of Laminar and Beam that a step was built with, compared with that of the worker that runs it."""

from __future__ import annotations

import platform
from importlib import metadata

PACKAGES = ("laminar-rl", "apache-beam")


class OtherRelease(RuntimeError):
    """A worker has another release than the process that has submitted its steps."""


def installed() -> dict[str, str]:
    """The versions of PACKAGES here."""
    return {name: metadata.version(name) for name in PACKAGES}


def check_releases(submitted: dict[str, str]) -> None:
    """Raise OtherRelease unless `submitted`, the versions at the submitter, are installed here."""
    here = installed()
    others = {name: version for name, version in submitted.items() if here[name] != version}
    if others:
        wrong = ", ".join(f"{name} {here[name]} instead of {version}" for name, version in others.items())
        raise OtherRelease(
            f"the worker on {platform.node()} has {wrong}, which the job was submitted with: stop the submission, "
            "install one release on all machines, start their worker pools again, and submit again "
            "(docs/operations.md, Upgrade)"
        )
