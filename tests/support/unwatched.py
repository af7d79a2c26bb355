"""What torch measures, probes and writes down at each compilation, and nobody reads in a test.

It was half of the processor time of a small one. Imported by whatever compiles: the tests, and the server from which
ranks are forked.
"""

import logging
import os
import types

import torch._dynamo.config
import torch._dynamo.guards
import torch._inductor.config
import torch._subclasses.fake_tensor

# The latency of a guard, taken after a flush of the processor's caches.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
# A collection after each: those that pytest and `settle` leave to Python's thresholds are enough.
torch._dynamo.config.run_gc_after_compile = False
# The structured trace: every graph as text and as JSON, for a handler that would find out that it has no file, and for
# those that pytest hangs on each logger that does not propagate.
logging.getLogger("torch.__trace").handlers.clear()
logging.getLogger("torch.__trace").propagate = True
# The stack of whoever makes a fake mode, and, three times, of whoever sets the seed: for devices that nobody has begun.
_no_stack = types.SimpleNamespace(extract_stack=list, format_stack=list, format_list=list)
for _module in (torch._subclasses.fake_tensor, torch.cuda, torch.mtia, torch.xpu):
    _module.traceback = _no_stack  # type: ignore[attr-defined]
# Inductor compiles a probe for the vector instructions of this machine in every new cache folder, which costs more than
# the few small kernels of a test. Here, and for the processes that tests start.
torch._inductor.config.cpp.vec_isa_ok = True
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
