"""Imports the code of a model before it is needed: once, in the process from which roles are forked."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def preload_model_code(folder: Path) -> None:
    """Import the modules for the model and tokenizer in `folder`; no weights are read.

    Errors of the folder are ignored here: loading the model reports them.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError):
        return
