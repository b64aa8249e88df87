"""The fixes of transactions and restarts, each with the change that removes it and the test that must fail then."""

from __future__ import annotations

from typing import NamedTuple


class Fix(NamedTuple):
    """`changes` of `file`, each (before, after), remove the fix `what`; `test` then fails. `before` occurs once."""

    what: str
    file: str
    changes: tuple[tuple[str, str], ...]
    test: str


_SESSION = "infra/kafka/session.py"
_OFFSETS = """        if grouped := self.group_offsets_due(last):
            producer.send_offsets_to_transaction(self._group.to_write(), config.group)
"""
TRANSACTIONS = (
    Fix(
        "all shards are fenced before the first is retired",
        "infra/kafka/resharding.py",
        (("            fence(clients, config.group)\n", "            pass\n"),),
        "tests/infra/kafka/test_commit_notes_of_other_shards.py::test_transaction_of_a_killed_shard_holds_no_other_up",
    ),
    Fix(
        "a broken connection in a transactional request ends the session",
        "infra/kafka/transactions.py",
        (('if isinstance(handler, _TRANSACTIONAL) and "on_complete" not in vars(handler):', "if False:"),),
        "tests/faults/test_late_requests.py::test_session_loses_nothing_by_a_late_request",
    ),
    Fix(
        "a broken connection in a transactional request of a role ends its session",
        "infra/kafka/transactions.py",
        (('if isinstance(handler, _TRANSACTIONAL) and "on_complete" not in vars(handler):', "if False:"),),
        "tests/faults/test_late_requests_of_roles.py",
    ),
    Fix(
        "a transaction ends after its last record",
        "infra/kafka/transactions.py",
        (("        self._parts.look_for_batches_when_locked()\n", ""),),
        "tests/infra/kafka/test_transactions.py::test_transaction_does_not_end_before_its_last_record",
    ),
    Fix(
        "outputs are written before offsets",
        _SESSION,
        ((_OFFSETS, ""), ("        for o in outputs:\n", f"{_OFFSETS}        for o in outputs:\n")),
        "tests/faults/test_late_requests.py::test_transaction_writes_outputs_before_offsets",
    ),
    Fix(
        "a shard compares its note with its commits",
        "operators/io/commits.py",
        (("        session.verify()\n", ""),),
        "tests/operators/io/test_shard_sink.py::test_sink_lets_the_session_verify_each_commit",
    ),
    Fix(
        "a shard compares its note with the outcome of its outputs",
        "infra/kafka/commit_check.py",
        (("aborted, undecided = read_outcomes(observer, self._unchecked.written)", "aborted, undecided = [], {}"),),
        "tests/infra/kafka/test_verified_sessions.py::test_verify_raises_when_an_output_was_aborted",
    ),
    Fix(
        "a shard compares all commits since the last check with the log",
        _SESSION,
        (("        self._check.wrote(final)\n", ""),),
        "tests/infra/kafka/test_verified_sessions.py::test_verify_finds_an_output_aborted_before_others",
    ),
    Fix(
        "a start compares all commits of the session before it with the log",
        "infra/kafka/commit_check.py",
        (("if note.start != self.start:", "if True:"),),
        "tests/infra/kafka/test_verified_sessions.py::test_start_finds_an_output_aborted_before_others",
    ),
    Fix(
        "a start compares its note with the outcome of its outputs",
        _SESSION,
        (("            check_outputs(observer, config.group, before.written)\n", ""),),
        "tests/infra/kafka/test_verified_sessions.py::test_start_raises_when_an_output_was_aborted",
    ),
    Fix(
        "a note without its marker is not a lost session",
        "infra/kafka/commit_check.py",
        (("if now - self._undecided[1] > config.transaction_timeout_s:", "if True:"),),
        "tests/infra/kafka/test_verified_sessions.py::test_verify_waits_for_the_marker_of_the_note",
    ),
    Fix(
        "a start compares its note with its outputs in the log",
        "infra/kafka/log_gaps.py",
        (("if ends[place] <= offset:", "if False:"),),
        "tests/infra/kafka/test_log_gaps.py::test_session_rejects_log_without_its_output",
    ),
    Fix(
        "a repeated batch is not trained",
        "operators/trainer/assembly.py",
        (("elif part.batch < self._next:", "elif False:"),),
        "tests/operators/trainer/test_rejected_batches.py::test_repeated_batch_is_a_dead_letter",
    ),
    Fix(
        "a later batch is not trained in the place of the next one",
        "operators/trainer/assembly.py",
        (("elif part.batch > self._next:", "elif False:"),),
        "tests/operators/trainer/test_rejected_batches.py::test_missing_batch_fails_with_its_number",
    ),
    Fix(
        "audits run during a run",
        "pipelines/run/supervisor.py",
        (("            self._audits.poll()\n", "            pass\n"),),
        "tests/end_to_end/test_interrupts.py::test_run_starts_audits_and_fails_after_a_long_outage",
    ),
    Fix(
        "the transaction time-out is that of the configuration",
        "infra/kafka/clients.py",
        (("transaction_timeout_ms=transaction_ms,", "transaction_timeout_ms=10_000,"),),
        "tests/faults/test_large_transactions.py::test_sink_commits_an_emission_larger_than_the_bound",
    ),
    Fix(
        "every role has the configured transaction time-out",
        "pipelines/shards.py",
        (("transaction_timeout_s=config.kafka.transaction_timeout_s,", ""),),
        "tests/pipelines/test_shards.py",
    ),
    Fix(
        "the transaction time-out is compared with the brokers' maximum",
        "infra/kafka/settings_check.py",
        (("if bound is not None and int(bound) < wanted_ms:", "if False:"),),
        "tests/pipelines/run/test_make_topics.py",
    ),
    Fix(
        "a transaction of several emissions is bounded in bytes",
        "operators/io/commits.py",
        (("if len(emissions) > 1 and sum(", "if False and sum("),),
        "tests/operators/io/test_shard_sink.py::test_sink_splits_large_transactions_between_emissions",
    ),
    Fix(
        "one emission above the bound is one transaction",
        "operators/io/commits.py",
        (("if len(emissions) > 1 and sum(", "if sum("),),
        "tests/operators/io/test_shard_sink.py::test_sink_splits_large_transactions_between_emissions",
    ),
    Fix(
        "a transaction that is too slow names its setting",
        "infra/kafka/transactions.py",
        (('"raise kafka.transaction_timeout_s"', '""'),),
        "tests/faults/test_large_transactions.py::test_own_time_out_of_a_transaction_names_the_setting",
    ),
    Fix(
        "a transaction that the brokers abort names its setting",
        "infra/kafka/session.py",
        ((", fenced by placement, or aborted after kafka.transaction_timeout_s: ", ", or fenced by placement: "),),
        "tests/faults/test_large_transactions.py::test_session_names_the_setting_after_an_abort_by_the_brokers",
    ),
    Fix(
        "no transaction writes to a topic of plain producers",
        "operators/io/coalesce.py",
        (("if not topic.transactional:", "if False:"),),
        "tests/operators/relay/test_relay_heartbeats.py::test_sink_rejects_topics_of_plain_producers",
    ),
    Fix(
        "a relay beats while no step runs",
        "operators/relay/relay.py",
        (("fold.heartbeats = HeartbeatThread(", "fold.heartbeats = None and HeartbeatThread("),),
        "tests/operators/relay/test_relay_heartbeats.py::test_relay_publishes_heartbeats_outside_of_transactions",
    ),
    Fix(
        "a reader that an open transaction blocks says so",
        "operators/io/source.py",
        (("if stalled := self._stalls.stalled(positions, ends):", "if stalled := ():"),),
        "tests/operators/io/test_shard_source.py::test_source_names_the_transaction_that_blocks_it",
    ),
    Fix(
        "a reader that does not move is noticed",
        "infra/kafka/open_transactions.py",
        (("now - since >= STALLED_S", "False"),),
        "tests/infra/kafka/test_stall_watch.py::test_stall_watch_reports_reader_without_progress",
    ),
    Fix(
        "the producer of a blocking transaction is named",
        "infra/kafka/open_transactions.py",
        (("found = [\n        (place, producer)", "found = [] and [\n        (place, producer)"),),
        "tests/infra/kafka/test_stall_watch.py::test_blocking_transaction_names_producer",
    ),
    Fix(
        "a hanging transaction is ended on request",
        "infra/kafka/open_transactions.py",
        (("        admin.abort_transaction(spec)\n", ""),),
        "tests/infra/kafka/test_hanging_transactions.py::test_hanging_transactions_end_with_their_outcome",
    ),
)
RESTARTS = (
    Fix(
        "a start needs no group offsets",
        "infra/kafka/input_positions.py",
        (('offset = noted.get(name_of(tp)) if source.start == "committed" else None', "offset = None"),),
        "tests/infra/kafka/test_session.py::test_session_resumes_without_group_offsets",
    ),
    Fix(
        "a start without its note refuses beside its output",
        "infra/kafka/log_gaps.py",
        (("traces = [f", "traces = [] and [f"),),
        "tests/infra/kafka/test_log_gaps.py::test_session_rejects_output_without_note",
    ),
    Fix(
        "score without its note refuses beside its own experiences",
        "pipelines/sharded_sources.py",
        (("ledger_keys=rf\"[{LETTERS['train']}{LETTERS['evaluation']}]\\d+\",", ""),),
        "tests/pipelines/simulate/test_restored_logs.py::test_role_refuses_its_own_output_without_a_note",
    ),
    Fix(
        "a rollout without its note refuses beside its heartbeats",
        "pipelines/rollout.py",
        (("        heartbeats=True,\n", ""),),
        "tests/pipelines/simulate/test_restored_logs.py::test_role_refuses_its_own_output_without_a_note",
    ),
    Fix(
        "the heartbeats of another process are not a rollout's own",
        "infra/kafka/log_gaps.py",
        (("if (each.run, each.process) == (run, process)]", "if each.run == run]"),),
        "tests/pipelines/simulate/test_restored_logs.py::test_rollout_joins_a_run_that_has_heartbeats",
    ),
    Fix(
        "a lost session leaves no thread",
        "infra/kafka/transactions.py",
        (("self._parts.sender.force_close()", "pass"),),
        "tests/faults/test_large_transactions.py::test_session_names_the_setting_after_a_transaction_timeout",
    ),
    Fix(
        "a start without its note refuses beside group offsets",
        "infra/kafka/log_gaps.py",
        (("for p, o in committed.items() if p in ends]", "for p, o in ()]"),),
        "tests/infra/kafka/test_log_gaps.py::test_session_rejects_group_offsets_without_note",
    ),
    Fix(
        "a start without its note refuses beside a trimmed ledger",
        "infra/kafka/log_gaps.py",
        (("for p in config.ledger if begins[TopicPartition(*p)] > 0]", "for p in ()]"),),
        "tests/infra/kafka/test_log_gaps.py::test_session_rejects_trimmed_ledger_without_note",
    ),
    Fix(
        "a start at a position before the log refuses",
        "infra/kafka/log_gaps.py",
        (("    if offset < begin:\n", "    if False:\n"),),
        "tests/infra/kafka/test_log_gaps.py",
    ),
    Fix(
        "a poll of a truncated log ends the role",
        "infra/kafka/clients.py",
        (('auto_offset_reset="none",', 'auto_offset_reset="earliest",'),),
        "tests/infra/kafka/test_log_gaps.py::test_session_poll_raises_when_log_is_truncated",
    ),
    Fix(
        "a start does not believe a broker that leads no longer",
        "infra/kafka/session.py",
        (("check_present(observer.end_offsets([restore]), written)", "pass"), ("check_present(ends, written)", "pass")),
        "tests/faults/test_isolated_broker.py::test_start_does_not_continue_from_an_isolated_broker",
    ),
    Fix(
        "a truncated log ends the process",
        "infra/kafka/session.py",
        (("return log_truncated(self.config.group, str(error))", "return self._give_up(error)"),),
        "tests/infra/kafka/test_log_gaps.py::test_session_poll_raises_when_log_is_truncated",
    ),
    Fix(
        "a deleted input is named while a role polls",
        _SESSION,
        (("check_topics(self._consumer, self._assigned)", "pass"),),
        "tests/infra/kafka/test_log_gaps.py::test_session_names_an_input_deleted_while_it_polls",
    ),
    Fix(
        "a source asks for deleted inputs",
        "operators/io/source.py",
        (("        session.check_inputs()\n", ""),),
        "tests/operators/io/test_shard_source.py::test_source_opens_a_new_session_if_an_input_was_deleted",
    ),
    Fix(
        "a socket whose connection fails is closed",
        "infra/kafka/client_patches.py",
        (
            (
                "timeout_at=timeout_at)\n    except BaseException:\n        sock.close()\n",
                "timeout_at=timeout_at)\n    except BaseException:\n",
            ),
        ),
        "tests/infra/kafka/test_failed_connections.py::test_client_closes_sockets_of_refused_connections",
    ),
    Fix(
        "a socket whose TLS handshake fails is closed",
        "infra/kafka/client_patches.py",
        (("    KafkaSSLTransport.handshake = _handshake\n", ""),),
        "tests/infra/kafka/test_failed_connections.py::test_client_closes_sockets_of_failed_tls_handshakes",
    ),
    Fix(
        "a client that is closed closes sockets with unsent data",
        "infra/kafka/client_patches.py",
        (("        for sock in watched:\n            sock.close()\n", ""),),
        "tests/infra/kafka/test_failed_connections.py::test_closed_client_closes_sockets_with_unsent_data",
    ),
    Fix(
        "clients do not create topics",
        "infra/kafka/properties.py",
        ((" | ({} if client == ADMIN else _NEVER_CREATE)", ""),),
        "tests/infra/kafka/test_client_properties.py::test_properties_apply_to_their_clients",
    ),
    Fix(
        "retention that would lose records is an error",
        "infra/kafka/settings_check.py",
        (('elif setting in ("cleanup.policy", "retention.ms", "retention.bytes"):', "elif False:"),),
        "tests/infra/kafka/test_settings_check.py",
    ),
    Fix(
        "settings that could not be read are a warning",
        "infra/kafka/settings_check.py",
        (('        *_unread("topic", topics),\n', ""),),
        "tests/infra/kafka/test_secure_broker.py::test_settings_that_a_user_may_read_are_checked",
    ),
    Fix(
        "metrics expire",
        "pipelines/run/topics.py",
        (('kept = "-1" if metrics_hours == math.inf else', 'kept = "-1" if True else'),),
        "tests/pipelines/run/test_make_topics.py::test_only_metrics_expire_after_the_configured_hours",
    ),
    Fix(
        "settings are checked before any record",
        "pipelines/run/topics.py",
        (("        raise UnsuitableKafka(fatal)\n", "        pass\n"),),
        "tests/pipelines/run/test_make_topics.py",
    ),
    Fix(
        "a restart reads a bounded part of the relay topic",
        "pipelines/relay.py",
        (("newest=newest_manifests(config)", 'start="earliest"'),),
        "tests/pipelines/test_restart_reads.py",
    ),
    Fix(
        "a trim writes its point before it deletes",
        "pipelines/trim/plan.py",
        (
            (
                "        value, headers = encode(plan.trim_point)\n",
                "        value, headers = encode(plan.trim_point)\n"
                "        cuts = {(run_prefix(plan.run) + p.short_name, p.partition): c.offset for p, c in "
                "plan.cuts.items()}\n"
                "        delete_records(admin, cuts)\n",
            ),
            ("        delete_records(admin, offsets)\n", ""),
        ),
        "tests/pipelines/inspect/audit/test_trim.py::test_second_of_two_trims_at_once_deletes_nothing",
    ),
    Fix(
        "an audit begins again if the log is trimmed meanwhile",
        "pipelines/inspect/audit/audit_run.py",
        (("        if trim_point == begun_at:\n", "        if True:\n"),),
        "tests/pipelines/inspect/audit/test_trim.py::test_audit_begins_again_if_log_is_trimmed_meanwhile",
    ),
    Fix(
        "a checkpoint that cannot be written is an error",
        "operators/trainer/persist.py",
        (
            (
                "            if number >= tries:\n",
                "            if number >= tries:\n                return None  # type: ignore[return-value]\n",
            ),
        ),
        "tests/operators/trainer/test_trainer_persists.py::test_failed_checkpoint_is_retried_then_ends_the_trainer",
    ),
    Fix(
        "a checkpoint that an earlier attempt has completed is one",
        "operators/trainer/checkpoint.py",
        (("        if not is_complete(folder):\n", "        if True:\n"),),
        "tests/operators/trainer/test_trainer_checkpoint.py::test_checkpoint_is_complete_if_its_sync_fails_once",
    ),
    Fix(
        "a failed search for leftovers of checkpoints is only logged",
        "operators/trainer/checkpoint.py",
        (
            (
                '    except OSError as error:\n        log.warning("cannot remove the parts',
                '    except ZeroDivisionError as error:\n        log.warning("cannot remove the parts',
            ),
        ),
        "tests/operators/trainer/test_trainer_checkpoint.py::test_failed_search_for_leftovers_is_only_logged",
    ),
    Fix(
        "a failed removal of a checkpoint is only logged",
        "operators/trainer/checkpoint.py",
        (
            (
                '            except OSError as error:\n                log.warning("cannot',
                '            except ZeroDivisionError as error:\n                log.warning("cannot',
            ),
        ),
        "tests/operators/trainer/test_trainer_checkpoint.py::test_failed_removal_of_a_checkpoint_is_only_logged",
    ),
)
LOG_FIXES = (*TRANSACTIONS, *RESTARTS)
