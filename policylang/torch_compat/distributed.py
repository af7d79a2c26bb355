"""The private names of torch.distributed: process groups, meshes, stores and FSDP2."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import nn

from policylang.torch_compat.graphs import outside_of_modes, require
from policylang.torch_compat.tracing import replaced


@frozen
class KnownGroup:
    """A process group that this process belongs to."""

    name: str
    ranks: tuple[int, ...]
    """Global, in group order."""
    backend: str
    """The backend for ``init_process_group`` and ``new_group``: ``nccl``, ``cpu:gloo,cuda:nccl``."""
    description: str


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def known_groups() -> Iterator[KnownGroup]:
    """Every process group that this process belongs to, oldest first. The table of groups is private."""
    if not _initialized():
        return
    world = _c10d()._world
    for group, name in list(world.pg_names.items()):
        ranks = tuple(dist.get_process_group_ranks(group))
        yield KnownGroup(str(name), ranks, str(world.pg_map[group][0]), str(group.group_desc))


def group_backend(name: str) -> str:
    """The backend of the group that a collective names, as in :class:`KnownGroup`."""
    c10d = _c10d()
    return str(c10d._world.pg_map[c10d._resolve_process_group(name)][0])


def known_meshes() -> list[Any]:
    """Every ``DeviceMesh`` of this process, in no order. Torch keeps no list: references to the class lead there."""
    if not _initialized():
        return []
    from torch.distributed.device_mesh import DeviceMesh

    # of the class itself: a proxy that only claims to be one is none
    return [found for found in gc.get_referrers(DeviceMesh) if issubclass(type(found), DeviceMesh)]


def mesh_layout(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Names and sizes of a mesh's dimensions and its global ranks in row-major order; None where this rank is not in
    it, or if its groups no longer exist, as after the default group was destroyed."""
    try:
        place, groups = mesh.get_coordinate(), _groups_of(mesh)
    except AttributeError:  # its constructor failed: nobody has it, and the garbage collector still knows it
        return None
    if place is None or groups is None:
        return None
    with outside_of_modes():
        ranks = mesh.mesh
        for dim, (_, members) in enumerate(groups):
            row = ranks[tuple(slice(None) if each == dim else at for each, at in enumerate(place))]
            if {*members} != {*row.tolist()}:  # a later default group has groups of the same names
                return None
    return mesh_order(mesh)


def mesh_order(mesh: Any) -> tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]:
    """Names and sizes of a ``DeviceMesh``'s dimensions, and its global ranks in row-major order. Dimensions without
    names get torch's names in the descriptions of their groups. A mesh makes its tensor of ranks under the modes that
    are active: a ``FakeTensorMode`` would leave no numbers in it."""
    with outside_of_modes():
        ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    names = mesh.mesh_dim_names or tuple(f"dim_{dim}" for dim in range(len(mesh.shape)))
    return tuple(map(str, names)), tuple(int(size) for size in mesh.shape), ranks


def mesh_ranks(mesh: Any) -> tuple[int, ...]:
    """The global ranks of a ``DeviceMesh``, sorted."""
    return tuple(sorted(mesh_order(mesh)[2]))


def mesh_groups(mesh: Any) -> dict[str, tuple[int, ...]]:
    """This rank's groups of a mesh, one per dimension: by name, the global ranks. Empty if groups do not exist."""
    return dict(_groups_of(mesh) or ())


def _groups_of(mesh: Any) -> list[tuple[str, tuple[int, ...]]] | None:
    try:
        return [(group.group_name, tuple(dist.get_process_group_ranks(group))) for group in mesh.get_all_groups()]
    except (RuntimeError, ValueError, LookupError, AssertionError):
        return None


def rename_group(name: str, known_as: str) -> None:
    """Make ``known_as`` another name of a group for collectives, in a private table that allows for several."""
    c10d = _c10d()
    c10d._register_process_group(known_as, c10d._resolve_process_group(name))


def forget_group(name: str) -> None:
    """Take a name out of that table, if it is there."""
    with suppress(RuntimeError, ValueError):
        _c10d()._unregister_process_group(name)


