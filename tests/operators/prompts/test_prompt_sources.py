"""Sources: determinism, restarts at any number, held-out questions, bad rows, errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from operators.prompts.config import PromptsConfig
from operators.prompts.question import BadRow, SourceError
from operators.prompts.sources import FINITE_TASK_SIZE, Permutation, heldout_questions, open_levels, open_source

CHAIN_SUM = {"min_terms": 3, "max_terms": 5, "min_digits": 1, "max_digits": 1}
GCD = {"min_value": 1, "max_value": 50}


def write_jsonl(path: Path, count: int) -> Path:
    path.write_text(
        "".join(json.dumps({"question": f"What is {i} + 1?", "answer": i + 1}) + "\n" for i in range(count))
    )
    return path


def texts(config: PromptsConfig, numbers: range) -> list[str]:
    source = open_source(config)
    try:
        return [source[number].text for number in numbers]
    finally:
        source.close()


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 100, 1025])
def test_permutation_contains_every_element_once(size: int) -> None:
    order = Permutation(size, seed=3, epoch=0)
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_permutation_depends_on_seed_and_epoch() -> None:
    first, again, other_seed, other_epoch = (
        [Permutation(1000, *key)[i] for i in range(1000)] for key in ((1, 0), (1, 0), (2, 0), (1, 1))
    )
    assert first == again
    for other in (other_seed, other_epoch, list(range(1000))):
        assert sum(a == b for a, b in zip(first, other, strict=True)) < 20  # 1 is expected
    with pytest.raises(IndexError):
        Permutation(1000, 1, 0)[1000]


def test_jsonl_shuffles_all_rows_each_epoch(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "sums.jsonl", 40)
    config = PromptsConfig(source="jsonl", path=str(path), epochs=2)
    source = open_source(config)
    assert source.total == 80
    first, second = [[source[epoch * 40 + i].index for i in range(40)] for epoch in (0, 1)]
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second
    assert source[3].reference == {"answer": source[3].index + 1}
    assert source[3].task == "sums"
    for number in (80, -1):
        with pytest.raises(IndexError):
            source[number]
    source.close()


def test_jsonl_without_shuffle_and_epochs_repeats_in_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", 3)
    source = open_source(PromptsConfig(source="jsonl", path=str(path), shuffle=False))
    assert source.total is None
    assert [source[n].index for n in (0, 1, 2, 3, 10**12)] == [0, 1, 2, 0, 10**12 % 3]
    source.close()


@pytest.mark.parametrize(
    "options",
    [
        {"task": "chain_sum", "task_args": CHAIN_SUM, "heldout": 16},
        {"task": "gcd", "task_args": GCD, "heldout": 300},
        {"task": "word_ladder", "size": 20, "heldout": 4},
        {"source": "jsonl", "heldout": 10},
    ],
)
def test_source_continues_at_any_number(tmp_path: Path, options: dict) -> None:
    if options.get("source") == "jsonl":
        options = {**options, "path": str(write_jsonl(tmp_path / "q.jsonl", 30))}
    config = PromptsConfig(**options, seed=5)
    assert texts(config, range(200))[123:] == texts(config, range(123, 200))


def test_seed_changes_questions_but_not_heldout() -> None:
    runs = [PromptsConfig(task="chain_sum", task_args=CHAIN_SUM, heldout=8, seed=seed) for seed in (0, 1)]
    first, second = (set(texts(config, range(100))) for config in runs)
    # Adjacent seeds of the library share all but one item; sums of five digits coincide only by chance.
    assert len(first & second) < 20
    assert heldout_questions(runs[0]) == heldout_questions(runs[1])


def test_heldout_of_a_small_task_is_never_trained() -> None:
    """gcd of two numbers up to 50 has 2,500 texts: without exclusion 4,000 draws would contain most held-out ones."""
    config = PromptsConfig(task="gcd", task_args=GCD, heldout=500, seed=2)
    heldout = {question.text for question in heldout_questions(config)}
    careless = PromptsConfig(task="gcd", task_args=GCD, heldout=0, seed=2)
    assert len(heldout) == 500
    assert len(heldout & set(texts(careless, range(4000)))) > 250
    assert not heldout & set(texts(config, range(4000)))


def test_heldout_excludes_all_repetitions_of_a_text(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    rows = [{"question": f"Question {i % 10}?" + " " * (i // 10), "answer": "1"} for i in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    source = open_source(PromptsConfig(source="jsonl", path=str(path), heldout=4, epochs=1))
    heldout = {question.text.strip() for question in source.heldout}
    assert len(source.heldout) == len(heldout) == 4
    counts = Counter(source[number].text.strip() for number in range(source.total or 0))
    assert set(counts) == {f"Question {i}?" for i in range(10)} - heldout
    assert set(counts.values()) == {3}
    source.close()


def test_heldout_is_stable_if_a_file_is_reordered_or_grows(tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"Question {i}?", "answer": "1"}) for i in range(400)]

    def heldout(kept: list[str], seed: int) -> set[str]:
        (tmp_path / "q.jsonl").write_text("\n".join(kept))
        config = PromptsConfig(source="jsonl", path=str(tmp_path / "q.jsonl"), heldout=20, seed=seed)
        return {question.text for question in heldout_questions(config)}

    small, grown = heldout(lines[:200], seed=1), heldout(lines, seed=2)
    assert small == heldout(lines[199::-1], seed=3)
    assert grown & {json.loads(line)["question"] for line in lines[:200]} == grown & small != set()


def test_heldout_path_provides_heldout_questions(tmp_path: Path) -> None:
    train, test = write_jsonl(tmp_path / "train.jsonl", 20), write_jsonl(tmp_path / "test.jsonl", 5)
    config = PromptsConfig(source="jsonl", path=str(train), heldout_path=str(test), epochs=1)
    source = open_source(config)
    assert [question.index for question in source.heldout] == [0, 1, 2, 3, 4]
    assert {question.task for question in (*source.heldout, source[0])} == {"train"}
    assert sorted(source[n].index for n in range(source.total or 0)) == list(range(5, 20))
    source.close()
    with pytest.raises(SourceError, match=r"heldout_path: .*has 5 usable rows, fewer than heldout = 6"):
        open_source(PromptsConfig(source="jsonl", path=str(train), heldout_path=str(test), heldout=6))


def test_heldout_path_of_other_questions_leaves_rows_to_train(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", 5)
    test = tmp_path / "test.jsonl"
    test.write_text("\n".join(json.dumps({"question": f"other {n}", "answer": "1"}) for n in range(5)))
    source = open_source(PromptsConfig(source="jsonl", path=str(train), heldout_path=str(test)))
    assert (source.row_count, source.trained_rows, len(source.heldout)) == (5, 5, 5)
    source.close()


def test_heldout_path_provides_only_questions_that_match_where(tmp_path: Path) -> None:
    for name in ("train", "test"):
        rows = [{"question": f"{name} {n}?", "answer": "1", "kind": "ab"[n % 2]} for n in range(8)]
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    train, test = str(tmp_path / "train"), str(tmp_path / "test")
    config = PromptsConfig(source="jsonl", path=train, heldout_path=test, where="kind = 'b'")
    assert [question.text for question in heldout_questions(config)] == [f"test {n}?" for n in (1, 3, 5, 7)]
    with pytest.raises(SourceError, match=r"heldout_path: .*test has 0 usable rows where kind = 'c'"):
        heldout_questions(replace(config, where="kind = 'c'"))


def test_csv_files_are_named_in_the_reason(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n1 + 1?,2\n")
    with pytest.raises(SourceError, match=r"line 1: not JSON \(a CSV file: convert it to JSON Lines or Parquet\)"):
        open_source(PromptsConfig(source="jsonl", path=str(tmp_path / "rows.csv")))


def test_too_many_heldout_questions_raise(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "q.jsonl", 6)
    with pytest.raises(SourceError, match="leaves none of the 6 distinct"):
        heldout_questions(PromptsConfig(source="jsonl", path=str(path), heldout=6))
    small = {"min_value": 1, "max_value": 2}
    with pytest.raises(SourceError, match="generated only 4 distinct"):
        heldout_questions(PromptsConfig(task="gcd", task_args=small, heldout=5))
    with pytest.raises(SourceError, match="draws were all among the 4 held out"):
        heldout_questions(PromptsConfig(task="gcd", task_args=small, heldout=4))


def test_bad_lines_are_reported_by_number_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_bytes(
        b'{"question": "one?", "answer": "1"}\n'
        b'{"question": "two?", "answer": \n'
        b"\n"
        b'{"question": "  ", "answer": "1"}\n'
        b'{"question": "three?"}\n'
        b"[1]\n"
        b'{"question": "bad \\ud800", "answer": "1"}\n'
        b'{"question": "four?", "answer": NaN}\n'
        b'\xff\xfe{"question"\n'
        b'{"question": "' + b"x" * (8 * 1024 * 1024) + b'?", "answer": "1"}\n'
        b'{"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}], "answer": "1"}\n'
        b'{"question": "five?", "answer": "5"}'
    )
    source = open_source(PromptsConfig(source="jsonl", path=str(path), epochs=1, shuffle=False))
    assert [source[n].text for n in range(source.total or 0)] == ["one?", "five?"]
    reasons = {row.line: row.reason for row in source.bad_rows}
    assert sum(source.refused_rows.values()) == len(reasons) == 9
    expected = {2: "not JSON", 4: "empty", 5: "answer_column", 6: "expected an object", 7: "UTF-8", 8: "NaN"}
    expected |= {9: "not JSON", 10: "longer than", 11: "assistant"}
    for line, words in expected.items():
        assert words in reasons[line], (line, reasons[line])
    source.close()


def test_bad_rows_beyond_the_report_limit_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text("{\n" * 1500 + '{"question": "one?", "answer": "1"}\n')
    source = open_source(PromptsConfig(source="jsonl", path=str(path)))
    assert (len(source.bad_rows), sum(source.refused_rows.values())) == (1000, 1500)
    assert source.bad_rows[999] == BadRow(1000, source.bad_rows[0].reason)
    assert source[7].text == "one?"
    source.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "jsonl", "path": "/nowhere/q.jsonl"}, "no file /nowhere/q.jsonl"),
        ({"source": "parquet", "path": "/nowhere/q.parquet"}, "no file /nowhere/q.parquet"),
        ({"source": "dataset", "path": "/nowhere/q"}, "no folder /nowhere/q"),
        ({"task": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"task": "chain_sum", "task_args": {"max_term": 3}}, "no argument 'max_term'; did you mean 'max_terms'"),
        ({"task": "chain_sum", "task_args": {"min_terms": 9}}, "max_terms must be >= min_terms"),
        ({"task": "composite"}, "Must specify at least one dataset"),
    ],
)
def test_open_source_names_what_cannot_be_opened(options: dict, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_source(PromptsConfig(**options))


@pytest.mark.parametrize("task", ["list_functions", "gsm_symbolic"])
def test_task_without_endless_questions_is_a_table(task: str) -> None:
    source = open_source(PromptsConfig(task=task, heldout=2))
    assert (source.row_count, len(source.heldout)) == (FINITE_TASK_SIZE, 2)
    assert source[FINITE_TASK_SIZE].text  # the next epoch


@pytest.mark.parametrize("task", ["arc_agi", "rearc"])
def test_task_with_tuples_opens(task: str) -> None:
    assert open_source(PromptsConfig(task=task))[0].text


def test_file_without_usable_rows_raises_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"query": "one?"}\n')
    with pytest.raises(SourceError, match=r"no usable row \(1 bad row; line 1: no value in column prompt or"):
        open_source(PromptsConfig(source="jsonl", path=str(path)))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"source": "json", "path": "x"}, "source must be one of reasoning_gym, jsonl, .*, not 'json'"),
        ({"source": "jsonl"}, "path"),
        ({}, "task"),
        ({"task": "gcd", "path": "x"}, "path"),
        ({"task": "gcd", "task_args": {"seed": 1}}, "task_args"),
        ({"task": "gcd", "epochs": 2}, "epochs needs size"),
        ({"task": "gcd", "template": "solve"}, "template"),
        ({"task": "gcd", "system": "be kind"}, "system"),
        ({"task": "gcd", "stop": ("a", "")}, "stop must not contain an empty string"),
        ({"task": "gcd", "samples_per_prompt": 0}, "samples_per_prompt"),
        ({"task": "gcd", "max_new_tokens": 0}, "max_new_tokens"),
        ({"task": "gcd", "temperature": float("nan")}, "temperature"),
        ({"task": "gcd", "temperature": 0.0}, "temperature must be positive, not 0.0: greedy"),
        ({"task": "gcd", "temperature": float("inf")}, "temperature"),
        ({"task": "gcd", "top_p": 0.95}, "top_p must be 1, not 0.95: training needs samples of the whole"),
        ({"task": "gcd", "top_k": 50}, "top_k must be 0"),
        ({"task": "gcd", "heldout": -1}, "heldout"),
        ({"task": "gcd", "seed": 2**29}, "seed"),
        ({"task": "gcd", "where": "answer = 1"}, "where needs a table"),
        ({"task": "gcd", "size": 9, "epochs": 1, "levels": ("answer = 1",)}, "epochs does not apply to levels"),
        ({"source": "synthetic", "levels": ({"a": 1},)}, "levels of source 'synthetic' must be empty tables"),
        ({"task": "gcd", "size": 9, "where": "rate >"}, "condition 'rate >': at 'the end'"),
        ({"task": "gcd", "size": 9, "levels": ("", "rate <")}, "condition 'rate <'"),
        ({"task": "gcd", "size": 9, "levels": ({"a": 1},)}, "levels: each must be a condition such as"),
        ({"task": "gcd", "levels": ("a = 1",)}, "levels: each must be a table of arguments of the task"),
    ],
)
def test_config_errors_name_the_field(options: dict, field: str) -> None:
    with pytest.raises(ValueError, match=field):
        PromptsConfig(**options)


def test_levels_of_a_task_use_their_arguments_without_heldout() -> None:
    levels = ({"max_terms": 2}, {"max_terms": 2, "min_digits": 2, "max_digits": 2})
    base = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    config = PromptsConfig(task="chain_sum", task_args=base, heldout=40, levels=levels)
    easy, hard = open_levels(config)
    kept = {question.text for question in heldout_questions(config)}
    assert {question.text for question in easy.heldout} == {question.text for question in hard.heldout} == kept
    asked = [source[number] for source in (easy, hard) for number in range(200)]
    assert not kept & {question.text for question in asked}
    assert [question.reference["task_args"]["max_digits"] for question in asked] == [1] * 200 + [2] * 200
    (only,) = open_levels(PromptsConfig(task="chain_sum", task_args=base))
    assert only[3] == open_source(PromptsConfig(task="chain_sum", task_args=base))[3]


GRADES = ("grade in (1, 2)", "grade = 3", "meta.rate >= 0.25 and meta.rate < 0.5", "meta.rate >= 0.5")
HAS_GRADE: tuple[Callable[[int], bool], ...] = (
    lambda i: i % 4 in (0, 1),
    lambda i: i % 4 == 2,
    lambda i: 16 <= i < 32,
    lambda i: i >= 32,
)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_levels_of_a_file_select_rows_without_heldout(tmp_path: Path, kind: str) -> None:
    rows = [
        {
            "question": f"{i}?",
            "answer": i,
            "grade": 1 + i % 4,
            "meta": {"rate": i / 64},
            "kind": "sum" if i % 3 else "?",
        }
        for i in range(64)
    ]
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("{\n" + "\n".join(map(json.dumps, rows)))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    config = PromptsConfig(source=kind, path=str(path), heldout=8, where="kind = 'sum'", levels=GRADES)
    kept = {question.reference["answer"] for question in heldout_questions(config)}
    assert len(kept) == 8
    sources = open_levels(config)
    for source, has_grade in zip(sources, HAS_GRADE, strict=True):
        drawn = [source[number].reference["answer"] for number in range(200)]
        assert set(drawn) == {i for i in range(64) if i % 3 and has_grade(i)} - kept
        assert source.total is None
        assert len(source.bad_rows) == (kind == "jsonl")
    assert sources[1][0].reference["grade"] == 3
    for source in sources:
        source.close()


def test_levels_of_a_sized_task_select_by_metadata() -> None:
    levels = ("metadata.num_terms = 2", "metadata.num_terms >= 3")
    easy, hard = open_levels(PromptsConfig(task="chain_sum", size=40, levels=levels))
    assert {easy[number].reference["metadata"]["num_terms"] for number in range(40)} == {2}
    assert 2 not in {hard[number].reference["metadata"]["num_terms"] for number in range(40)}


def test_level_without_rows_raises(tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "q.jsonl", 4))
    for where, message in (
        ("answer = 9", "no usable row where answer = 9$"),
        ("grade = 1", "column grade"),
    ):
        with pytest.raises(SourceError, match=message):
            open_levels(PromptsConfig(source="jsonl", path=path, levels=("answer = 1", where)))
