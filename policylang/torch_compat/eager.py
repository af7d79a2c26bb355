"""The private names of torch that running a model in eager needs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import ref

import torch
from torch import fx
from torch.utils import _python_dispatch, weak
from torch.utils._pytree import tree_leaves

from policylang.torch_compat.tracing import checkpoint_generator, take_apart

WeakTensorKeyDictionary: type[Any] = weak.WeakTensorKeyDictionary
"""By tensor, as an object. A plain weak reference dies with the Python object of a tensor that C++ keeps."""

_notes = vars(_python_dispatch)
_NAMES = tuple(name for name in _notes if name.startswith("_is_in_"))


class DispatchMode(_python_dispatch.TorchDispatchMode):  # type: ignore[misc]  # torch does not say what it is
    """Sees every operator below autograd. Torch documents it, under a private path.

    Torch notes for the whole process, and not by thread, whether a mode is active. Modes that overlap in several
    threads would leave the note behind, and compiled code would be compiled anew at each call.
    """

    _lock: ClassVar = threading.RLock()
    _active: ClassVar = 0

    def __enter__(self) -> Any:
        with self._lock:
            DispatchMode._active += 1
            return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            super().__exit__(*error)
            DispatchMode._active -= 1
            if any(map(_notes.get, _NAMES)) and not self._active and not torch._C._len_torch_dispatch_stack():
                _notes.update(dict.fromkeys(_NAMES, False))
                _notes.get("set_is_in_mode_without_ignore_compile_internals", bool)(False)  # not in every torch


def ignored_operators() -> frozenset[Any]:
    """Operators that torch's selective checkpoint does not count: autograd asks for them as often as it likes."""
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    return frozenset(SAC_IGNORED_OPS)


def graph_being_traced() -> fx.Graph | None:
    """The graph that ``make_fx`` is writing at the moment; None outside of a trace."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return getattr(getattr(get_proxy_mode(), "tracer", None), "graph", None)


def detached(value: Any) -> Any:
    """A tensor of the same memory and version counter without a history. Below autograd, where dispatch modes run, a
    plain ``detach`` starts a new version counter."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def watching_results(watch: Callable[[torch.Tensor], None]) -> AbstractContextManager[object]:
    """A context in which ``watch`` sees each tensor that an operator returns, in compiled code too; of a result that is
    still awaited the tensor inside. Inductor's kernels are no operators: under that inner compiler only what it leaves
    to aten is seen."""

    class Watching(DispatchMode):
        @classmethod
        def ignore_compile_internals(cls) -> bool:  # else compiled code would run uncompiled under the mode
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for leaf in take_apart([each for each in tree_leaves(result) if isinstance(each, torch.Tensor)])[0]:
                watch(leaf)
            return result

    return Watching()


active_modes: Callable[[], list[Any]] = _python_dispatch._get_current_dispatch_mode_stack
"""The dispatch modes that see what runs here. Autograd carries them into the threads of a backward."""


def is_wrapper_class(kind: type) -> bool:
    """True if tensors of a class are made of tensors and list them, as DTensor does. For a tensor, torch is asked."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def storage_address(tensor: torch.Tensor) -> int | None:
    """The address of a plain tensor's memory, the same after FSDP has freed and refilled it; None without any."""
    storage = _storage(tensor)
    return None if storage is None else int(storage._cdata)


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """It stands for zeros, as forward derivatives do, and has a size but no memory: a copy from it ends the process."""
    return bool(torch._is_zerotensor(tensor))


