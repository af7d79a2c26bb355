"""CUDA tensors without data where there is no GPU, and a backward through them: what PyTorch lacks for that, lent.

``FakeTensorMode`` makes tensors that say ``cuda`` on any machine. Three things keep a torch from tracing a step on them
there: autograd asks a device's guard for its stream, which ends the process in a build without CUDA and asks for the
driver in one with it; the engine adds up gradients of an accelerator on its streams; and an operator without a CUDA
kernel in this build is decomposed where a CUDA build calls its kernel. Everything is undone when the trace ends.
"""
