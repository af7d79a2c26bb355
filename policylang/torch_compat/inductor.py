"""The private names of torch that compiling through Inductor and AOTAutograd stands on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch.fx as fx


def compile_with_inductor(graph: fx.GraphModule, inputs: Sequence[Any], settings: Mapping[str, Any]) -> Any:
    """Inductor's entry for a graph of Dynamo's. ``settings`` also hold when the backward is compiled, later.

    Private because ``torch.compile`` offers no way to call Inductor with a partitioner of one's own; a configuration
    patched around the call would have expired by the first backward.
    """
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, config_patches=dict(settings))


def compile_with_aot_eager(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., Any],
    as_called: Callable[[fx.GraphModule, Callable[..., Any], bool], Callable[..., Any]],
) -> Any:
    """AOTAutograd with a partitioner and no compiler behind it: torch's ``aot_eager`` backend fixes the partitioner.

    ``as_called``: from a half, what calls it with a list, and whether it is the backward, to what is called instead.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def half(gm: fx.GraphModule, half_inputs: Sequence[Any], *, is_backward: bool) -> Any:
        run = boxed_nop(gm, half_inputs)
        return as_called(gm, run, is_backward) if isinstance(run, FunctionType) else run  # what a cache keeps stays

    compiler = aot_autograd(
        fw_compiler=partial(half, is_backward=False),
        bw_compiler=partial(half, is_backward=True),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compiler(graph, inputs)


def partitioner_base() -> type[Any]:
    """Inductor takes a partitioner only as an instance of this class, whose ``uuid`` its caches ask for."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    return CustomPartitionerFn


def graph_pass_base() -> type[Any]:
    """Inductor's caches take a custom pass only as an instance of this class, whose ``uuid`` they ask for."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    return CustomGraphPass


def hooks_that_hold(custom_pass: object) -> tuple[str, ...]:
    """The settings of Inductor, by name, under which a pass is registered at present, alone or in a list.

    Read at the call: what ``torch.compile(options=…)`` sets holds only while a graph is compiled.
    """
    import torch._inductor.config as config

    return tuple(name for name in _PASS_SETTINGS if _holds(getattr(config, name, None), custom_pass))


_PASS_SETTINGS = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "pre_grad_custom_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
)


def _holds(setting: Any, custom_pass: object) -> bool:
    return any(each is custom_pass for each in (setting if isinstance(setting, (list, tuple)) else (setting,)))


def inductor_settings() -> dict[str, Any]:
    """Every setting of Inductor with its present value."""
    import torch._inductor.config as config

    return config.get_config_copy()


def settings_lines(module: str, settings: Mapping[str, Any]) -> list[str]:
    """Settings as text that is the same in every process; of what has no such text, what kind of thing it is."""
    plain = (bool, int, float, str, list, tuple, type(None))
    return [
        f"{module}.{name} = {value!r}" if isinstance(value, plain) and " at 0x" not in repr(value)
        else f"{module}.{name} = {getattr(value, '__qualname__', type(value).__qualname__)}"
        for name, value in sorted(settings.items())
    ]  # fmt: skip


def inductor_mode(mode: str) -> dict[str, Any]:
    """The settings that ``torch.compile(mode=...)`` stands for. Raises ``RuntimeError`` for a mode it does not know."""
    from torch._inductor import list_mode_options

    return list_mode_options(mode)


def inductor_cache_folder() -> str:
    """Where Inductor keeps its caches (``TORCHINDUCTOR_CACHE_DIR``), created on the way."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return str(cache_dir())


def cache_hits() -> int:
    """How often AOTAutograd took a compiled graph from its cache: then no partitioner was called."""
    from torch._dynamo.utils import counters

    return int(counters["aot_autograd"]["autograd_cache_hit"])
