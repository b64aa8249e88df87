"""The fixes of liveness, faults and staleness, each with the change that removes it and its test."""

from __future__ import annotations

from log_fixes import Fix

LIVENESS = (
    Fix(
        "liveness is reported during a step",
        "infra/runners/liveness.py",
        (
            (
                "if self._file is not None:\n                try:",
                "if self._file is not None and all(shard.phase is None for shard in self._shards.values()):\n"
                "                try:",
            ),
        ),
        "tests/infra/runners/test_liveness.py::test_liveness_file_is_rewritten_during_a_long_step",
    ),
    Fix(
        "the budget of a step is that of the configuration",
        "pipelines/shards.py",
        (("        budget=config.progress.budget(pipeline),\n", ""),),
        "tests/pipelines/test_shards.py",
    ),
    Fix(
        "the status shows steps and their budgets",
        "infra/runners/liveness.py",
        (("if shard.phase is not None\n", "if False\n"),),
        "tests/pipelines/present/view/test_run_folders.py::test_runs_status_prints_liveness_and_steps",
    ),
    Fix(
        "groups are in the order of the log",
        "operators/experience/groups.py",
        (
            (
                "self.completed = (version, last.block.offset, last.block.partition, last.row)",
                'self.completed = (last.block.records.column("scored_at")[last.row].as_py(), 0, 0, 0)',
            ),
        ),
        "tests/operators/experience/test_buffer_order.py",
    ),
    Fix(
        "the age of a group is by the buffer's own clock",
        "operators/experience/groups.py",
        (
            (
                "self.open[number] = Group(number, members, now)",
                "self.open[number] = Group(number, members, members[0].block.records"
                '.column("scored_at")[members[0].row].as_py() / 1000)',
            ),
        ),
        "tests/operators/experience/test_buffer_order.py",
    ),
    Fix(
        "a model is freed before the next is loaded",
        "operators/io/fold_records.py",
        (("            _release(element.group)\n", ""),),
        "tests/operators/trainer/test_trainer_memory.py",
    ),
    Fix(
        "an engine is freed before the next is made",
        "operators/io/fold_records.py",
        (("            _release(element.group)\n", ""),),
        "tests/operators/rollout/test_rollout_memory.py",
    ),
    Fix(
        "an untrainable trajectory is settled",
        "operators/experience/make_batches.py",
        (('            self._settle(list(runs_of([member])), "failed", bad.reason)\n', ""),),
        "tests/operators/experience/test_trainable.py::test_untrainable_member_is_settled_and_its_group_completes",
    ),
    Fix(
        "an untrainable batch is passed over",
        "operators/trainer/train_batches.py",
        (
            (
                '        except ValueError as error:\n            log.error("batch',
                '        except ZeroDivisionError as error:\n            log.error("batch',
            ),
        ),
        "tests/operators/trainer/test_rejected_batches.py::test_untrainable_batch_is_a_dead_letter",
    ),
    Fix(
        "an untrainable batch makes a version",
        "operators/trainer/train_batches.py",
        (
            (
                "self._versions.add_batch(batch.number, trained=",
                "batch.parts or self._versions.add_batch(batch.number, trained=",
            ),
        ),
        "tests/operators/trainer/test_rejected_batches.py::test_untrainable_batch_is_a_dead_letter",
    ),
    Fix(
        "relays publish heartbeats outside of transactions",
        "schemas/topics.py",
        (('riving",\n    _PLAIN,\n    transactional=False,', 'riving",\n    _PLAIN,'),),
        "tests/operators/relay/test_relay_heartbeats.py::test_sink_rejects_topics_of_plain_producers",
    ),
    Fix(
        "killed roles leave their files in a folder of the run",
        "pipelines/run/zygote.py",
        (('            os.environ["TMPDIR"] = tempfile.tempdir = temporary_folder\n', "            pass\n"),),
        "tests/end_to_end/test_compact_run.py::test_compact_run_survives_kills_of_each_process",
    ),
    Fix(
        "the folder of a run's temporary files is removed",
        "pipelines/run/zygote.py",
        (("            shutil.rmtree(self._temporary_folder, ignore_errors=True)\n", "            pass\n"),),
        "tests/end_to_end/test_interrupts.py::test_killed_run_cleans_up_and_resumes",
    ),
)
FAULTS = (
    Fix(
        "a broker killed while it starts is started again",
        "pipelines/run/run_kafka.py",
        (("            except BrokerDied as error:\n", "            except ZeroDivisionError as error:\n"),),
        "tests/pipelines/run/test_run_kafka.py",
    ),
    Fix(
        "numbers of control records are bounded",
        "operators/io/validation.py",
        (("elif not low <= each <= high:", "elif False:"),),
        "tests/operators/io/test_validation.py",
    ),
    Fix(
        "invalid records do not reach a step",
        "operators/io/fold_records.py",
        (("        reason = invalid_reason(record)\n", "        reason = None\n"),),
        "tests/operators/io/test_validation.py",
    ),
    Fix(
        "a level request that the buffer has not open is refused",
        "operators/prompts/draw_prompts.py",
        ((" or not is_open(request, buffer)", ""),),
        "tests/operators/prompts/test_draw_prompts.py::test_requests_of_another_program_change_no_level",
    ),
    Fix(
        "a level reply that prompts has not committed is refused",
        "operators/experience/curriculum.py",
        (("        if not has_begun(reply, prompts):\n", "        if False:\n"),),
        "tests/operators/experience/test_curriculum.py::test_curriculum_rejects_replies_of_another_program",
    ),
    Fix(
        "a manifest follows from those before it",
        "operators/io/fold_records.py",
        (("reason = manifests.invalid_reason(record)", "reason = None"),),
        "tests/operators/io/test_validation.py::test_reject_invalid_compares_manifests_of_several_polls",
    ),
    Fix(
        "a relay chain that placement did not write does not win",
        "operators/placement/relay_chain.py",
        (("if self.number is not None and chain.number > self.number:", "if False:"),),
        "tests/operators/placement/test_relay_chain.py::test_foreign_chain_is_rejected_and_replaced",
    ),
    Fix(
        "a replay passes over what is no micro-batch",
        "pipelines/inspect/replayed_training.py",
        (("if record.error is None and all(isinstance(row, MicroBatch) for row in record.rows):", "if True:"),),
        "tests/pipelines/cli/test_train_command.py::test_train_replay_reproduces_weights",
    ),
    Fix(
        "a replay accepts the batches that the trainer accepts",
        "operators/trainer/assembly.py",
        (("elif part.batch < self._next:", "elif False:"),),
        "tests/pipelines/cli/test_train_command.py::test_train_replay_reproduces_weights",
    ),
    Fix(
        "a full disk is named with its free bytes",
        "infra/files.py",
        (("error.errno in (errno.ENOSPC, errno.EDQUOT)", "False"),),
        "tests/pipelines/run/test_storage_faults.py::test_end_failed_reports_a_full_disk_in_state_json",
    ),
    Fix(
        "a broker on a full disk is not started again",
        "pipelines/run/run_kafka.py",
        (("if is_full(self._folder):", "if False:"),),
        "tests/pipelines/run/test_storage_faults.py::test_run_kafka_does_not_restart_a_broker_on_a_full_disk",
    ),
    Fix(
        "deleted topics end a run",
        "pipelines/run/run_kafka.py",
        (("            self._check_topics()\n", "            pass\n"),),
        "tests/pipelines/run/test_storage_faults.py::test_run_kafka_fails_when_topics_are_deleted",
    ),
    Fix(
        "a deleted run folder ends a run",
        "pipelines/run/supervisor.py",
        (("        self._held.check()\n", ""),),
        "tests/pipelines/run/test_storage_faults.py::test_supervisor_fails_when_the_run_folder_is_deleted",
    ),
    Fix(
        "a run folder that was deleted and made again ends a run",
        "pipelines/run/held_folder.py",
        (("if os.path.samestat(self._path.stat(), os.fstat(self._handle)):", "if self._path.is_dir():"),),
        "tests/pipelines/run/test_storage_faults.py::test_supervisor_fails_when_the_run_folder_is_deleted",
    ),
    Fix(
        "roles do not create a deleted run folder again",
        "infra/runners/liveness.py",
        (("                        made = True\n", ""),),
        "tests/infra/runners/test_liveness.py::test_liveness_does_not_restore_a_deleted_folder",
    ),
    Fix(
        "a respawner ends with its run's folder",
        "pipelines/run/submission/respawner.py",
        (("        except FileNotFoundError:\n            return True\n", ""),),
        "tests/pipelines/run/submission/test_respawner.py::test_respawner_stops_the_role_of_a_deleted_run",
    ),
    Fix(
        "a damaged state.json affects only its run",
        "pipelines/inspect/run_folders.py",
        (("except (OSError, ValueError, OldRelease) as error:", "except ZeroDivisionError as error:"),),
        "tests/pipelines/present/view/test_run_folders.py::test_damaged_state_json_affects_only_its_run",
    ),
    Fix(
        "a reset during the start is retried",
        "operators/io/source.py",
        (("FIRST_SESSION_TIMEOUT_S = 20.0", "FIRST_SESSION_TIMEOUT_S = -1.0"),),
        "tests/faults/test_resets_at_a_start.py",
    ),
    Fix(
        "the end of hanging transactions goes on after a move",
        "infra/kafka/hanging_transactions.py",
        (("            except _MOVED:\n", "            except ZeroDivisionError:\n"),),
        "tests/infra/kafka/test_hanging_transactions.py::test_end_hanging_transactions_retries_after_a_move",
    ),
)
STALENESS = (
    Fix(
        "over_age = drop drops",
        "operators/experience/config.py",
        (('(Staleness(self.max_staleness), *own) if self.over_age == "drop" else own', "own"),),
        "tests/operators/test_over_age.py::test_drop_never_trains_over_age_and_reports_drops",
    ),
    Fix(
        "over_age = drop takes the newest version from a selection",
        "operators/experience/make_batches.py",
        (("                self._newest = max(filter(None, (self._newest, newest)))\n", "                pass\n"),),
        "tests/operators/test_over_age.py::test_drop_takes_the_newest_version_from_a_selection",
    ),
    Fix(
        "over_age = wait keeps the order of prompts",
        "operators/experience/make_batches.py",
        (('PromptOrder(settlements) if step.config.over_age == "wait" else None', "None"),),
        "tests/operators/test_over_age.py::test_wait_takes_groups_in_prompt_order",
    ),
    Fix(
        "over_age = correct counts",
        "operators/experience/make_batches.py",
        (("float((staleness > self._config.max_staleness).sum())", "0.0"),),
        "tests/operators/test_over_age.py::test_correct_trains_everything_and_counts_over_age",
    ),
    Fix(
        "settings that break the bound of wait are errors",
        "operators/experience/config.py",
        (('        if self.over_age == "wait":\n', "        if False:\n"),),
        "tests/operators/test_over_age.py",
    ),
)
ROLE_FIXES = (*LIVENESS, *FAULTS, *STALENESS)
