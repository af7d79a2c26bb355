"""The private names of torch.distributed that comparing ranks stands on.

Imports no torch that is not loaded already, since a policy is loaded by programs that never import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any


def default_store() -> Any:
    """The store that the default process group was made with; None where no real group of several ranks exists.

    Private because torch hands the store out to nobody: a group of gloo, NCCL or any other kind has one, so comparing
    through it needs no collective and no device. Ranks of the ``fake`` group are pretended by one process.
    """
    distributed = _initialized()
    if distributed is None:
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    try:
        if distributed.get_world_size() < 2 or "fake" in distributed.get_backend():
            return None
        return _get_default_store()
    except (KeyError, RuntimeError, ValueError):  # the group was destroyed meanwhile, by another thread
        return None


def own_connection(store: Any) -> Any:
    """A second connection to a store, so that nobody waits while somebody else's call on the first one blocks.

    Of a TCP store it is a client only: it does not keep the server alive, whose port a later group may ask for. A read
    of what was taken away meanwhile is given up after a minute. Raises ``RuntimeError`` where the store is gone, which
    only the old connection notices at once: a new one is tried for as long as the store's own timeout.
    """
    if store is None:
        raise RuntimeError("the default process group was destroyed")
    store.check(["policylang"])
    found = store.clone()
    found.set_timeout(timedelta(seconds=60))
    return found


def own_rank() -> int | None:
    """This process's global rank; None where torch.distributed is not set up."""
    distributed = _initialized()
    return None if distributed is None else int(distributed.get_rank())


def ranks_are_threads() -> bool:
    """Whether the ranks are threads of this process, as in torch's tests of its own."""
    distributed = _initialized()
    return distributed is not None and "threaded" in distributed.get_backend()


def place_among_ranks() -> str:
    """``3 of 8`` in a program of several ranks, real or pretended; empty in any other."""
    distributed = _initialized()
    return "" if distributed is None else f"{distributed.get_rank()} of {distributed.get_world_size()}"


def _initialized() -> Any:
    """``torch.distributed``, where it has a default process group."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed


def read_all(store: Any, keys: Sequence[str]) -> list[bytes] | None:
    """Values of a store, without waiting for those that are not there; None then.

    ``multi_get`` waits for what is missing as long as the store's own timeout, and a rank may take away what it has
    posted between a look and the reading. Raises ``RuntimeError`` where the store is gone.
    """
    if not store.check(list(keys)):
        return None
    try:
        found: list[bytes] = store.multi_get(list(keys))
    except RuntimeError:
        if store.check(list(keys)):
            raise
        return None
    return found


def shortest_timeout(groups: Iterable[str]) -> float:
    """The shortest timeout of some process groups, in seconds: as long as their collectives would wait for a rank.

    Private because a group's timeout is to be had from its backends alone, and a group from its name. Where none
    of them tells, that of the default group; half an hour, the longest of torch's own defaults, where that does not.
    """
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
