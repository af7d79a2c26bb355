"""Forward, loss and backward of a training step as one flat graph."""

from policylang.api.traced_step import TracedStep, trace_step

__all__ = ["TracedStep", "trace_step"]
