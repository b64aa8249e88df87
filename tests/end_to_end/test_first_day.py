"""A new user's first runs, and every command on them: what they print, that it is right, and that it is enough."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import struct
import termios
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from html import unescape
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from first_day import NOISE, QUESTIONS, Answer, Shell, printed_commands, progress_lines, write_folder
from laminar_runs import CommandServer, kill_processes_in
from pyarrow import flight

from pipelines.present.report.html import LABELS

GETTING_STARTED = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text("utf-8")
READ_ONLY = (
    "runs list",
    "runs status",
    "runs audit",
    "runs logs",
    "runs trim",
    "topics list",
    "topics describe trajectories",
    "topics tail trajectories",
    "topics get trajectories 0:0",
    "topics find experiences",
    "topics stats experiences",
    "topics offsets experiences",
    "topics lag",
    "topics dlq list",
    "topics dlq replay",
    "topics replay experiences -o 0",
    "topics reset score trajectories --to beginning",
    "topics transactions list",
    "samples",
    "trajectory p0.0",
    "lineage latest",
    "watch",
    "report",
    "trace",
    "weights list",
    "weights show",
    "relays",
    "replicas",
    "plans",
    "autoscale",
)
FAILS_HERE = {"topics get trajectories 0:0", "topics dlq replay"}
"""They may exit with 1: a transaction marker at the offset; a row of a file, which no topic has."""
UNROUNDED = re.compile(r"\d\.\d{8,}")


@pytest.fixture(scope="module")
def shell(
    command_server: CommandServer, model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shell]:
    here = tmp_path_factory.mktemp("user") / "my work"
    write_folder(here, model_folder)
    yield Shell(command_server, here, tmp_path_factory.mktemp("outputs"))
    kill_processes_in([here, here / "elsewhere"])


@pytest.fixture(scope="module")
def ended(shell: Shell) -> Answer:
    """What the run `first` has printed."""
    answer = shell("run", "train.toml", "--name", "first")
    assert answer.code == 0, answer.text
    return answer


@pytest.fixture(scope="module")
def other(ended: Answer, shell: Shell) -> Answer:
    """What another run has printed: in this directory, with the user's environment and the name of its file."""
    changes = (
        "run.folder=.",
        'prompts.environment="my_environment.py:Echo"',
        'score.rewards=[{name="environment"}]',
        "prompts.chat_template=false",
        "prompts.heldout=0",
        "prompts.max_new_tokens=32",
        "trainer.optimizer_steps=2",
        "trainer.learner.mini_batches=2",
        "trainer.learner.algorithm.clip_low=1.0",
        "trainer.learner.algorithm.clip_high=1000.0",
    )
    answer = shell("run", "train.toml", *(word for change in changes for word in ("--set", change)))
    assert answer.code == 0, answer.text
    assert re.search(r"the clip never acted in \d optimizer steps", answer.text)
    return answer


@pytest.fixture(scope="module")
def second(other: Answer) -> str:
    """The path of that run."""
    return "./" + re.findall(r"^Run (\S+) reached its goal", other.text, re.M)[0]


def summary_of(shell: Shell, run: str) -> dict[str, Any]:
    return dict(json.loads((shell.here / "runs" / run / "summary.json").read_text()))


def test_every_line_before_the_first_step_names_its_wait(ended: Answer, shell: Shell) -> None:
    waiting = [line for line in progress_lines(ended.text) if " steps" not in line]
    assert len(waiting) >= 3  # broker, checks, starting
    assert [line for line in waiting if "waits for " not in line] == []
    later = [line for line in progress_lines(ended.text) if re.match(r"\[\d+:\d\d\] (?!training)", line)]
    assert {re.split(r"\] |  ", line)[1] for line in later} >= {"draining", "audit"}
    assert [line for line in later if "waits for " not in line] == []
    assert any(re.search("waits for the (start of the checks|check) of ", line) for line in waiting)
    state = json.loads((shell.here / "runs" / "first" / "state.json").read_text())
    assert state["started_at"] == state["pid_created"], "its clock counts its imports"


