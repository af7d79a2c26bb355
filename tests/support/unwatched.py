"""What torch measures and writes down at each compilation for those who watch fleets, and nobody reads in a test.

It was a quarter of the processor time of a small compilation. Imported by whatever compiles: the tests, and the server
that ranks are forked from.
"""

from __future__ import annotations

import logging

import torch._dynamo.config
import torch._dynamo.guards

# The latency of a guard, taken after a flush of the processor's caches.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
# A collection after each: those that pytest and `settle` leave to Python's thresholds are enough.
torch._dynamo.config.run_gc_after_compile = False
# The structured trace: every graph as text and as JSON, for a handler that would find out that it has no file.
logging.getLogger("torch.__trace").handlers.clear()
