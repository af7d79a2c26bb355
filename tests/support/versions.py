"""What some tests need of torch beyond 2.11, the oldest that is supported."""

import pytest
import torch

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))

needs_groups_in_any_order = pytest.mark.skipif(
    VERSION < (2, 12), reason="before torch 2.12, the ranks of a new group are sorted, and such chains are refused"
)
needs_traced_meshes = pytest.mark.skipif(
    VERSION < (2, 12), reason="before torch 2.12, a part of a device mesh cannot be taken while a graph is traced"
)
needs_marked_backwards = pytest.mark.skipif(
    VERSION < (2, 12), reason="before torch 2.12, autograd does not mark what runs in a backward"
)
needs_forward_derivatives_of_checkpoints = pytest.mark.skipif(
    VERSION < (2, 12), reason="on torch 2.11, torch's own checkpoint takes no forward-mode derivatives"
)
needs_compilers_under_dispatch_modes = pytest.mark.skipif(
    VERSION < (2, 12),
    reason="on torch 2.11, what must be compiled runs as it is under a dispatch mode, and is followed",
)
needs_cached_collectives = pytest.mark.skipif(
    VERSION < (2, 12), reason="on torch 2.11, a graph with collectives is not found in Inductor's caches again"
)
needs_several_last_passes = pytest.mark.skipif(
    VERSION < (2, 13),
    reason="before torch 2.13, Inductor takes one last pass, and a user's own leaves no place for ours",
)
needs_traced_generators = pytest.mark.skipif(VERSION < (2, 12), reason="on torch 2.11, make_fx traces no generator")
needs_checkpoints_of_sharded_layers = pytest.mark.skipif(
    VERSION < (2, 12), reason="on torch 2.11, torch's checkpoint fails around tensor-parallel layers"
)
needs_overlap_scheduling_by_given_times = pytest.mark.skipif(
    VERSION < (2, 12), reason="on torch 2.11, torch's overlap scheduler takes no times of nodes"
)
needs_gathers_of_columns = pytest.mark.skipif(
    VERSION < (2, 12), reason="on torch 2.11, Dynamo does not trace a gather along another dimension than the first"
)