def create_group(name: str, ranks: Sequence[int], backend: str) -> None:
    """Make the process group ``name`` of these ranks, in this order. Called by its members and by no other rank.
    ``new_group`` names groups by how many were made so far, which every rank of the world has to count alike, or
    (``use_local_synchronization``) by how many this rank is in, which is not the same on every member."""
    c10d = _c10d()
    world, whole = c10d._world, c10d._get_default_group()
    backend = c10d.Backend(backend)
    with _not_split_off(whole):
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            list(ranks).index(dist.get_rank()),
            list(ranks),
            backend,
            world.pg_map[whole][1],
            name,
            timeout=c10d._get_default_timeout(backend),
            group_desc="policylang",
        )
    world.pg_group_ranks[group] = {rank: position for position, rank in enumerate(ranks)}


@contextmanager
def _not_split_off(whole: Any) -> Iterator[None]:
    """Within, a new group is not split off the default one, which every rank of the world would have to take part in;
    torch does that where a device was given to ``init_process_group``."""
    device = whole.bound_device_id
    if device is not None:
        whole.bound_device_id = None
    try:
        yield
    finally:
        if device is not None:
            whole.bound_device_id = device


def _c10d() -> Any:
    import torch.distributed.distributed_c10d as c10d

    wanted = ("_new_process_group_helper", "_register_process_group", "_resolve_process_group", "_get_default_timeout")
    why = "makes the process groups of fused collectives with torch 2.11 and later"
    require(c10d, (*wanted, "_world"), why)
    return c10d


def default_store() -> Any:
    """The store that the default process group was made with; None where no real group of several ranks exists: ranks
    of the ``fake`` group are pretended by one process. Comparing through it needs no collective and no device."""
    if not _initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        if dist.get_world_size() < 2 or "fake" in dist.get_backend():
            return None
        return _get_default_store()
    except (KeyError, RuntimeError, ValueError):  # the group was destroyed meanwhile, by another thread
        return None


@contextmanager
def pretended_ranks(world: int) -> Iterator[None]:
    """One process as the first of many ranks: collectives over the ``fake`` backend return at once. DTensor weighs
    redistributions of meshes on ``meta`` as on hosts of eight devices: torch 2.15 asks how many there are."""
    from torch.distributed.device_mesh import _mesh_resources
    from torch.testing._internal.distributed.fake_pg import FakeStore

    count = _mesh_resources.num_devices_per_host
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        with replaced((_mesh_resources, count.__name__, lambda device: 8 if device == "meta" else count(device))):
            yield
    finally:
        dist.destroy_process_group()


_COLLECTIVES = (
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single", "all_reduce"),
    *("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single", "broadcast"),
)


def timed_collectives(timed: Callable[[str], AbstractContextManager[object]]) -> AbstractContextManager[None]:
    """Under it ``timed`` is around the calls of ``torch.distributed``'s collectives, and around the waits for them."""
    found: list[tuple[Any, str, Any]] = []
    for name in _COLLECTIVES if dist.is_available() else ():
        if (function := getattr(dist, name, None)) is not None:
            found.append((dist, name, partial(_timed_call, function, name, timed)))
    if found:
        import torch.distributed._functional_collectives as functional

        found.append((functional, "wait_tensor", partial(_timed_call, functional.wait_tensor, "wait_tensor", timed)))
    return replaced(*found)


def traced_collectives() -> AbstractContextManager[None]:
    """Under it the collectives of ``torch.distributed`` that write in place are functional ones and a copy, as under
    ``torch.compile``: a trace can hold no other."""
    if not dist.is_available():
        return nullcontext()
    import torch.distributed._functional_collectives as functional

    def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def named(value: Any) -> Any:
            is_reduction = isinstance(value, dist.ReduceOp | dist.ReduceOp.RedOpType)
            return functional.REDUCE_OP_TO_STR[value] if is_reduction else value

        return function(*map(named, args), **{key: named(value) for key, value in kwargs.items()})

    remaps = functional.traceable_collective_remaps.items()
    found = ((old.__name__, partial(call, new)) for old, new in remaps if old.__name__ in _COLLECTIVES)
    return replaced(*((dist, name, function) for name, function in found))


def _timed_call(function: Callable[..., Any], name: str, timed: Callable[[str], Any], *args: Any, **kwargs: Any) -> Any:
    with timed(name):
        work = function(*args, **kwargs)
    return _timed_work(work, name, timed) if isinstance(work, dist.Work) else work


def _timed_work(work: Any, name: str, timed: Callable[[str], AbstractContextManager[object]]) -> Any:
    """FSDP2 asks whether it is a ``Work``."""

    class TimedWork(dist.Work):  # type: ignore[misc]
        def wait(self, *args: Any) -> Any:
            with timed(name):
                return work.wait(*args)

        def is_completed(self) -> Any:
            return work.is_completed()

        def get_future(self) -> Any:
            return work.get_future()

    return TimedWork()