def test_getting_started_quotes_what_a_run_prints(ended: Answer) -> None:
    quoted = re.findall(r"Run \w+ reached its goal:.*?The audit passed: .*?\n", GETTING_STARTED, re.S)
    labels = {each for text in quoted for each in re.findall(r"^  ((?!component)[a-z][a-z, -]+?)  +\d", text, re.M)}
    assert len(labels) >= 6
    assert [each for each in labels if f"  {each} " not in ended.text] == []
    assert all("The audit passed: no trajectory lost or trained twice." in text for text in quoted)


def test_refused_rows_are_counted_from_the_start_to_the_summary(ended: Answer, shell: Shell) -> None:
    refused = "2.5 % of 40 rows (no answer 1) are refused (no answer: row 40: "
    assert f"warning: prompts, task 'rows': {refused}" in ended.text
    assert any("refused 1 row (no answer 1)" in line for line in progress_lines(ended.text))
    assert "Refused rows of the prompts: no answer 1; `" in ended.text
    assert summary_of(shell, "first")["refused_rows"] == {"no answer": 1}
    (letter,) = shell("topics", "dlq", "list", "--run", "first", "--json").json
    assert "no value in column" in letter["reason"]


def test_printed_commands_work_in_the_directory_of_the_command(
    ended: Answer, other: Answer, second: str, shell: Shell
) -> None:
    gone = shell("weights", "verify", "--run", second)
    assert (gone.code, "there is no weight store" in gone.text) == (1, True)
    shown = printed_commands(ended.text + other.text + gone.text)
    assert {"run", "samples", "runs", "weights", "topics"} <= {words[0] for words in shown}
    assert ["weights", "list", "--run", second] in printed_commands(gone.text)
    elsewhere = shell.here / "elsewhere"
    elsewhere.mkdir()
    page = elsewhere / "page.html"
    shell("report", str(shell.here / "runs" / "first"), "--out", str(page), here=elsewhere)
    written = printed_commands(re.sub(r" +# .*", "", unescape(page.read_text())))
    assert {"samples", "runs", "weights"} <= {words[0] for words in written}
    for here, commands in ((shell.here, shown), (elsewhere, written)):
        for words in commands:
            checked = ("--check",) if words[0] == "run" else ()
            answer = shell(*words, *checked, here=here)
            assert answer.code == 0, f"{words}: {answer.text}"


def test_samples_are_selected_and_compared(ended: Answer, shell: Shell) -> None:
    best, worst = (shell("samples", "--run", "first", f"--{which}", "--json").json for which in ("best", "worst"))
    assert best[0]["reward"] > worst[0]["reward"]
    (group,) = shell("samples", "--run", "first", "-n", "1", "--json").json
    answer = max(re.findall(r"\w+", group["samples"][0]["text"]), key=len)
    text = shell("samples", "--run", "first", "-n", "1").text
    order = [text.index(part) for part in ("  question   ", "  reference  ", "  reward ")]
    assert order == sorted(order)
    assert answer in text[order[-1] :]
    assert "What is " in text
    assert "+ 1?" in text
    for words in (("--diff",), ("--version", "1.0", "latest"), ("--version", "1.0,latest")):
        compared = shell("samples", "--run", "first", *words, "--json").json
        assert compared["versions"] == ["1.0", "1.4"]
        assert {each["question"] for each in compared["questions"]} <= {ask(row["question"]) for row in QUESTIONS}


def ask(question: str) -> str:
    return f"<user>{question}<assistant>"


