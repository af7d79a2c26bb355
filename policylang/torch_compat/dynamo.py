"""The private names of torch that tell what Dynamo compiles, and hand errors through it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import fx

# --- the compilation that is running ------------------------------------------------------------------------------


def code_being_compiled() -> int:
    """A number for the piece of code that Dynamo compiles, the same each time it does; -1 outside of a compilation.

    Private because the number of a compilation is in the tracing context alone.
    """
    from torch._guards import CompileContext

    return int(getattr(CompileContext.current_compile_id(), "frame_id", -1))


def code_location() -> str:
    """The piece of code that Dynamo compiles, in words that are the same on every rank: ``forward (model.py:12)``;
    empty outside of a compilation.

    Private because the code is known to the running translator alone.
    """
    translator = _translator()
    if translator is None:
        return ""
    code = translator.f_code
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"


def dynamo_graphs() -> list[fx.Graph]:
    """The graph that Dynamo is handing to its backend and those nested in it; empty outside of that.

    Private because a partitioner is handed the joint graph alone, and torch's caches ask for its key before there is
    one.
    """
    translator = _translator()
    if translator is None:
        return []
    output = translator.output
    nested = [
        part
        for module in output.nn_modules.values()
        if isinstance(module, torch.nn.Module)
        for part in module.modules()
        if isinstance(part, fx.GraphModule)
    ]
    return [output.graph, *(module.graph for module in nested)]


def running_dynamo_inputs() -> list[fx.Node]:
    """The inputs of the graph that Dynamo is having compiled, in order; empty where it is not compiling.

    AOTAutograd tells a partitioner only the position of an input that Dynamo lifted. The tracing context lists every
    tensor that Dynamo has looked at, those that the graph does not take included; what it takes is known to the
    running translator alone.
    """
    translator = _translator()
    return [] if translator is None else list(translator.output.placeholders)


def _translator() -> Any:
    """What translates Python's code to a graph in this thread; None outside of a compilation.

    Dynamo is not imported for that: where nobody has, nothing is being compiled.
    """
    translating = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        return None if translating is None else translating.InstructionTranslator.current_tx()
    except AttributeError:  # none is running in this thread
        return None


def input_source(placeholder: fx.Node) -> tuple[str, bool]:
    """Of an input of a graph from Dynamo: its source expression, and whether it is a ``Parameter``.

    Private because Dynamo hangs the source on the node itself. Empty for an input without one, or that is no tensor.
    """
    source, value = getattr(placeholder, "_dynamo_source", None), input_value(placeholder)
    name = _source_name(source) if source is not None and isinstance(value, torch.Tensor) else ""
    return name, isinstance(value, torch.nn.Parameter)


def input_value(placeholder: fx.Node) -> Any:
    """What Dynamo has traced an input of its graph with. Undocumented: other graphs keep it as ``val``."""
    return placeholder.meta.get("example_value")


def _source_name(source: Any) -> str:
    """A method up to 2.11, a property since."""
    name = source.name
    return str(name() if callable(name) else name)


# --- what was compiled, and with which backend --------------------------------------------------------------------


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether a module was given to ``torch.compile`` or had ``.compile()`` called on it."""
    return is_wrapped_by_compiler(module) or getattr(module, "_compiled_call_impl", None) is not None


