"""Models without memory for their weights, which are read later, by each rank the part that it holds.

A model is built with its parameters on the meta device; its buffers (such as rotary frequencies) are computed as usual.
Whoever uses it shards it if there are several ranks, then calls `allocate` and `read_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from infra.json_text import decode_json
from infra.models.checkpoint_folder import require_config, require_weights
from infra.models.checkpoint_names import checkpoint_tensors
from infra.models.config_files import is_without_weights
from infra.models.local_part import local_part
from infra.models.stored_tensors import StoredTensors, model_tensors
from infra.models.weights import distinct_tensors


def empty_model(folder: Path) -> PreTrainedModel:
    """The causal language model of folder `folder`, float32, in evaluation mode, with parameters on the meta device.

    The folder may be without weights on purpose, see `is_without_weights`.
    Raises FileNotFoundError naming the missing file, ValueError if the config is not one of a causal language model.
    """
    (require_config if is_without_weights(folder) else require_weights)(folder)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with _parameters_on_meta():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if (folder / GENERATION_CONFIG_NAME).is_file():
            model.generation_config = _generation_config(folder)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # of the file system, which may work again
        raise ValueError(f"the model in {folder} cannot be loaded as a causal language model: {error}") from error
    return model.eval()


def _generation_config(folder: Path) -> GenerationConfig:
    """The settings in `folder` with which engines generate and end a response; only its tokens if transformers would
    not save the others, as some published folders have them."""
    try:
        found = GenerationConfig.from_pretrained(folder, local_files_only=True)
        found.validate(strict=True)
    except ValueError:
        table = decode_json((folder / GENERATION_CONFIG_NAME).read_bytes())
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return GenerationConfig(**{name: table.get(name) for name in names if isinstance(table, dict)})
    return found


def allocate(module: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
    """Allocate memory of `dtype` on `device` for the parameters of `module` that have none, and move its buffers there.

    Tied parameters stay tied. Values are not initialised.
    """
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                if id(parameter) not in made:
                    memory = torch.empty_like(parameter, device=device, dtype=dtype)
                    made[id(parameter)] = nn.Parameter(memory, requires_grad=parameter.requires_grad)
                setattr(each, name, made[id(parameter)])
        for name, buffer in each.named_buffers(recurse=False):
            each._buffers[name] = buffer.to(device)


def draw_weights(model: PreTrainedModel) -> None:
    """Fill the parameters of `model` with values, the same each time, of a size with which it computes finite logits.

    For an engine that has no weights until it loads its first version.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        if parameter.device not in generators:
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(0)
        with torch.no_grad():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=generators[parameter.device])
            else:
                parameter.fill_(1.0)


def read_weights(
    model: PreTrainedModel, folder: Path, plain_name: Callable[[str], str | None] = lambda name: name
) -> None:
    """Read this rank's part of each tensor of `model` from the weight files of `folder`; meta tensors are left out.

    `plain_name` is the name of a tensor in the model that was saved, None if that has no such tensor.

    Raises FileNotFoundError, ValueError naming tensors that the files lack or have in another shape.
    """
    with model_tensors(folder) as stored:
        problems: list[str] = []
        saved = [
            (plain, tensor)
            for names, tensor in distinct_tensors(model)
            if not tensor.is_meta and (plain := [name for name in map(plain_name, names) if name is not None])
        ]
        found = [
            (name, view, tensor)
            for names, tensor in saved
            for name, view in _places(model, names, tensor, stored, problems)
        ]
        _reject_misfits(problems, f"in {folder}")
        _reject_untied_output(model, saved, folder, stored)
        for name, view, tensor in found:
            _read_piece(stored, name, view, tensor)


def read_tensor(model: PreTrainedModel, names: list[str], tensor: Tensor, stored: StoredTensors) -> Tensor:
    """The whole `tensor` of `model`, which may be on the meta device and is called `names` in the files of `stored`.

    Raises ValueError if the files lack it or have it in another shape.
    """
    whole, problems = torch.empty(tensor.shape, dtype=tensor.dtype), list[str]()
    pieces = list(_places(model, names, whole, stored, problems))
    _reject_misfits(problems, "of the model")
    for name, view in pieces:
        _read_piece(stored, name, view, whole)
    return whole


def _read_piece(stored: StoredTensors, name: str, view: Tensor, tensor: Tensor) -> None:
    """Read what this rank holds of the stored tensor `name`, which is the `view` of `tensor`."""
    first, part = int(view.storage_offset()), local_part(tensor)
    begin, end = max(first, part.begin), min(first + view.numel(), part.end)
    if begin < end:
        stored.read(name, begin - first, part.elements[begin - part.begin : end - part.begin])


def _reject_misfits(problems: list[str], where: str) -> None:
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"the weights {where} do not fit their config.json: {'; '.join(problems[:5])}{more}. Save the "
            "model again with transformers' save_pretrained"
        )


def _places(
    model: PreTrainedModel, names: list[str], tensor: Tensor, stored: StoredTensors, problems: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors that make up `tensor`, each with its view of a tensor of this shape on the meta device."""
    for aliases, known, view in _stored_names(model, names, tensor, stored):
        if not known:
            problems.append(f"{aliases[0]} is missing")
        elif stored.shapes[known[0]] != tuple(view.shape):
            problems.append(f"{known[0]} has shape {list(stored.shapes[known[0]])}, the model {list(view.shape)}")
        else:
            yield known[0], view


def _stored_names(
    model: PreTrainedModel, names: list[str], tensor: Tensor, stored: StoredTensors
) -> Iterator[tuple[list[str], list[str], Tensor]]:
    """The pieces in a checkpoint of `tensor`, called `names`: the names of each, those that `stored` has, and its view
    of a tensor of this shape on the meta device."""
    kind, prefix = getattr(model.config, "model_type", ""), f"{model.base_model_prefix}."
    for aliases, view in checkpoint_tensors(kind, names, torch.empty(tensor.shape, device="meta")):
        possible = dict.fromkeys(each for alias in aliases for each in (alias, alias.removeprefix(prefix)))
        yield aliases, [name for name in possible if name in stored.shapes], view


def _reject_untied_output(
    model: PreTrainedModel, tensors: Iterable[tuple[list[str], Tensor]], folder: Path, stored: StoredTensors
) -> None:
    """Raise ValueError if the config ties the output weights to the embedding but the file has other output weights."""
    for names, tensor in tensors:
        known = (
            [] if len(names) == 1 else [name for _, of, _ in _stored_names(model, names, tensor, stored) for name in of]
        )
        part = local_part(tensor) if len(known) > 1 else None
        if part is None:
            continue
        for piece in part.elements.split(1 << 22):
            one, other = torch.empty_like(piece, device="cpu"), torch.empty_like(piece, device="cpu")
            begin = part.begin + piece.storage_offset() - part.elements.storage_offset()
            for name, into in ((known[0], one), (known[1], other)):
                stored.read(name, begin, into)
            if not torch.equal(one, other):
                raise ValueError(
                    f"the model in {folder} has separate output weights, but its config.json ties them to the "
                    "embedding: set tie_word_embeddings to false there, or remove the output weights from the file"
                )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """In this context every module registers its parameters on the meta device; buffers keep their values."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
