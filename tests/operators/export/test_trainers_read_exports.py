"""Exports are read unchanged by other trainers: TRL's and verl's own classes (`make exports-test`).

Those of `laminar export`, of a user's runs, are written to $LAMINAR_EXPORTS by tests/end_to_end/test_first_day.py.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import load_dataset
from export_factories import CONTENTS, exported_to, polled
from transformers import AutoModelForCausalLM, AutoTokenizer

from infra.models.checkpoint_folder import save_folder
from infra.models.demo import build_demo_model
from infra.models.demo_config import DemoModelConfig
from operators.export.card import write_card
from operators.export.folder import DATA
from operators.export.views import ViewName
from schemas.records import Message

ELSEWHERE = "run by `make exports-test`"
OF_COMMAND = os.environ.get("LAMINAR_EXPORTS", "")
"""The folder of exports that `laminar export` has written, by view."""
ONE_STEP: dict[str, Any] = {
    "max_steps": 1,
    "per_device_train_batch_size": 6,
    "learning_rate": 1e-2,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_folder(*build_demo_model(DemoModelConfig(layers=1)), folder)
    return folder


CHAT = Message("system", "Be brief."), Message("user", "What is 1 + 1?")


def exported(folder: Path, view: ViewName, messages: bool) -> Path:
    """A dataset of two files with six groups, each of a correct and a wrong answer."""
    chat = CHAT if messages else ()
    polls = [polled(0, 3, messages=chat), polled(4, 3, last=True, messages=chat)]
    exported_to(folder, polls, replace(CONTENTS, view=view, messages=messages), file_bytes=1)
    write_card(folder)
    return folder


@pytest.mark.parametrize("rows", ["texts", "messages", "of a command"])
@pytest.mark.parametrize(
    ("view", "examples", "name", "untrained"),
    [("trl", 12, "SFT", None), ("sft", 6, "SFT", None), ("preference", 6, "DPO", math.log(2))],
)
def test_trl_takes_a_step(
    view: ViewName, examples: int, name: str, untrained: float | None, rows: str, model: Path, tmp_path: Path
) -> None:
    """A policy that equals its reference has a DPO loss of log 2, for any pairs."""
    trl = pytest.importorskip("trl", reason=ELSEWHERE)
    messages, of_command = rows == "messages", rows == "of a command"
    if of_command and not OF_COMMAND:
        pytest.skip(ELSEWHERE)
    export = Path(OF_COMMAND, view).absolute() if of_command else exported(tmp_path / "export", view, messages)
    dataset = load_dataset(str(export), split="train", cache_dir=str(tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    if messages or of_command:
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    trainer = getattr(trl, f"{name}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        args=getattr(trl, f"{name}Config")(output_dir=str(tmp_path / "out"), **ONE_STEP),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    done = trainer.train()
    assert (len(trainer.train_dataset), done.global_step) == (len(dataset) if of_command else examples, 1)
    assert len(dataset) > 0
    assert math.isfinite(done.training_loss)
    assert untrained is None or done.training_loss == pytest.approx(untrained, abs=1e-3)
    assert any(not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def verl_batch(files: list[Path], model: Path, cache: Path) -> dict[str, Any]:
    """All rows of `files`, by verl's dataset class with its loader, as its trainer reads them."""
    verl = pytest.importorskip("verl.utils.dataset.rl_dataset", reason=ELSEWHERE)
    from omegaconf import OmegaConf

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    config = OmegaConf.create({"cache_dir": str(cache), "max_prompt_length": 64, "filter_overlong_prompts": True})
    dataset = verl.RLHFDataset(sorted(map(str, files)), tokenizer, config)
    (batch,) = torch.utils.data.DataLoader(dataset, batch_size=len(dataset), collate_fn=verl.collate_fn)
    return dict(batch)


def test_verl_dataset_reads_the_prompts(model: Path, tmp_path: Path) -> None:
    """Texts of a user, and conversations of the dataset."""
    polls = [polled(0, 3), polled(4, 3, last=True, messages=CHAT)]
    exported_to(tmp_path / "export", polls, replace(CONTENTS, view="verl"), file_bytes=1)
    batch = verl_batch([*(tmp_path / "export" / DATA).iterdir()], model, tmp_path)
    texts = [[{"role": "user", "content": f"What is {number} + 1?"}] for number in range(3)]
    assert [list(each) for each in batch["raw_prompt"]] == texts + [[asdict(message) for message in CHAT]] * 3
    assert set(batch["data_source"]) == {"sums"}
    assert batch["reward_model"][0] == {"style": "rule", "ground_truth": "1"}
    assert list(batch["index"]) == [0, 1, 2, 4, 5, 6]


@pytest.mark.skipif(not OF_COMMAND, reason=ELSEWHERE)
@pytest.mark.parametrize("split", ["train", "test"])
def test_verl_dataset_reads_files_of_a_command(split: str, model: Path, tmp_path: Path) -> None:
    batch = verl_batch([*Path(OF_COMMAND, f"verl-{split}", DATA).iterdir()], model, tmp_path)
    assert all([message["role"] for message in messages] == ["user"] for messages in batch["raw_prompt"])
    assert all(each["ground_truth"].isdecimal() for each in batch["reward_model"])
    assert {each["split"] for each in batch["extra_info"]} == {split}
