"""Keeps lines of libraries out of a user's terminal and logs that name neither a problem nor an action."""

from __future__ import annotations

import logging
import os
import warnings

_NOISE = ("apitools not found", "Token indices sequence length is longer")
"""Beginnings of messages: Beam reports parts for Google Cloud that Laminar does not use; tokenizers report texts that
are too long for the model, which Laminar counts and refuses itself."""
_LOGGERS = (None, "transformers.tokenization_utils_base")
_CATCHING = ("kafka.future", "kafka.net.selector")
"""Loggers of kafka-python's modules that catch errors and go on."""


def quiet_libraries() -> None:
    """Drop these lines, and progress bars of loading and writing weights. To be called before the imports."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when transformers is imported
    warnings.filterwarnings("ignore", category=SyntaxWarning)  # of libraries' sources when they are first compiled
    quiet_kafka()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(lambda record: not str(record.msg).startswith(_NOISE))


def quiet_kafka(*, log_defects: bool = False) -> None:
    """Let kafka-python log nothing: it logs each reconnect, and what it cancels as it closes, as an error, and raises
    what fails. With `log_defects` it logs the errors of its own callbacks and tasks, which it does not raise."""
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    for name in _CATCHING if log_defects else ():
        logging.getLogger(name).setLevel(logging.ERROR)