def own_connection(store: Any) -> Any:
    """A second connection to a store, so that nobody waits while somebody else's call on the first one blocks. Of a TCP
    store it is a client only, which does not keep the server alive. A read of what was taken away meanwhile is given up
    after a minute. Raises ``RuntimeError`` where the store is gone, which only the old connection notices at once."""
    if store is None:
        raise RuntimeError("the default process group was destroyed")
    store.check(["policylang"])
    found = store.clone()
    found.set_timeout(timedelta(seconds=60))
    return found


def own_rank() -> int | None:
    """This process's global rank; None where torch.distributed is not set up."""
    return dist.get_rank() if _initialized() else None


def ranks_are_threads() -> bool:
    """True if the ranks are threads of this process, as in torch's own tests."""
    return _initialized() and "threaded" in dist.get_backend()


def place_among_ranks() -> str:
    """``3 of 8`` in a program of several ranks, real or pretended; empty in any other."""
    return f"{dist.get_rank()} of {dist.get_world_size()}" if _initialized() else ""


def read_one(store: Any, key: str) -> bytes | None:
    """A value of a store; None where it is not there. ``get`` would wait for it, also for one that was taken away since
    a look: a comparison with what nobody writes does not. Raises ``RuntimeError`` where the store is gone."""
    found: bytes = store.compare_set(key, "\0", "\0")
    return None if found == b"\0" else found


def read_all(store: Any, keys: Sequence[str]) -> list[bytes] | None:
    """Values of a store, without waiting for those that are not there; None then. ``multi_get`` waits for what is
    missing as long as the store's own timeout, or has nothing for it: a rank may take away what it has posted between a
    look and the reading. Raises ``RuntimeError`` where the store is gone."""
    if not store.check(list(keys)):
        return None
    try:
        found: list[bytes] = store.multi_get(list(keys))
    except RuntimeError:
        if store.check(list(keys)):
            raise
        return None
    return None if b"" in found else found


def shortest_timeout(groups: Iterable[str]) -> float:
    """The shortest timeout of some process groups, in seconds: as long as their collectives would wait for a rank.
    Without any, that of the default group; else 30 minutes, the longest of torch's defaults."""
    import torch.distributed.distributed_c10d as c10d

    def timeouts(find: Callable[[], Any]) -> list[float]:
        try:
            group = find()
            found = [group._get_backend(device).options._timeout for device in group._device_types]
        except (AttributeError, KeyError, LookupError, RuntimeError, ValueError):
            return []
        return [timeout.total_seconds() for timeout in found]

    found = [each for name in groups for each in timeouts(partial(c10d._resolve_process_group, name))]
    return min(found or timeouts(c10d._get_default_group), default=1800.0)


@frozen(eq=False)
class ShardedWeight:
    """A parameter that ``fully_shard`` gathers before the modules of one of its groups run."""

    module: nn.Module
    """Whose parameter it is."""
    name: str
    """In that module."""
    reshards: bool
    """True if the gathered weight is freed after the forward, and all-gathered again in the backward."""
    gathered: torch.Tensor | None
    """The tensor that modules compute with; None before the first gather."""
    group: tuple[nn.Module, ...]
    """The modules that ``fully_shard`` was called with."""
    outermost: bool
    """True if no other call of it is around that one. By default it keeps the weights of this one gathered."""
    together: int
    """A number, equal for all that is gathered at once."""
    ranks: tuple[int, ...]
    """Over which it is gathered; empty where it is not."""
    over: str
    """The name of their process group."""


def sharded_weights(modules: Iterable[nn.Module] | None) -> Iterator[ShardedWeight]:
    """The parameters of some modules that ``fully_shard`` gathers, also where it was called with a module around these,
    in the order of the modules and of their names; of None, those of every model in the process."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    known = _by_owner()
    if modules is None:
        yield from known.values()
    elif known:
        for module in modules:
            yield from (known[key] for name in module._parameters if (key := (module, name)) in known)


def gathered_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The tensors that ``fully_shard`` gives the modules of a model for their parameters."""
    found = (each.gathered for each in sharded_weights(model.modules()))
    return [each for each in found if each is not None]


