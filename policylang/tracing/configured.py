"""A training step from a configuration of Transformers: built on ``meta``, sharded over ranks that are not there.

Weights are sharded as FSDP2 does it, by their first dimension, cast and gathered at each use, and before that by the
model's own plan for tensor parallelism. Gathers are operators of the traced graph (SimpleFSDP, arXiv 2411.00284), so
that they are planned and priced.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from policylang.torch_compat.distributed import pretended_ranks
from policylang.tracing.step import problem

CONFIGURATION, MODEL, SIZES, NO_TRANSFORMERS = "APL650", "APL651", "APL652", "APL653"
DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
_OWN_STEP = "name a function that returns `model, loss_fn, *batch` instead: `package.module:function`"


@frozen
class StepSizes:
    """The sizes at which a step is traced."""

    batch: int = 1
    """Sequences or images of one rank."""
    sequence: int | None = None
    mesh: Mapping[str, int] = field(factory=dict)
    """``fsdp`` and ``tp``: ranks that share the weights, and ranks that share each product."""
    weights: str = "float32"
    """The dtype in which weights, gradients and the optimizer's state are kept."""
    dtype: str = "bfloat16"
    """The dtype that is computed in."""

    @property
    def ranks(self) -> int:
        return prod(self.mesh.values())


@frozen(eq=False)
class Parts:
    """The arguments of ``policylang.trace_step``."""

    model: nn.Module
    loss_fn: Callable[..., Tensor]
    batch: tuple[Any, ...]


def read_configuration(name: str) -> Any:
    """The configuration of a file, a folder with a ``config.json``, or a model of the hub. Raises PolicyGraphError."""
    if find_spec("transformers") is None:
        raise problem(NO_TRANSFORMERS, "`transformers` is not installed here", help="pip install transformers")
    import transformers

    transformers.logging.set_verbosity_error()  # it tells of generation, which no training step does
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # of each attempt where there is no network
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        name = str(path)
    if not path.is_file():
        if path.suffix == ".json" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            raise problem(CONFIGURATION, f"there is no file `{name}`", help="name the `config.json` of a model")
        try:
            return transformers.AutoConfig.from_pretrained(name)
        except Exception as error:  # of the network, of the hub, or of the file there
            why = str(error).strip().partition("\n")[0]
            help = "without a network, name its `config.json` as a file"
            message = f"there is no file `{name}`, and no such model can be had from the hub"
            raise problem(CONFIGURATION, message, help=help, details=[why[:200]]) from error
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        kind = settings["model_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"`{name}` is no configuration of Transformers: it is no JSON object with a `model_type`"
        raise problem(CONFIGURATION, message, help="name the `config.json` of a model") from error
    if kind not in transformers.CONFIG_MAPPING:
        message = f"Transformers {transformers.__version__} has no model type `{kind}`"
        raise problem(CONFIGURATION, message, help=f"install a version that has it, or {_OWN_STEP}")
    try:
        return transformers.CONFIG_MAPPING[kind].from_dict(settings)
    except Exception as error:  # a validator's, of any class
        message = f"Transformers does not take `{name}`: {' '.join(str(error).split())[:200]}"
        raise problem(CONFIGURATION, message, help="mend that setting") from error


def built(config: Any, sizes: StepSizes) -> Parts:
    """A model in training on ``meta`` and a batch, neither of them sharded. Raises PolicyGraphError."""
    import transformers

    def takes(kind: str) -> bool:
        return type(config) in getattr(transformers, f"MODEL_FOR_{kind}_MAPPING")

    images = False
    if getattr(config, "is_encoder_decoder", False) and takes("SEQ_TO_SEQ_CAUSAL_LM"):
        auto = "AutoModelForSeq2SeqLM"
    elif takes("MASKED_LM") and not getattr(config, "is_decoder", False):
        auto = "AutoModelForMaskedLM"
    elif takes("CAUSAL_LM"):
        auto = "AutoModelForCausalLM"
    elif images := takes("IMAGE_CLASSIFICATION"):
        auto = "AutoModelForImageClassification"
    else:
        message = f"no loss is known of a model of type `{config.model_type}`: it is for neither text nor images"
        raise problem(MODEL, message, help=_OWN_STEP)
    if auto == "AutoModelForSeq2SeqLM" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id or 0
    longest = None if images else _longest(config)
    if images != (sizes.sequence is None):
        help = "leave it out: the size of an image is in the configuration" if images else "give one: `--seq 4096`"
        said = "a sequence length is given" if images else "no sequence length is given"
        trained_on = "images" if images else "text"
        raise problem(SIZES, f"{said}, and a `{config.model_type}` is trained on {trained_on}", help)
    if longest is not None and sizes.sequence is not None and sizes.sequence > longest:
        message = f"a sequence of {sizes.sequence:,} is longer than the {longest:,} positions of the model"
        raise problem(SIZES, message, help="give a shorter one, or raise it in the configuration")
    if sizes.batch < 1 or (sizes.sequence is not None and sizes.sequence < 2):
        raise problem(SIZES, "a batch has at least one sample, and a sequence at least two tokens")
    own = sizes.weights if sizes.ranks > 1 or sizes.weights == sizes.dtype else "float32"
    try:
        with torch.device("meta"):
            model = getattr(transformers, auto).from_config(config, dtype=DTYPES[own]).train()
            inputs = _images(config, sizes, own) if images else None
        inputs = inputs or _tokens(sizes)  # with values, which a model in eager may ask for
    except Exception as error:
        message = f"Transformers cannot build a model of type `{config.model_type}`: {_first(error)}"
        raise problem(MODEL, message, help=f"mend the configuration, or {_OWN_STEP}") from error

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**inputs).loss
        return found

    return Parts(model, loss, (inputs,))


