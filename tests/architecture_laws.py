"""The laws of the house, read from the sources: who may import whom, which vendor is used where, and what nobody does.

`violations(root)` gives a line for each breach, `path:line: what, and what to do`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

LAYERS = ("schemas", "infra", "operators", "pipelines")
WITHIN_PIPELINES = ("inspect", "trim", "simulate", "present", "run", "cli")
"""Folders of pipelines. Each may import those before it and the modules of `pipelines` itself."""
EVERYWHERE = (*LAYERS, "tests", "benchmarks")
MAX_LINES = 400
MAX_TEST_NAME = 60

Breach = tuple[int, str]
Law = Callable[[str, ast.Module], Iterator[Breach]]

_TENSORS = ("infra/models/", "operators/rollout/", "operators/relay/", "operators/trainer/", "pipelines/simulate/")
VENDORS: dict[str, tuple[str, ...]] = {
    "kafka": ("infra/kafka/",),
    "vllm": tuple(f"operators/rollout/vllm_{part}.py" for part in ("engine", "sampling", "worker")),
    "torch": _TENSORS,
    "transformers": _TENSORS,
    "tokenizers": _TENSORS,
    "safetensors": _TENSORS,
    "starlette": ("operators/gateway/",),
    "uvicorn": ("infra/http_server.py",),
    "openai": ("operators/agents/function_server.py",),
    "openenv": ("operators/rollout/environments/openenv_session.py",),
    "verifiers": ("operators/rollout/environments/verifiers_rollout.py",),
    "peft": ("operators/trainer/lora.py",),
    "mlflow": ("pipelines/present/report/trackers.py",),
    "tensorboardX": ("pipelines/present/report/trackers.py",),
    "trackio": ("pipelines/present/report/trackers.py",),
    "wandb": ("pipelines/present/report/trackers.py",),
    "urllib.request": ("infra/http_client.py",),
    "apache_beam": ("operators/", "pipelines/", "infra/runners/"),
}
_SHOWN = tuple(f"pipelines/{folder}/" for folder in ("cli", "run", "present"))
_BUILDS_ASSIGNMENTS = ("operators/placement/dispatch.py", "pipelines/simulate/prediction/log_bytes.py")
"""The second one measures the size of a record."""
PICKLES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
_RECORD_TIMES = re.compile(
    "(assigned|created|decided|ended|failed|finished|first_token|measured|planned|proposed|replied|requested|"
    "scored|selected|sent|settled|started|written)_at"
)
"""Fields of records, in the Unix milliseconds of their writer."""
_TOPIC_NAME = re.compile(r"laminar\.")


def violations(root: Path) -> list[str]:
    """Every breach of a law in the Python files under `root`, sorted."""
    found = []
    types: defaultdict[str, list[str]] = defaultdict(list)
    tests: dict[str, str] = {}
    for folder in EVERYWHERE:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if path.name.startswith("test_") and (first := tests.setdefault(path.stem, name)) != name:
                found.append(f"{name}:1: has the file name of {first}, by which alone pytest imports either")
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source, name)
            lines = source.count("\n")
            if lines > MAX_LINES:
                found.append(f"{name}:{MAX_LINES}: {lines} lines; a file holds one idea, in at most {MAX_LINES}")
            laws = (*_OF_LAYERS, *_OF_ALL) if folder in LAYERS else _OF_ALL
            found += [f"{name}:{line}: {what}" for law in laws for line, what in law(name, tree)]
            for line, defined in _public_types(tree) if folder in LAYERS else ():
                found += [f"{name}:{line}: {defined} is also in {at}; a name has one meaning" for at in types[defined]]
                types[defined].append(f"{name}:{line}")
    return found


def _public_types(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of the public classes and type aliases that a module defines."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = _dotted(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        else:
            continue
        if re.fullmatch("[A-Z]+[a-z]\\w*", name):
            yield node.lineno, name


@lru_cache(maxsize=1)
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of the module that is being read; every law needs them."""
    return tuple(ast.walk(tree))


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module imports, at whatever depth; relative names made absolute."""
    for node in _nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "importlib.import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield node.lineno, first.value


def _import_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    home = path.split("/")
    for line, name in imports(path, tree):
        target = name.split(".")
        if target[0] not in LAYERS:
            continue
        if LAYERS.index(target[0]) > LAYERS.index(home[0]):
            yield line, f"{home[0]} imports {name}; imports go {' <- '.join(LAYERS)} only"
        elif target[0] == home[0] == "operators" and len(target) > 1 and target[1] not in (home[1], "io"):
            yield line, f"operators/{home[1]} imports {name}; operators share topics and operators/io only"
        elif (
            target[0] == "operators"
            and path.startswith("pipelines/inspect/audit/")
            and not name.startswith("operators.io.validation.")
        ):
            yield line, f"imports {name}; the audit proves what operators did and shares no code with them"


def _pipelines_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    for line, name in imports(path, tree):
        both = path.startswith("pipelines/") and name.startswith("pipelines.")
        if both and _level(name.split(".")) > _level(path.split("/")):
            order = " <- ".join(("pipelines/*.py", *WITHIN_PIPELINES))
            yield line, f"{path} imports {name}; imports within pipelines go {order} only"
        elif path.startswith("pipelines/present/view/") and name.startswith("pipelines.present.report"):
            yield line, f"{path} imports {name}; the report is made of views, not the reverse"


def _level(parts: list[str]) -> int:
    """The place of a module in the order of the folders of pipelines; 0 for a module in none of them."""
    return WITHIN_PIPELINES.index(parts[1]) + 1 if parts[1] in WITHIN_PIPELINES else 0


def _vendor_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    for line, name in imports(path, tree):
        vendor = next((each for each in VENDORS if f"{name}.".startswith(f"{each}.")), None)
        if vendor is not None and not path.startswith(VENDORS[vendor]):
            yield line, f"imports {vendor}, which only {', '.join(VENDORS[vendor])} may"


def _schemas_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    for line, name in imports(path, tree):
        top = name.split(".")[0]
        if path.startswith("schemas/") and top not in sys.stdlib_module_names | {"orjson", "pyarrow", *LAYERS}:
            yield line, f"imports {top}; schemas are the standard library, orjson and pyarrow only"


def _transform_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    """Beam in an operator is for files that derive from its classes; pipelines only wire what operators define."""
    bases = [_dotted(base) for node in _nodes(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    beam = [(line, name) for line, name in imports(path, tree) if name.split(".")[0] == "apache_beam"]
    bound = {name.split(".")[-1] for _, name in beam} | _aliases_of_beam(tree)
    if path.startswith("operators/") and beam and not any(base.split(".")[0] in bound for base in bases):
        yield beam[0][0], "imports apache_beam without defining a transform; keep logic in files that know no runner"
    for base in bases:
        if path.startswith("pipelines/") and base.split(".")[-1] in ("DoFn", "PTransform"):
            yield 1, f"defines a {base}; pipelines are wiring, transforms belong to an operator"


def _aliases_of_beam(tree: ast.Module) -> set[str]:
    aliases = [alias for node in _nodes(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {alias.asname or "apache_beam" for alias in aliases if alias.name.split(".")[0] == "apache_beam"}


def _topic_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    documentation = {id(node.value) for node in _nodes(tree) if isinstance(node, ast.Expr)}
    for node in _nodes(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documentation:
            continue
        if path != "schemas/topics.py" and _TOPIC_NAME.match(node.value):
            yield node.lineno, f"spells the name {node.value[:40]!r}; topics and groups are named by schemas/topics.py"


def _pickle_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    beam_does = path.startswith("tests/")  # it ships transforms so, and tests look at what a transform carries
    for line, name in imports(path, tree):
        if (name.split(".")[0] in PICKLES and not beam_does) or name in ("torch.load", "torch.save"):
            yield line, f"imports {name}; data is never code: use schemas, JSON, Arrow or safetensors"
    for node in _nodes(tree):
        if isinstance(node, ast.Call):
            called = _called(node)
            walled_in = called == "exec" and path == "infra/sandbox/confine.py"  # whose data are programs
            if (
                called in ("eval", "exec", "torch.load", "torch.save", "builtins.eval", "builtins.exec")
                and not walled_in
            ):
                yield node.lineno, f"calls {called}(); data is never code"
            for keyword in node.keywords:
                allowed = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in ("allow_pickle", "trust_remote_code") and not allowed:
                    yield node.lineno, f"passes {keyword.arg}; data is never code"


def _terminal_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    """Text of others reaches a terminal escaped, so what writes to it directly must escape."""
    writes = ("print", "typer.echo", "sys.stdout.write", "sys.stderr.write")
    for node in _nodes(tree):
        if not path.startswith(_SHOWN) or not isinstance(node, ast.Call) or _called(node) not in writes:
            continue
        inner = (each for argument in node.args for each in ast.walk(argument) if isinstance(each, ast.Call))
        if node.args and not any(_called(each).startswith("escape_") for each in inner):
            yield node.lineno, f"calls {_called(node)} with text that is not escaped: use infra.escaping.print_escaped"


def _except_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    for node in _nodes(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "a bare except; name what can go wrong"


def _program_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    """Of a module that is run as a program, what follows its call of `main` is not defined yet."""
    for node in tree.body[:-1]:
        if isinstance(node, ast.If) and "__name__" in {
            each.id for each in ast.walk(node.test) if isinstance(each, ast.Name)
        }:
            yield node.lineno, "runs as a program before its end, where the definitions below do not exist yet"


def _assignment_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    for node in _nodes(tree):
        if (
            isinstance(node, ast.Call)
            and _called(node).split(".")[-1] == "Assignment"
            and path not in _BUILDS_ASSIGNMENTS
        ):
            yield node.lineno, "builds an Assignment; only the dispatcher does, for RepartitionTrajectories"


def _clock_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    """The time in a record is of the clock of the machine that wrote it: for display only."""
    if not path.startswith("operators/"):
        return
    for node in _nodes(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE):
            for each in ast.walk(node):
                if isinstance(each, ast.Attribute) and _RECORD_TIMES.fullmatch(each.attr):
                    yield node.lineno, f"compares {_dotted(each)}, of another machine's clock; use offsets or own times"


def _called(node: ast.Call) -> str:
    return _dotted(node.func)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Subscript):
        return _dotted(node.value)
    return node.id if isinstance(node, ast.Name) else ""


def _client_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    """The private names of kafka-python stand in one file, which checks its version."""
    if not path.startswith("infra/kafka/") or path == "infra/kafka/client_patches.py":
        return
    for node in _nodes(tree):
        if (
            isinstance(node, ast.Attribute)
            and re.match("_[^_]", node.attr)
            and _dotted(node.value) not in ("self", "cls")
        ):
            yield node.lineno, f"uses {_dotted(node)}; private names of others belong in infra/kafka/client_patches.py"


def _test_name_law(path: str, tree: ast.Module) -> Iterator[Breach]:
    for node in _nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME:
            yield node.lineno, f"{node.name} has {len(node.name)} characters; at most {MAX_TEST_NAME}"


_OF_LAYERS: tuple[Law, ...] = (
    _import_law, _pipelines_law, _vendor_law, _schemas_law, _transform_law, _topic_law, _terminal_law, _assignment_law,
    _client_law, _clock_law,
)  # fmt: skip
_OF_ALL: tuple[Law, ...] = (_pickle_law, _except_law, _program_law, _test_name_law)
