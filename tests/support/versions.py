"""What some tests need of torch beyond 2.11, the oldest that is supported."""

import pytest
import torch

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def _since(minor: int, reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif((2, minor) > VERSION, reason=reason)


needs_groups_in_any_order = _since(
    12, "before torch 2.12, the ranks of a new group are sorted, and such chains are refused"
)
needs_traced_meshes = _since(12, "before torch 2.12, a part of a device mesh cannot be taken while a graph is traced")
needs_marked_backwards = _since(12, "before torch 2.12, autograd does not mark what runs in a backward")
needs_forward_derivatives_of_checkpoints = _since(
    12, "on torch 2.11, torch's own checkpoint takes no forward-mode derivatives"
)
needs_compilers_under_dispatch_modes = _since(
    12, "on torch 2.11, what must be compiled runs as it is under a dispatch mode, and is followed"
)
needs_cached_collectives = _since(12, "on torch 2.11, a graph with collectives is not found in Inductor's caches again")
needs_several_last_passes = _since(
    13, "before torch 2.13, Inductor takes one last pass, and a user's own leaves no place for ours"
)
needs_traced_generators = _since(12, "on torch 2.11, make_fx traces no generator")
needs_checkpoints_of_sharded_layers = _since(
    12, "on torch 2.11, torch's checkpoint fails around tensor-parallel layers"
)
needs_overlap_scheduling_by_given_times = _since(12, "on torch 2.11, torch's overlap scheduler takes no times of nodes")
needs_gathers_of_columns = _since(
    12, "on torch 2.11, Dynamo does not trace a gather along another dimension than the first"
)
