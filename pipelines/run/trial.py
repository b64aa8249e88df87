"""The trial of a run before its topics are written: its prompts, rewards and environments are used once.

It is a job of the fleet, forked from the zygote before Kafka starts. User code runs in worker processes with limits.
The job reports all problems, not only the first one.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from operator import mul
from pathlib import Path

from infra.clocks import wall_ms
from infra.files import write_atomically
from infra.models.chat import ChatTokenizer, ConversationTokenizer, continuation
from infra.models.sizes import vocabulary_size
from operators.agents.function_server import load_function
from operators.autoscaler.policies import make_policy
from operators.prompts.config import TaskConfig
from operators.prompts.question import Question, UnusableRow
from operators.prompts.refused_rows import estimate_refused, refusal_kind
from operators.prompts.rendering import PromptTooLong, render
from operators.prompts.sources import PromptSource, open_tasks
from operators.prompts.synthetic import SyntheticTokenizer
from operators.trainer.config import BUILT_IN_LEARNER
from pipelines.config import Config
from pipelines.config_draft import WHOLE, names_any
from pipelines.inspect.run_files import CONFIG_FILE
from pipelines.run.learnability import doubtful_settings
from pipelines.run.paths import files_read
from pipelines.run.preflight import model_problems
from pipelines.run.trial_calls import TRIED_PROMPTS, Started, TaskPrompts, check_environments, check_rewards
from pipelines.run.trial_model import check_model
from pipelines.run.trial_result import CHECK_FILE, TrialResult, write_check
from schemas.records import Prompt

GENERATED = 256
"""Questions of a task without a table that are rendered, to estimate how many have no room."""
SAMPLING_S = 5.0
"""How long the rows of a table are rendered; the share of the rest is extrapolated."""


def _quiet(subject: str) -> None:
    """Reports nothing."""


def run_trial(config: Config, file: Path) -> None:
    """Check `config` and write the `TrialResult` to `file` as JSON; `CHECK_FILE` beside it names the present check."""
    started = partial(write_check, file.with_name(CHECK_FILE))
    found = try_config(config, lambda subject: started(subject, wall_ms()))
    write_atomically(file, json.dumps(asdict(found)))


TRIED_ROLES = ("prompts", "score", "rollout", "experience", "trainer", "autoscaler", "agents")


def all_problems(
    config: Config,
    known: Sequence[str] = (),
    started: Started = _quiet,
    roles: Collection[str] = TRIED_ROLES,
    *,
    replaced: Collection[str] = (),
    report: Callable[[str], None] = _quiet,
) -> TrialResult:
    """The problems `known` from the checks without user code, those that a trial in this process finds, and warnings.

    What the trial says of a missing file or model is known already, and what it says of a setting in `replaced`, whose
    value is not the user's, is not true of theirs. `report` receives each new problem when its check has ended.
    `started` and `roles` as for `try_config`.
    """
    missing = [str(path) for _, path in files_read(config) if not path.exists()]
    keys = {problem.partition(":")[0] for problem in known} & {"model.path"}
    found, reported = TrialResult(), list[str]()

    def new_problems() -> list[str]:
        return [
            problem
            for problem in found.problems
            if not any(path in problem for path in missing)
            and problem.partition(":")[0] not in keys
            and not names_any(problem, replaced)
        ]

    def begin(subject: str) -> None:
        for problem in new_problems():
            if problem not in reported:
                reported.append(problem)
                report(problem)
        if subject:
            started(subject)

    try_config(config, begin, roles, replaced, found)
    begin("")
    warnings = [each for each in found.warnings if not names_any(each, replaced)]
    return TrialResult([*known, *new_problems()], warnings, found.tried)


_QUESTIONS = (
    *("prompts.tasks", "prompts.name", "prompts.source", "prompts.task", "prompts.task_args", "prompts.where"),
    *("prompts.levels", "prompts.path", "prompts.split", "prompts.prompt_column", "prompts.answer_column"),
    *("prompts.answer_required", "prompts.answer_after", "prompts.extra_columns", "prompts.template"),
    *("prompts.chat_template", "prompts.system", "prompts.environment"),
    *("model.path", "warm_start.model", "rollout.context", "rollout.engine"),
)
"""The settings that decide the prompts. Others, such as `samples_per_prompt`, may have a default in the trial."""
_REWARDS = (
    *("score.tasks", "score.rewards.name", "score.rewards.options"),
    *("score.answer", "score.answer_marker", "score.answer_regex"),
)
_ENVIRONMENTS = tuple(f"rollout.environments.{name}" for name in ("name", "label", "options", "role"))


def _is_given(settings: Sequence[str], replaced: Collection[str]) -> bool:
    """Whether none of `settings` is replaced, alone, with its section or in a part."""
    pairs = [(f"{one}.", f"{each.replace('.tasks.', '.')}.") for one in settings for each in replaced]
    return WHOLE not in replaced and not any(one.startswith(other) or other.startswith(one) for one, other in pairs)


def try_config(
    config: Config,
    started: Started = _quiet,
    roles: Collection[str] = TRIED_ROLES,
    replaced: Collection[str] = (),
    found: TrialResult | None = None,
) -> TrialResult:
    """Use the prompts, rewards and environments of `config` once. Calls `started` with what is checked next.

    Only what the pipelines `roles` use, and not what a setting in `replaced` decides. Without prompts among `roles`,
    the prompts may be on another machine. The result is `found` if it is given.
    """
    found = found or TrialResult()
    found.warnings += doubtful_settings(config)
    prompts: list[TaskPrompts] = []
    if {"prompts", "score", "rollout"} & {*roles} and _is_given(_QUESTIONS, replaced):
        prompts = _check_prompts(config, found if "prompts" in roles else TrialResult(), started)
    if "trainer" in roles and _is_given(("model.path",), replaced):
        check_model(config, found, started)
    if config.run.check_timeout_s:
        if "score" in roles and _is_given(_REWARDS, replaced):
            check_rewards(config, prompts, found, started)
        if "rollout" in roles and _is_given(_ENVIRONMENTS, replaced):
            check_environments(config, prompts, found, started)
        buffer, learner, limit = config.experience, config.trainer.learner.name, config.run.check_timeout_s
        if "trainer" in roles and learner != BUILT_IN_LEARNER:
            from operators.trainer.learners import load_learner  # deferred: it and its imports take seconds

            started(f"the import of trainer.learner.name {learner}")
            _load(found, "trainer.learner.name", limit, partial(load_learner, learner))
        if "experience" in roles:
            started("the buffer's sampler, writers and evictions")
            _load(found, "experience", limit, buffer.make_sampler, buffer.make_writers, buffer.make_evictions)
        if config.autoscaling is not None and "autoscaler" in roles:
            started(f"the autoscaler's policy {config.autoscaling.policy}")
            _load(found, "autoscaling", limit, partial(make_policy, config.autoscaling))
        if config.agents is not None and config.agents.function and "agents" in roles:
            started(f"the import of agents.function {config.agents.function}")
            _load(found, "agents.function", limit, partial(load_function, config.agents.function))
    return found


# -- prompts -----------------------------------------------------------------------------------------------------------


def _check_prompts(config: Config, found: TrialResult, started: Started) -> list[TaskPrompts]:
    """Render the first questions of each task; returns the first prompts of each task that has one.

    The context of the model that is loaded for it is compared with the KV cache, too.
    """
    started("the prompts' data")
    try:
        sources = open_tasks(config.prompts)
    except (ValueError, OSError) as error:
        found.add_problem(f"prompts: {error}")
        try:
            tasks = tuple(replace(task, heldout=0, heldout_path="") for task in config.prompts.tasks)
            # rewards and environments need a prompt
            sources = open_tasks(replace(config.prompts, heldout=0, heldout_path="", tasks=tasks))
        except (ValueError, OSError) as second:
            reason = getattr(error, "reason", "")
            if reason and reason == getattr(second, "reason", ""):  # of held-out rows and of those to train
                found.problems.remove(f"prompts: {error}")
            found.add_problem(f"prompts: {second}")
            return []
    _check_enough(config, [levels[0].total for levels in sources], found)
    try:
        missing = list(model_problems(config)) if config.model.path else []
        if missing or not (config.emulated or config.model.path or config.warm_start):
            found.problems += [f"model.path: the tokenizer cannot be used: {'; '.join(missing)}"] if missing else []
            return list(_without_model(config, sources))  # the import of the tokenizer's library takes seconds
        shared, context, vocabulary = _model(config, started)
        encode: Callable[[str], list[int]] = lambda _: []  # noqa: E731 - synthetic prompts have no text
        if shared is not None:
            encode = partial(continuation, shared, split_special_tokens=True)
        _check_capacity(config, context, found)
        first = []
        for task, levels in zip(config.prompts.mixture, sources, strict=True):
            started(f"the prompts of task {task.task_name!r}")
            tokenizer = shared or SyntheticTokenizer(task.prompt_tokens)
            of_levels = []
            for level, source in enumerate(levels):
                name = task.task_name if len(levels) == 1 else f"{task.task_name}, level {level}"
                of_levels.append(_render_some(task, source, tokenizer, context, vocabulary, found, name))
            if of_levels[0]:
                first.append(TaskPrompts(task, of_levels[0], encode))
            _check_heldout(task, levels[0].heldout, tokenizer, context, found)
        return first
    except (ValueError, OSError) as error:
        found.problems.append(f"model.path: the tokenizer cannot be used: {error}")
        return []
    finally:
        for levels in sources:
            for source in levels:
                source.close()


def _without_model(config: Config, sources: Sequence[Sequence[PromptSource]]) -> Iterator[TaskPrompts]:
    """The first prompts of each task for its rewards and environment, which read their texts and not their tokens.

    The text of a chat template is not known.
    """
    for task, levels in zip(config.prompts.mixture, sources, strict=True):
        prompts: list[Prompt] = []
        for number in () if task.chat_template else range(_questions(levels[0])):
            with suppress(UnusableRow, ValueError):
                prompts.append(render(levels[0][number], number, task, SyntheticTokenizer(1), task.max_new_tokens + 1))
            if len(prompts) == TRIED_PROMPTS:
                break
        if prompts:
            yield TaskPrompts(task, prompts, lambda _: [])


def _check_enough(config: Config, totals: Sequence[int | None], found: TrialResult) -> None:
    """The questions of all tasks, `totals`, must suffice for all optimizer steps, if none of the tasks is endless.

    Of a run that is resumed this is a warning: `laminar import` may have filled it.
    """
    questions = [total for total in totals if total is not None]
    samples = [task.samples_per_prompt for task in config.prompts.mixture]
    steps, batch = config.trainer.optimizer_steps, config.experience.global_batch
    if len(questions) < len(totals) or (most := sum(map(mul, questions, samples))) >= steps * batch:
        return
    lower = f", or lower trainer.optimizer_steps to {most // batch}" if most >= batch else ""
    add = found.warnings.append if (config.run_folder / CONFIG_FILE).exists() else found.add_problem
    add(
        f"prompts.epochs: {sum(questions)} questions × samples_per_prompt are {most} trajectories, but "
        f"trainer.optimizer_steps = {steps} × experience.global_batch = {batch} need {steps * batch}: raise "
        f"prompts.epochs, or leave it out to draw without end{lower}"
    )


def _check_capacity(config: Config, context: int, found: TrialResult) -> None:
    """The KV cache of a replica must hold one context; the emulated engine's consists of blocks."""
    block = config.rollout.emulation.block if config.emulated else 1
    capacity, least = config.rollout.kv_capacity, -(-context // block) * block
    if capacity is not None and capacity < least:
        found.add_problem(
            f"rollout.kv_capacity = {capacity} tokens cannot hold one context of {context} (rollout.context, else the "
            f"model's): leave it out, or set it to {least} or more, the tokens that a replica may hold at once"
        )


def _model(config: Config, started: Started) -> tuple[ConversationTokenizer | None, int, int | None]:
    """The tokenizer (None: synthetic prompts), the context length and the vocabulary size of the run's model."""
    if config.emulated or config.prompts.mixture[0].source == "synthetic":
        return None, config.context, None
    if config.model.path:
        started("the tokenizer, whose libraries are being loaded")
        from infra.models.checkpoint_folder import load_tokenizer  # deferred: imports torch

        started("the tokenizer")
        folder = config.model_folder()
        return load_tokenizer(folder), config.context, vocabulary_size(folder)
    started("the tokenizer")
    from infra.models.demo import build_demo_tokenizer
    from infra.models.demo_config import PHRASES

    assert config.warm_start is not None
    model = config.warm_start.model
    tokenizer = build_demo_tokenizer((*PHRASES.get(model.task, ()), *model.phrases), model.max_positions)
    return tokenizer, config.rollout.context or model.max_positions, None


def _questions(source: PromptSource) -> int:
    """How many questions of `source` are tried at most."""
    return source.trained_rows if source.row_count else min(GENERATED, source.total or GENERATED)


def _render_some(
    task: TaskConfig,
    source: PromptSource,
    tokenizer: ChatTokenizer,
    context: int,
    vocabulary: int | None,
    found: TrialResult,
    label: str,
) -> list[Prompt]:
    """Render questions of `task`, see `SAMPLING_S`; returns the first prompts. Too many refusals are a problem.

    `label` names the task, and the level of its curriculum.
    """
    first: list[Prompt] = []
    refused: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    unknown: int | None = None
    prompts, shortened = 0, 0
    deadline = time.monotonic() + SAMPLING_S
    for number in range(_questions(source)):
        try:
            prompt = render(source[number], number, task, tokenizer, context)
        except (UnusableRow, ValueError) as error:
            refused[refusal_kind(error)] += 1
            reasons.setdefault(refusal_kind(error), str(error))
            continue
        prompts += 1
        shortened += prompt.sampling.max_new_tokens < task.max_new_tokens
        highest = max(*prompt.token_ids.tolist(), *prompt.sampling.stop_token_ids, 0)
        unknown = highest if vocabulary is not None and highest >= vocabulary else unknown
        if prompts <= TRIED_PROMPTS:
            first.append(prompt)
        if time.monotonic() > deadline:
            break
    name = f"prompts, task {label!r}"
    if unknown is not None:
        found.problems.append(
            f"{name}: the tokenizer gives token {unknown}, but the model's vocabulary has {vocabulary} tokens: "
            "model.path has the tokenizer of another model"
        )
    if task.max_new_tokens > context:
        found.add_problem(
            f"{name}: max_new_tokens = {task.max_new_tokens} is more than the whole context of {context} "
            "tokens, which prompt and response share: lower prompts.max_new_tokens, or raise rollout.context"
        )
    elif shortened:
        held_out = f" (of {source.row_count} rows)" if source.row_count else ""
        found.warnings.append(
            f"{name}: {shortened} of {prompts} training prompts{held_out} leave less than max_new_tokens = "
            f"{task.max_new_tokens} in a context of {context}: their responses are shorter (see rollout.context)"
        )
    rows = estimate_refused(source, refused, prompts + refused.total())
    for row in reversed(source.bad_rows):
        reasons[row.kind] = f"row {row.line}: {row.reason}"
    why = "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())
    if rows.share > task.max_refused_share or not prompts:
        accepted = f", or accept them with prompts.max_refused_share = {min(1.0, rows.share + 0.005):.2f}"
        found.problems.append(f"{name}: {rows} are refused ({why}). Correct them{accepted * (rows.share < 1)}")
    elif rows.share:
        found.warnings.append(f"{name}: {rows} are refused ({why})")
    return first


def _check_heldout(
    task: TaskConfig, questions: Sequence[Question], tokenizer: ChatTokenizer, context: int, found: TrialResult
) -> None:
    """Evaluation renders all held-out questions at its start, skips those that are too long, and fails for others."""
    name, too_long = f"prompts, task {task.task_name!r}", ""
    skipped, deadline = 0, time.monotonic() + SAMPLING_S
    for number, question in enumerate(questions):
        try:
            render(question, number, task, tokenizer, context, purpose="evaluation", samples=1)
        except PromptTooLong as error:
            skipped, too_long = skipped + 1, too_long or str(error)
        except ValueError as error:
            found.problems.append(f"{name}: a held-out question cannot be rendered: {error}")
            return
        if time.monotonic() > deadline:
            break
    if skipped:
        add = found.add_problem if skipped == len(questions) else found.warnings.append
        add(f"{name}: {skipped} of {len(questions)} held-out questions are too long and are not asked ({too_long})")


def _load(found: TrialResult, key: str, limit_s: float, *loads: Callable[[], object]) -> None:
    """Load a user's code of the section `key`, in a thread: an import may hang."""
    problems: list[str] = []

    def load_all() -> None:
        for load in loads:
            try:
                load()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                problems.append(f"{key}: {kind}{error}")

    thread = threading.Thread(target=load_all, name=key, daemon=True)
    thread.start()
    thread.join(limit_s)
    for problem in problems:
        found.add_problem(problem)
    if thread.is_alive():
        found.problems.append(f"{key}: the import takes over {limit_s:g} s (run.check_timeout_s)")
