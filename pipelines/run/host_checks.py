"""Checks of this machine before a run: free disk for checkpoints, memory for weights, ports."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from infra.models.sizes import parameter_count
from pipelines.config import Config
from pipelines.shards import store_folder

STATE_BYTES = 12
"""Of a checkpoint, per parameter: weights and two moments in float32."""
WEIGHT_BYTES = 2
"""Of a published version, per parameter, at least."""
MIN_VERSIONS = 2
"""A store needs room for the version in use and the one that arrives."""
GIB = 1 << 30


def host_problems(config: Config, *, new: bool) -> Iterator[str]:
    """What this machine lacks for `config`; a run that is not `new` has written its checkpoints already."""
    folder = Path(config.model.path)
    if config.model.path and not config.emulated and folder.is_dir():
        parameters = parameter_count(folder)
        kept = config.trainer.checkpoints_kept + 1 if new else 1
        checkpoints = config.trainer.checkpoint_folder or str(config.run_folder)
        if "://" not in checkpoints:
            key = "trainer.checkpoint_folder" if config.trainer.checkpoint_folder else "run.folder"
            advice = "free some space, or lower trainer.checkpoints_kept"
            what = f"{kept} checkpoints of {parameters} parameters"
            yield from _room(key, Path(checkpoints), kept * parameters * STATE_BYTES, what, advice)
        what = f"{MIN_VERSIONS} weight versions of {parameters} parameters"
        store, advice = store_folder(config), "free some space (`laminar doctor --clean`), or set relay.store"
        yield from _room("relay.store", store, MIN_VERSIONS * parameters * WEIGHT_BYTES, what, advice)
    if config.relay.port and (reason := _port_problem(config.relay.listen, config.relay.port)):
        yield f"relay.port: {config.relay.listen}:{config.relay.port} cannot be used: {reason}"


def _room(key: str, folder: Path, needed: int, what: str, advice: str) -> Iterator[str]:
    place = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(place).free
    if free < needed:
        yield f"{key}: {place} has {free / GIB:.2f} GiB free, but {what} need {needed / GIB:.2f} GiB: {advice}"


def _port_problem(host: str, port: int) -> str | None:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return None