def test_samples_on_a_terminal_are_coloured_and_side_by_side(ended: Answer, shell: Shell) -> None:
    main, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    os.set_blocking(main, False)
    read, has_ended = b"", False
    command = shell.start("samples", "--run", "first", "-n", "1", terminal=Path(os.ttyname(side)))
    while not has_ended:
        has_ended = command.exit_code() is not None  # read first: what it prints last is in `read`, too
        with suppress(BlockingIOError):
            while True:
                read += os.read(main, 65536)
    assert command.exit_code() == 0, read
    os.close(main)
    os.close(side)
    text = read.decode(errors="replace")
    lines = re.sub(r"\x1b\[[\d;]*m", "", text).splitlines()
    (prompt,) = re.findall(r"^(p\d+)  rows", "\n".join(lines), re.M)
    assert any(f"{prompt}.0" in line and f"{prompt}.1" in line for line in lines)
    assert len(set(re.findall(r"\x1b\[[\d;]*38;5;(\d+)m", text))) > 1
    assert "logprob" in text


def test_tail_and_find_show_the_response_first_and_little_else(ended: Answer, shell: Shell) -> None:
    (line,) = shell("topics", "tail", "trajectories", "--run", "first", "-n", "1").text.splitlines()
    assert re.match(r'\d+:\d+ \S+ \S+ Trajectory/\d+ \S+ \[[^]]*\] "', line), line
    (line,) = shell("topics", "find", "trajectories", "--run", "first", "-n", "1").text.splitlines()
    assert "completion_text=" in line
    assert "token_ids" not in line
    assert len(line) <= 300
    assert "token_ids" in shell("topics", "find", "trajectories", "--columns", "all", "-n", "1", "--json").text


@pytest.mark.parametrize("words", READ_ONLY)
def test_reading_a_stopped_run_starts_no_broker_and_is_quiet(words: str, ended: Answer, shell: Shell) -> None:
    before = {path.name for path in shell.here.iterdir()}
    place = () if words in ("runs list",) else ("--run", "first")
    answer = shell(*words.split(), *place)
    assert answer.code == 0 or words in FAILS_HERE, answer.text
    assert answer.text.strip()
    assert "starting Apache Kafka" not in answer.text
    assert NOISE.search(answer.text) is None
    if not words.startswith("topics get"):  # whole records as JSON
        assert UNROUNDED.search(answer.text) is None
    assert {path.name for path in shell.here.iterdir()} == before


def test_run_is_quiet_and_writes_no_file_outside_its_folder(ended: Answer, shell: Shell) -> None:
    assert NOISE.search(ended.text) is None
    assert UNROUNDED.search(ended.text) is None
    mine = {"my_reward.py", "my_letters.py", "my_environment.py"}
    expected = {"model", "rows.jsonl", "train.toml", "runs", "elsewhere", *mine}
    other_run = {"latest", *(path.name for path in shell.here.glob("train-*"))}  # with run.folder=.
    assert {path.name for path in shell.here.iterdir()} <= expected | other_run | {"__pycache__"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("topics", "find", "experiences", "-w", "reward > 99"), "no matching rows"),
        (("topics", "dlq", "list", "-w", "reason = 'x'"), "no dead letters"),
        (("topics", "transactions", "list"), "no open transactions"),
        (("plans",), "no plans"),
        (("samples", "--task", "nothing"), "no scored training samples of task 'nothing'"),
        (("runs", "list", "--folder", "nowhere"), "there are no runs under nowhere/"),
    ],
)
def test_command_without_results_reports_it(words: tuple[str, ...], said: str, ended: Answer, shell: Shell) -> None:
    assert said in shell(*words).text


@pytest.mark.parametrize("words", ["metrics serve", "export serve"])
def test_servers_of_a_stopped_run_start_no_broker(words: str, ended: Answer, shell: Shell) -> None:
    command = shell.start(*words.split(), "--port", "0", "--run", "first")
    try:
        address = command.until(lambda: re.search(r"(http|grpc)\S+:\d+", command.output()), 60, "its address")[0]
        if words == "metrics serve":
            with urllib.request.urlopen(f"{address}/metrics", timeout=30) as response:
                assert b'laminar_optimizer_step{run="first"} 4.0' in response.read()
        else:
            with flight.connect(address) as client:
                topics = [json.loads(each.descriptor.command)["topic"] for each in client.list_flights()]
            assert "experiences" in topics
        assert "starting Apache Kafka" not in command.output()
        command.signal(signal.SIGINT)
        command.wait(30)
    finally:
        command.clean_up()