def _longest(config: Any) -> int | None:
    """The positions of a text model; None where any number can be had, as of relative ones."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _tokens(sizes: StepSizes) -> dict[str, Tensor]:
    ids = torch.zeros(sizes.batch, sizes.sequence or 0, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _images(config: Any, sizes: StepSizes, dtype: str) -> dict[str, Tensor]:
    side = getattr(config, "image_size", None) or 224
    sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
    pixels = torch.zeros(sizes.batch, getattr(config, "num_channels", 3), *sides, dtype=DTYPES[dtype])
    return {"pixel_values": pixels, "labels": torch.zeros(sizes.batch, dtype=torch.long)}


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:200]


# --- sharding -------------------------------------------------------------------------------------------------------


@contextmanager
def sharded(parts: Parts, sizes: StepSizes, device: str) -> Iterator[Parts]:
    """A step whose model is sharded, in place, for as long as its ranks are pretended; without other ranks in autocast
    where it computes in another dtype than that of its weights. Raises PolicyGraphError."""
    if sizes.ranks == 1:
        context = partial(torch.autocast, device, DTYPES[sizes.dtype]) if sizes.weights != sizes.dtype else nullcontext

        def loss(*given: Any) -> Tensor:
            with context():
                return parts.loss_fn(*given)

        yield Parts(parts.model, loss, parts.batch)
        return
    if torch.distributed.is_initialized():
        raise problem(SIZES, "this process is a rank already, and others cannot be pretended", help="run it alone")
    with pretended_ranks(sizes.ranks):
        fsdp, tp = sizes.mesh.get("fsdp", 1), sizes.mesh.get("tp", 1)
        # DTensor cuts in the order of the dimensions: a weight for tensor parallelism, and each piece of it for FSDP
        ranks = torch.arange(sizes.ranks).view(fsdp, tp).T.contiguous()
        mesh = DeviceMesh("cpu" if device == "cpu" else "meta", ranks, mesh_dim_names=("tp", "fsdp"))
        if tp > 1:
            _parallel(parts.model, mesh["tp"], tp)
        for module, gathers in _cut(parts.model, mesh, DTYPES[sizes.dtype]).items():
            _gather_on_use(module, gathers)
        cast = partial(_cast, DTYPES[sizes.dtype])
        yield Parts(parts.model, parts.loss_fn, torch.utils._pytree.tree_map(cast, parts.batch))


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """Casts the inputs of a model as FSDP2 does."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _parallel(model: nn.Module, mesh: DeviceMesh, size: int) -> None:
    """Cut products by the model's own plan. Raises PolicyGraphError."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        message = f"`{type(model).__name__}` has no plan for tensor parallelism"
        raise problem(SIZES, message, help="shard it by `fsdp` alone, or set its `tp_plan`")
    config = model.config.get_text_config()
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            said = f"{size} ranks of tensor parallelism do not divide `{name}`, {heads}"
            raise problem(SIZES, said, help="give fewer")
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    wanted: dict[str, str] = {}
    first: dict[nn.Parameter, str] = {}
    tied: dict[str, str] = {}
    for path, module in model.named_modules():  # a module's parameters are cut before its forward is replaced
        style = plan.get(_any_layer(path))
        for name, parameter in module.named_parameters(path, recurse=False):
            if (known := first.setdefault(parameter, name)) != name:
                tied[name] = known
            elif own := plan.get(_any_layer(name), style):
                wanted[name] = own
        if style:
            wanted[path] = style
    try:
        apply_tensor_parallelism(model, mesh, wanted)
        for name, known in tied.items():
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, model.get_parameter(known))
    except Exception as error:
        message = f"the model's plan for tensor parallelism cannot be followed: {_first(error)}"
        raise problem(SIZES, message, help="shard it by `fsdp` alone") from error


def _any_layer(path: str) -> str:
    return re.sub(r"\b\d+\b", "*", path)


def _cut(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype) -> dict[nn.Module, dict[str, Callable[..., Tensor]]]:
    """Put this rank's part in the place of each parameter, once where several modules share one."""
    made: dict[int, tuple[nn.Parameter, Callable[..., Tensor]]] = {}
    found: dict[nn.Module, dict[str, Callable[..., Tensor]]] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                data, wanted = parameter.detach(), None
                if isinstance(data, DTensor):
                    (wanted,), data = data.placements, data.to_local()
                there = [wanted or Replicate(), Replicate()]
                kept = (
                    [wanted or Replicate(), Shard(_cut_along(data.shape, mesh.size(1), wanted))]
                    if data.dim()
                    else there
                )
                whole = DTensor.from_local(data, mesh, there, run_check=False)
                try:
                    part = whole.redistribute(placements=kept)
                except ValueError as error:  # torch 2.11 cuts no weight again that is cut in several places
                    message = f"this torch cannot cut `{name}` over both dimensions of the mesh: {_first(error)}"
                    raise problem(SIZES, message, help="shard it by `fsdp` alone") from error
                own = nn.Parameter(part, requires_grad=parameter.requires_grad)
                made[id(own)] = made[id(parameter)] = own, partial(_gathered, part, wanted, dtype)
            own, gather = made[id(parameter)]
            module._parameters[name] = own
            found.setdefault(module, {})[name] = gather
    return found