def is_wrapped_by_compiler(module: torch.nn.Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` returns, and not itself a part of any model."""
    from torch._dynamo.eval_frame import OptimizedModule

    return bool(isinstance(module, OptimizedModule))


def compiled_in_place(modules: Sequence[torch.nn.Module]) -> tuple[int, ...]:
    """Which of some modules had ``.compile()`` called on them: their positions. Cheap, since every call asks."""
    return tuple([at for at, module in enumerate(modules) if "_compiled_call_impl" in module.__dict__])


def compiler_of(module: torch.nn.Module) -> Any:
    """The backend of ``torch.compile`` that a compiled module was given; None where it cannot be told.

    Private because ``module.compile()`` keeps it in the closure of a function alone.
    """
    function = getattr(module, "_compiled_call_impl", None)
    if function is None:
        return backend_of(module)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=False))
    return backend_behind(cells["callback"].cell_contents) if "callback" in cells else None


def backend_of(compiled: Any) -> Any:
    """The backend that what ``torch.compile(module)`` returned was given; None where it cannot be told.

    Private because the compiled module keeps it behind Dynamo's wrappers only, one attribute each.
    """
    return backend_behind(getattr(getattr(compiled, "dynamo_ctx", None), "callback", None))


def backend_behind(wrapper: Any) -> Any:
    """The backend that Dynamo's wrappers are around."""
    while True:
        inner = getattr(wrapper, "_torchdynamo_orig_backend", None) or getattr(wrapper, "compiler_fn", None)
        if inner is None:
            return wrapper
        wrapper = inner


def was_left_uncompiled(error: BaseException | None) -> bool:
    """Whether ``torch.compile(…, fullgraph=True)`` raised this because it ran as it is, as under a dispatch mode.

    Private because it is a plain RuntimeError: it is told by the frame that raised it.
    """
    raised = getattr(error, "__traceback__", None)
    while raised is not None and raised.tb_next is not None:
        raised = raised.tb_next
    return raised is not None and raised.tb_frame.f_globals.get("__name__") == "torch._dynamo.eval_frame"


def compiles_backwards_anew() -> bool:
    """Whether compiled autograd is on: it takes compiled backwards apart, and compiles what it makes of them."""
    import torch._dynamo.compiled_autograd as compiled_autograd
    import torch._dynamo.config as config

    return bool(config.compiled_autograd or getattr(compiled_autograd, "compiled_autograd_enabled", False))


def recompile_limit() -> int:
    """How often Dynamo compiles one piece of code before it gives up and runs it eagerly."""
    import torch._dynamo.config as config

    return int(config.recompile_limit)


# --- what was not compiled ----------------------------------------------------------------------------------------


class FrameLeft(NamedTuple):
    """A piece of code that Dynamo took up and compiled nothing of: it runs as it is."""

    name: str
    file: str
    line: int
    why: str
    """The first line of what Dynamo says, and where it lies; no more, since the rest is advice about torch."""


def frames_left(since: int = 0) -> list[FrameLeft]:
    """What Dynamo gave up on after a moment (microseconds since the epoch), among the last 64 compilations.

    Private because Dynamo tells nobody but its logs, and keeps these records for them. A frame is known by its number:
    where a limit on recompilations was reached, the record does not say what it was of.
    """
    if "torch._dynamo" not in sys.modules:
        return []
    from torch._dynamo import exc
    from torch._dynamo.utils import get_compilation_metrics

    places: dict[str, tuple[str, str, int]] = {}
    found: dict[str, FrameLeft] = {}
    for record in get_compilation_metrics():
        frame = str(record.compile_id).partition("/")[0]
        if record.co_name is not None:
            places[frame] = record.co_name, record.co_filename, record.co_firstlineno
            found.pop(frame, None)
        if record.fail_type is None or record.is_forward is False or frame not in places:
            continue
        kind = getattr(exc, record.fail_type, Exception)  # other errors are raised, unless the program has said so
        if not (issubclass(kind, exc.Unsupported | exc.UserError | exc.SkipFrame) or record.config_suppress_errors):
            continue
        if (record.start_time_us or 0) >= since:
            why = _why(record.fail_reason or record.fail_type)
            file, line = record.fail_user_frame_filename, record.fail_user_frame_lineno
            found[frame] = FrameLeft(*places[frame], f"{why} ({os.path.basename(file)}:{line})" if file else why)
    return list(found.values())


def _why(said: str) -> str:
    """The first line of Dynamo's message; where it only says that a graph break was delayed, the reason for the break.

    From torch 2.15 on, a recurrent module breaks the graph only where it is called.
    """
    first, _, rest = said.partition("\n")
    reason = re.search(r"\bReason: (.+?)(?:\. |\.?$)", rest, re.MULTILINE) if "(delayed)" in first else None
    return reason[1] if reason else first.strip()


# --- errors -------------------------------------------------------------------------------------------------------


def through_dynamo(error: Exception, frame: FrameType | None) -> Exception:
    """The same error, such that ``torch.compile`` hands it to the user as it is.

    Dynamo wraps what a backend raises in ``BackendCompilerFailed``, whose type no ``except PolicyError`` catches;
    exceptions that are also a ``ShortenTraceback`` pass, and lose the frames before ``frame``.
    """
    kind: Any = type(error)  # exception classes are hashable, whatever their stubs say
    return _passing(kind)(error, frame)


@cache
def _passing(kind: Any) -> Any:
    from torch._dynamo.exc import ShortenTraceback

    def __init__(self: Any, error: Exception, frame: FrameType | None) -> None:
        ShortenTraceback.__init__(self, *error.args, first_useful_frame=frame)
        vars(self).update(vars(error))
        self._said = str(error)

    def __str__(self: Any) -> str:  # Dynamo appends to the arguments how to see its own stack
        return str(self._said)

    names = {
        "__init__": __init__,
        "__str__": __str__,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    return type(kind.__name__, (_original_on_pickling(kind), kind, ShortenTraceback), names)


def _original_on_pickling(kind: type[Exception]) -> type[Any]:
    """A mixin: the class made for Dynamo cannot be imported, so its instances are pickled as what they stand for."""

    class Travelling:
        def __reduce__(self) -> Any:
            reduced = kind.__reduce__(self)
            return (kind, *reduced[1:])

    return Travelling