def _by_owner() -> dict[tuple[nn.Module, str], ShardedWeight]:
    """The weights of every model in the process: a module does not know that a module around it shards it."""
    from torch.distributed import _composable_state

    states = {ref() for ref in getattr(_composable_state, "_module_state_mapping", {}).values()}
    return {owner: weight for state in states if state is not None for owner, weight in _weights(state)}


def _weights(state: Any) -> Iterator[tuple[tuple[nn.Module, str], ShardedWeight]]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 and before: one group
        groups = [each] if (each := getattr(state, "_fsdp_param_group", None)) is not None else []
    for group in groups:
        over = getattr(getattr(group, "mesh_info", None), "shard_process_group", None)
        ranks = _ranks(over)
        shared: Any = (id(group), ranks, getattr(over, "group_name", "") if ranks else "")
        for parameter in group.fsdp_params:
            info = parameter._module_info
            reshards, gathered = bool(group._reshard_after_forward), getattr(parameter, "_unsharded_param", None)
            around = (tuple(state._modules), bool(state._is_root))
            owners = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            for module, name in owners:
                yield (module, name), ShardedWeight(module, name, reshards, gathered, *around, *shared)


def _ranks(group: torch.distributed.ProcessGroup | None) -> tuple[int, ...]:
    """The ranks of a group; none of one that is gone, as that of a model that was trained before."""
    try:
        return () if group is None else tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return ()


def is_sharded(module: nn.Module) -> bool:
    """True if ``fully_shard`` was called with a module."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def lies_within_another(module: nn.Module) -> bool:
    """True if a forward has found a sharded module inside another: what FSDP gathers ahead has to share its streams."""
    return module._get_fsdp_state()._is_root is False


def gathered_ahead(module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """The modules that a sharded one gathers ahead, in the forward and in the backward; torch has setters alone."""
    state: Any = module._get_fsdp_state()
    lists = state._states_to_forward_prefetch, state._states_to_backward_prefetch
    forward, backward = ([each._modules[0] for each in states] for states in lists)
    return forward, backward


def ran_forward(module: nn.Module) -> list[nn.Module]:
    """The modules FSDP has seen run since the last backward, around and beside a sharded one, in order."""
    context: Any = module._get_fsdp_state()._comm_ctx
    return [module for group in context.post_forward_order for module in group.modules]


def own_class(module: nn.Module) -> str:
    """The name of a module's class, without what ``fully_shard`` has made of it."""
    own = (each for each in type(module).__mro__ if not each.__module__.startswith("torch.distributed.fsdp"))
    name = type(module).__name__
    return next((each.__name__ for each in own if each.__name__ == name.removeprefix("FSDP")), name)


def is_of_fsdp(hook: object) -> bool:
    """True if ``fully_shard`` registered a module's hook: such hooks gather and free weights."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
STAGES_A_RANK = {name: 1 if name in ("gpipe", "1f1b") else 2 for name in SCHEDULES}


def pipeline_order(name: str, stages: int, microbatches: int) -> tuple[tuple[tuple[str, int, int], ...], ...]:
    """By rank, the steps of a schedule of ``torch.distributed.pipelining``: the kind (F, B, I or W), the stage and the
    microbatch. The schedule is made of stand-ins for stages, which it asks for numbers alone; what is to overlap is
    in order. Raises ``ValueError`` for numbers that the schedule does not take."""
    from torch.distributed.pipelining import schedules

    several = STAGES_A_RANK[name]
    ranks = stages // several
    if ranks * several != stages:
        raise ValueError(f"it runs {several} stages on each rank, and {stages} is no multiple of {several}")
    numbers = {"num_stages": stages, "group_size": ranks, "group_rank": 0, "submod": None}
    stand_ins: list[Any] = [SimpleNamespace(stage_index=each, **numbers) for each in range(several)]
    kind = getattr(schedules, SCHEDULES[name])
    table = kind(stand_ins if several > 1 else stand_ins[0], microbatches).pipeline_order
    found = []
    for rank in sorted(table):
        actions = [part for each in table[rank] if each is not None for part in each.sub_actions or (each,)]
        forwards = Counter[int]()
        steps = []
        for each in actions:
            word, stage, batch = each.computation_type.value, each.stage_index, each.microbatch_index
            if word == "F":  # in order; some versions of torch begin to count at 1
                batch = forwards[stage]
                forwards[stage] += 1
            if word in ("F", "B", "I", "W"):
                steps.append((word, stage, batch))
        found.append(tuple(steps))
    return tuple(found)