@pytest.mark.parametrize("words", ["metrics serve", "export serve", "broker start"])
def test_servers_name_a_port_in_use_and_print_no_noise(words: str, ended: Answer, shell: Shell, tmp_path: Path) -> None:
    place = ("--folder", str(tmp_path / "broker")) if words == "broker start" else ("--run", "first")
    with socket.create_server(("127.0.0.1", 0)) as used:
        answer = shell(*words.split(), *place, "--port", str(used.getsockname()[1]))
    assert (answer.code, NOISE.search(answer.text)) == (1, None), answer.text
    assert re.search(r"\bin use|is used", answer.text), answer.text


def test_lineage_defines_staleness_and_agrees_with_the_histogram(ended: Answer, shell: Shell) -> None:
    assert "behind the newest when the batch was decided (staleness)" in shell("lineage", "1.1", "--run", "first").text
    found: dict[str, int] = {}
    for step in shell("lineage", "latest", "--depth", "0", "--no-texts", "--run", "first", "--json").json:
        for age, number in step["staleness"].items():
            found[age] = found.get(age, 0) + number
    assert found == summary_of(shell, "first")["staleness_histogram"]
    assert sum(found.values()) == 4 * 16


def test_accuracy_is_the_share_of_full_rewards_beside_the_mean(ended: Answer, shell: Shell) -> None:
    where = ("-w", "purpose = 'evaluation' and policy_version = 4", "--columns", "reward,sampling_temperature")
    rows = shell("topics", "find", "experiences", *where, "--run", "first", "--json").json
    greedy = [row["reward"] for row in rows if row["sampling_temperature"] == 0]
    sampled = [row["reward"] for row in rows if row["sampling_temperature"] > 0]
    assert len(greedy) == len(sampled) == 8
    summary = summary_of(shell, "first")
    assert summary["heldout_sampled_after"] == sum(reward >= 1 for reward in sampled) / 8
    assert summary["heldout_reward_after"] == pytest.approx(sum(greedy) / 8)  # partial credit is no accuracy
    assert summary["heldout_after"] == sum(reward >= 1 for reward in greedy) / 8
    page = (shell.here / "runs" / "first" / "report.html").read_text()
    compared = shell("runs", "compare", "first", "first").text
    for key, label in LABELS.items():
        if key in ("heldout_after", "heldout_sampled_after", "heldout_reward_after"):
            assert f"<td>{label}</td><td>{summary[key]:.3f}</td>" in page
            shown = re.search(rf"^{label} +{summary[key]:.3f} ", compared, re.M)
            assert shown or not summary[key], label  # rows of zeros are left out
    status = shell("runs", "status", "--run", "first", "--json").json
    assert (status["heldout"], status["heldout_sampled"]) == (
        summary["heldout_after"],
        summary["heldout_sampled_after"],
    )
    for label in ("mean reward", "accuracy, greedy", "accuracy, sampled", "held-out reward"):
        assert re.search(rf"^  {label} +[\d.]+ → [\d.]+$", ended.text, re.M), label


def test_checkpoints_of_a_run_that_learned_are_its_weights(ended: Answer, shell: Shell, tmp_path: Path) -> None:
    model = shell.here / "runs" / "first" / "model"
    final = (model / "model.safetensors").read_bytes()
    model.rename(tmp_path / "moved")  # the newest version has another place: its checkpoint
    codes = [shell("weights", "pull", each, str(tmp_path / each)).code for each in ("1.2", "1.4")]
    (tmp_path / "moved").rename(model)
    first, last = ((tmp_path / each / "model.safetensors").read_bytes() for each in ("1.2", "1.4"))
    assert (codes, last == final, first == last) == ([0, 0], True, False)