def _cut_along(shape: Sequence[int], ranks: int, wanted: Placement | None) -> int:
    """The first dimension, as FSDP2 does; another one where some ranks would get nothing, as of a layer's experts, and
    where tensor parallelism takes parts of it from several places, as of two weights in one."""
    taken = None if wanted is None or type(wanted) in (Shard, Replicate) else getattr(wanted, "dim", None)
    even = (dim for dim, size in enumerate(shape) if size % ranks == 0 and dim != taken)
    return 0 if shape[0] >= ranks and taken != 0 else next(even, 0)


def _gathered(part: DTensor, wanted: Placement | None, dtype: torch.dtype, own: Tensor) -> Tensor:
    """The parameter in the form a module computes with: a DTensor over ``tp`` where it is tensor-parallel, else a plain
    tensor. A style of the plan that computes with plain tensors, as that of experts, puts this rank's piece in the
    place of the DTensor while the module runs."""
    mesh, like = part.device_mesh, {"shape": part.shape, "stride": part.stride()}
    is_plain = not isinstance(own, DTensor)
    each = DTensor.from_local(own, mesh, part.placements, run_check=False, **like) if is_plain else own
    whole = each.to(dtype).redistribute(placements=[wanted or Replicate(), Replicate()])
    local = whole.to_local(grad_placements=[wanted or Replicate(), Partial("avg")])
    return local if wanted is None or is_plain else DTensor.from_local(local, mesh["tp"], [wanted], run_check=False)


def _gather_on_use(module: nn.Module, gathers: Mapping[str, Callable[..., Tensor]]) -> None:
    def read(name: str, self: nn.Module) -> Any:
        return gathers[name](self._parameters[name])

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {name: property(partial(read, name)) for name in gathers})
