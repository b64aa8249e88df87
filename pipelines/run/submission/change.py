"""Changes settings of submitted roles: each that reads them is stopped, and submitted again with the new ones."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipelines.config import ConfigError, load_config, save_config
from pipelines.inspect.run_files import SUBMITTED
from pipelines.inspect.submissions import Submission
from pipelines.roles import ALL_SHARDS, SCALED
from pipelines.run.resumable import RESUMABLE, changed_keys, check_resumable, keep_model
from pipelines.run.submission.detached import roles_here, stop


class SettingsChange:
    """The change `changes` ("section.key=value") of the run whose roles are `submitted`.

    Raises ConfigError if a resumed run may not change so, or a role that reads it runs in the foreground.
    """

    def __init__(self, submitted: Sequence[Submission], changes: Sequence[str]) -> None:
        self.submitted, self._folder = submitted, submitted[0].folder
        self._before = {each.file: load_config(each.config) for each in submitted}
        self._after = {each.file: load_config(each.config, changes) for each in submitted}
        for file, after in self._after.items():
            check_resumable(self._before[file], after)
        self.keys = sorted({key for each in submitted for key in self._changed(each)})
        self.concerned = [
            each
            for each in submitted
            if each.state != "removed"
            and {role.pipeline for role in each.roles(self._after[each.file])} & _readers(self._changed(each))
        ]
        self._refuse_single_shards()
        self._refuse_absent_ranks()
        self._refuse_in_foreground()

    def _changed(self, submission: Submission) -> list[str]:
        return changed_keys(self._before[submission.file], self._after[submission.file])

    def _refuse_single_shards(self) -> None:
        for role in SCALED:
            alone = [each.role.name for each in self.concerned if each.pipeline == role and each.index != ALL_SHARDS]
            if f"{role}.shards" in self.keys and alone:
                raise ConfigError(
                    f"{role}.shards cannot change, as shards were submitted one by one ({', '.join(alone)}): end each "
                    f"with `laminar runs stop --role`, then submit {role} without --index"
                )

    def _refuse_absent_ranks(self) -> None:
        for each in self.submitted:
            ranks, name = self._after[each.file].trainer.ranks, each.role.name
            if each.pipeline == "trainer" and each.state != "removed" and each.index >= ranks:
                raise ConfigError(
                    f"{name} does not exist with trainer.ranks = {ranks}: end it with `laminar runs stop --role {name}`"
                )

    def _refuse_in_foreground(self) -> None:
        config, own = next(iter(self._after.values())), {each.worker for each in self.submitted}
        for role, pid in roles_here(config):
            if role.pipeline in _readers(self.keys) and pid not in own:
                raise ConfigError(
                    f"{role.name} of run {config.run.name} runs in the foreground, as process {pid}, and reads "
                    f"{', '.join(self.keys)}: end it (`kill {pid}`), change the settings, and start it with "
                    f"{self._folder / SUBMITTED / role.name}.toml"
                )

    def apply(self, timeout_s: float) -> list[str]:
        """Write the new configurations, and stop the roles that read what is changed.

        Returns those that have not ended after `timeout_s`; they end, and have the new settings when they are resumed.
        """
        self._save()
        deadline = time.monotonic() + timeout_s
        return [each.role.name for each in self.concerned if not stop(each, deadline)]

    def _save(self) -> None:
        trainer = next((each for each in self.submitted if each.pipeline == "trainer"), self.submitted[0])
        keep_model(self._folder, self._before[trainer.file], self._after[trainer.file])
        for each in self.submitted:
            save_config(self._after[each.file], each.config)


def _readers(keys: Sequence[str]) -> set[str]:
    return {reader for key in keys for reader in RESUMABLE[key]}