def strided_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that hold a tensor's data: itself, or the indices and values of a sparse one. The public
    ``indices()`` and ``values()`` are refused where a sparse tensor may name an element twice."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def held_bytes(held: Iterable[torch.Tensor], outside: Iterable[torch.Tensor] = ()) -> int:
    """The bytes of the distinct storages of some plain tensors, without those of ``outside``."""

    def places(tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        parts = (part for tensor in tensors for part in strided_parts(tensor))
        return {id(part) if (address := storage_address(part)) is None else address: part for part in parts}

    known = places(outside)
    return sum(storage_bytes(part) for place, part in places(held).items() if place not in known)


def storage_is_freed(tensor: torch.Tensor) -> bool:
    """True if the memory of a plain tensor has been freed under it, as FSDP does with gathered weights."""
    storage = _storage(tensor)
    return storage is not None and tensor.numel() > 0 and storage.nbytes() == 0


def storage_bytes(tensor: torch.Tensor) -> int:
    """The size of a plain tensor's storage; 0 without any."""
    storage = _storage(tensor)
    return 0 if storage is None else int(storage.nbytes())


def storage_users(tensor: torch.Tensor) -> int:
    """The number of tensors on a plain tensor's storage; 0 where that is not known. CUDA graph trees ask the same."""
    storage = _storage(tensor)
    return 0 if storage is None else int(torch._C._storage_Use_Count(storage._cdata)) - 1


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage() if tensor.layout is torch.strided else None
    except NotImplementedError:  # a tensor made of tensors
        return None


def version(tensor: torch.Tensor) -> int:
    """The version counter of a tensor: the number of writes to its memory; 0 of one that is made in inference mode, for
    which torch counts none."""
    return 0 if tensor.is_inference() else tensor._version


_OF_FUNCTIONS = {f"torch._higher_order_ops.{name}": f"torch.{name}" for name in ("cond", "map", "scan")}


def failed_in(error: BaseException) -> str:
    """The operator that takes functions, and traces them for its backward, in which an error was raised. Torch compiles
    what they are called with, which it leaves out where a dispatch mode watches."""
    step, found = error.__traceback__, ""
    while step is not None:
        found = _OF_FUNCTIONS.get(step.tb_frame.f_globals.get("__name__", ""), found)
        step = step.tb_next
    return found


def allows_no_hooks(error: BaseException) -> bool:
    """``torch.func`` has raised this, as it found the hooks of a checkpoint: a plain RuntimeError, from C++."""
    said = str(error)
    return isinstance(error, RuntimeError) and said.startswith("torch.func") and "saved tensor hooks" in said


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Has tensors count as written to so often: autograd counts a write even if a dispatch mode skips the operator."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


@cache
def counts_writes(operator: Any) -> bool:
    """An operator counts its writes before a dispatch mode sees it, in its kernel for the key ``ADInplaceOrView``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "ADInplaceOrView")


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""True if the running backward has ``retain_graph``: what it used may be needed once more."""
running_backward: Callable[[], int] = torch._C._current_graph_task_id
"""A number for the backward that is running, which no other has; -1 outside of any."""


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that an operator on a device draws from if it is given none; None for a device without one."""
    if device.type == "cpu":
        return torch.default_generator
    generators = getattr(torch.get_device_module(device), "default_generators", None)
    if not generators:
        return None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return generators[index]


def empty_host_cache() -> None:
    """Gives pinned memory that nobody uses back to the system. torch 2.11 has it under a private name."""
    if torch.accelerator.is_available():
        empty = getattr(torch.accelerator, "empty_host_cache", None)
        (empty or torch._C._host_emptyCache)()


clear_cast_weights: Callable[[], None] = torch.clear_autocast_cache
"""Forgets the weights that autocast has cast and kept: which casts are repeated depends on what ran before."""


def transformed() -> bool:
    """True if the model runs inside ``vmap`` or another transformation of ``torch.func``."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def differentiated_by_transform() -> bool:
    """True if one of the active transformations is a reverse-mode derivative: ``grad``, ``vjp``, ``jacrev``."""
    grad = torch._C._functorch.TransformType.Grad
    return any(each.key() == grad for each in torch._C._functorch.get_interpreter_stack() or ())


def forward_derivatives() -> bool:
    """True if operators may be asked for forward-mode derivatives at the moment (``forward_ad.dual_level``)."""
    return torch.autograd.forward_ad._current_level >= 0


def being_compiled() -> bool:
    """True if ``torch.compile``, or a trace of ours, runs the model at the moment, in any of its passes."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def checkpoints_are_tagged() -> bool:
    """True if checkpoints recompute nothing at the moment: ``trace_step`` only tags what they hold."""
    import torch.utils.checkpoint as library

    return bool(getattr(library, checkpoint_generator()).__module__ != library.__name__)


def compiled_around() -> tuple[Any, str]:
    """The operator that Dynamo makes of a checkpoint that it finds in what it compiles, and the key of the metadata of
    its first argument, a graph, under which it keeps the checkpoint's ``context_fn``."""
    return torch.ops.higher_order.tag_activation_checkpoint, "_checkpoint_context_fn"


def runs_in_graph(context: object) -> bool:
    """True if the operator of :func:`compiled_around` runs, and no trace, as it enters the first of its contexts. From
    torch 2.12 it sets an attribute on that; and it preserves the metadata of nodes, which else only traces do."""
    from torch.fx.traceback import has_preserved_node_meta

    if hasattr(context, "ac_graph_id"):
        return True
    return bool(has_preserved_node_meta()) and graph_being_traced() is None and not being_compiled()


def saved_tensor_hooks() -> Any:
    """The pair that autograd gives what it saves to; None outside of all such hooks. The public API only sets pairs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_of_written_tensor(error: RuntimeError) -> bool:
    """True if autograd gives a saved tensor back no more, because it was written to: it has no class for that."""
    return "has been modified by an inplace operation" in str(error)


def hooks_around(own: Any) -> Any:
    """The pair around the innermost, which is ``own``."""
    remove_saved_tensor_hooks()
    try:
        return saved_tensor_hooks()
    finally:
        restore_saved_tensor_hooks(own)


def are_of_checkpoint(pair: Any) -> bool:
    """True if a pair is that of a checkpoint of torch's (``use_reentrant=False``), in its forward or recomputation."""
    return pair is not None and getattr(pair[0], "__module__", "") == "torch.utils.checkpoint"


def runs_to_the_end(pair: Any) -> Callable[[], None]:
    """A function after which the checkpoint that a pair is of, while it lives, does not stop its recomputation with the
    last tensor that autograd saves. torch takes that setting only before the checkpoint begins."""
    checkpoint = ref(_variable(pair[0], "frame"))

    def tell() -> None:
        frame = checkpoint()
        if frame is not None:
            frame.early_stop = False

    return tell


def move_inputs(pair: Any, moved: Callable[[Any], Any], back: Callable[[Any], Any]) -> None:
    """Have the checkpoint that a pair is of hold ``moved`` of its arguments, and recompute with ``back`` of that. Those
    that are given back as they are stay as the checkpoint holds them."""
    frame = _variable(pair[0], "frame")
    recompute = frame.recompute_fn
    if hasattr(frame, "input_saver"):  # torch 2.11: they are saved tensors of a node, with the keywords before them
        node = frame.input_saver.grad_fn
        given = node.get_args(node.saved_tensors)
        held = [moved(each) for each in given]
        if any(now is not before for now, before in zip(held, given, strict=True)):
            frame.input_saver = SimpleNamespace(grad_fn=SimpleNamespace(saved_tensors=(), get_args=lambda _: held))
            frame.recompute_fn = lambda *args: recompute(*map(back, args))
        return
    keywords, inputs = _variable(recompute, "kwargs"), frame.get_inputs()
    held = [moved(each) for each in inputs]
    instead = {name: now for name, value in keywords.items() if (now := moved(value)) is not value}
    pairs = zip(frame.saved_args, inputs, held, strict=True)
    frame.saved_args = [saved if now is before else now for saved, before, now in pairs]
    keywords.update(instead)

    def run(*args: Any) -> None:
        keywords.update({name: back(value) for name, value in instead.items()})
        try:
            recompute(*map(back, args))
        finally:
            keywords.update(instead)

    frame.recompute_fn = run


def _variable(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def made_by_reentrant_checkpoint(value: torch.Tensor) -> bool:
    """True if a checkpoint with ``use_reentrant=True`` has returned a tensor."""
    return type(value.grad_fn).__name__ == "CheckpointFunctionBackward"


remove_saved_tensor_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""Removes the innermost pair; :func:`restore_saved_tensor_hooks` restores it."""


def restore_saved_tensor_hooks(pair: Any) -> None:
    torch._C._autograd._push_saved_tensors_default_hooks(*pair)
