"""Forward, loss and backward of a training step as one flat graph."""

from policylang.tracing.step import TracedStep, trace_step

__all__ = ["TracedStep", "trace_step"]
