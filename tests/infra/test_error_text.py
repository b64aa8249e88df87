"""The text of errors of user code: one line each, and a traceback of the first error of each place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from infra.name_lookup import import_user_module
from infra.workers.error_text import MAX_PLACES, MAX_TRACE_CHARACTERS, ErrorText, first_line


def caught(function: Callable[[], object]) -> Exception:
    try:
        function()
    except Exception as error:  # noqa: BLE001 - any error is described
        return error
    raise AssertionError("nothing was raised")


def test_error_text_has_the_frames_of_user_code_once(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine():\n    return {}['answr']\ndef other():\n    return 1 / 0\n")
    module, text = import_user_module(str(file)), ErrorText()
    first = text.describe(caught(module.mine))
    assert first_line(first) == "KeyError: 'answr' (mine.py:2)"
    assert f"  File \"{file}\", line 2, in mine\n    return {{}}['answr']" in first
    assert text.describe(caught(module.mine)) == first_line(first)
    assert f'  File "{file}", line 4, in other' in text.describe(caught(module.other))


def test_error_text_without_user_frames_is_one_line() -> None:
    assert "\n" not in ErrorText().describe(TypeError("returned str instead of a number"))


def test_error_text_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "deep.py"
    one = "def f{0}(depth=0):\n    return f{0}(depth + 1) if depth < 40 else 1 / 0\n"
    file.write_text("".join(one.format(number) for number in range(MAX_PLACES + 2)))
    module, text = import_user_module(str(file)), ErrorText()
    described = [text.describe(caught(getattr(module, f"f{n}"))) for n in range(MAX_PLACES + 2)]
    assert all(len(each) < MAX_TRACE_CHARACTERS + 600 for each in described)
    assert ["\n" in each for each in described] == [True] * MAX_PLACES + [False] * 2