def test_replay_reports_how_weights_and_rewards_differ(ended: Answer, shell: Shell) -> None:
    again = shell("train", "replay", "first")
    assert (again.code, "the weights equal the run's, bit by bit" in again.text) == (0, True)
    other = shell("train", "replay", "first", "--set", "trainer.learner.learning_rate=1e-5")
    assert (other.code, "starting Apache Kafka" in other.text) == (0, False)
    assert "4 steps in " in other.text
    assert re.search(r"the weights differ from the run's by [\d.]+ % of the norm", other.text)
    assert "rewards are the run's" in other.text


@pytest.fixture
def exports(tmp_path: Path) -> Path:
    """Where `laminar export` writes; TRL's and verl's classes read what is kept (`make exports-test`)."""
    return Path(os.environ.get("LAMINAR_EXPORTS", tmp_path)).absolute()


@pytest.mark.parametrize("view", ["trl", "sft", "preference", "verl", "conversations", "full"])
def test_views_have_a_purpose_and_no_held_out_rows(view: str, second: str, shell: Shell, exports: Path) -> None:
    """Of `sft` and `conversations` the run with an environment has rows: complete answers with full rewards, turns."""
    folder = exports / view
    run = second if view in ("sft", "conversations") else "first"
    answer = shell("export", "experiences", str(folder), "--view", view, "--run", run)
    assert answer.code == 0, answer.text
    assert "starting Apache Kafka" not in answer.text
    table = pq.read_table(folder / "data")
    rows = table.to_pylist()
    assert rows
    assert "purpose" in table.column_names
    assert {row["purpose"] for row in rows} <= ({"train", "evaluation"} if view == "full" else {"train"})
    verified = shell("export", "verify", str(folder), "--log", "--run", run)
    assert (verified.code, "starting Apache Kafka" in verified.text) == (0, False), verified.text
    assert NOISE.search(verified.text) is None


def test_verl_view_has_messages_plain_answers_and_a_test_file(ended: Answer, shell: Shell, exports: Path) -> None:
    questions = {}
    for split, purpose in (("train", "train"), ("test", "evaluation")):
        folder = exports / f"verl-{split}"
        words = ("--view", "verl", "--split", split, "--run", "first")
        assert shell("export", "experiences", str(folder), *words).code == 0
        rows = pq.read_table(folder / "data").to_pylist()
        assert {row["purpose"] for row in rows} == {purpose}
        assert {row["extra_info"]["split"] for row in rows} == {split}
        assert {row["reward_model"]["ground_truth"] for row in rows} <= {row["answer"] for row in QUESTIONS}
        assert all([message["role"] for message in row["prompt"]] == ["user"] for row in rows)
        questions[split] = {row["prompt"][0]["content"] for row in rows}
    assert questions["train"] | questions["test"] <= {row["question"] for row in QUESTIONS}
    assert len(questions["test"]) == 8
    assert not questions["train"] & questions["test"]


def test_run_has_the_name_of_its_file_and_a_short_environment(second: str, shell: Shell) -> None:
    assert re.fullmatch(r"\./train-\d{8}-\d{6}", second)
    found = shell("samples", "--run", second, "-n", "1", "--json").json
    assert any("Once more." in turn["text"] for turn in found[0]["samples"][0]["turns"])


def test_runs_are_compared_by_name(second: str, shell: Shell) -> None:
    compared = shell("runs", "compare", "first", second)
    assert (compared.code, "starting Apache Kafka" in compared.text) == (0, False)
    assert re.search(r"^share of trajectories with an error +0\S* +0", compared.text, re.M)
    assert "trainer.optimizer_steps: 4 -> 2" in compared.text
    assert UNROUNDED.search(compared.text) is None
    changed = shell("config", "--diff", "first", second)
    assert (changed.code, "starting Apache Kafka" in changed.text) == (1, False)
    assert "trainer.optimizer_steps: 4 -> 2" in changed.text
    assert "run.name" not in changed.text.partition("(of each run")[0]
    page = shell.here / "runs" / "comparison.html"
    assert shell("report", "first", second).code == 0
    assert "share of trajectories with an error" in page.read_text()
