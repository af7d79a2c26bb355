"""What a traced graph is specialised to (batch, model, optimizer), and the check that a call brings the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen

from policylang.language.wording import counted, listed
from policylang.torch_compat.tracing import tree_flatten, tree_paths
from policylang.tracing.preconditions import BATCH_CHANGED, MODEL_CHANGED, problem
from policylang.tracing.step_state import ModelState, OptimizerState

_MOST_DIFFERENCES = 8


@frozen
class TensorKind:
    """All that a graph is specialised to in one of its inputs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: torch.Tensor) -> TensorKind:
        return cls(tuple(value.shape), value.dtype, value.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


@frozen(eq=False)
class BatchSignature:
    """The structure of a batch; of each tensor its kind, of every other leaf its value, which the graph holds."""

    spec: Any
    paths: tuple[str, ...]
    kinds: tuple[Any, ...]

    @classmethod
    def of(cls, batch: tuple[Any, ...]) -> BatchSignature:
        leaves, spec = tree_flatten(batch)
        return cls(spec, tuple(tree_paths(batch)), tuple(_kind(leaf) for leaf in leaves))

    def described(self) -> list[tuple[str, str]]:
        """Where each leaf lies and what it is, for people."""
        return [(f"input{path}", _text(kind)) for path, kind in zip(self.paths, self.kinds, strict=True)]

    def tensors(self, batch: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors of a batch, in order. Raises PolicyGraphError if it is not what was traced."""
        leaves, spec = tree_flatten(batch)
        if spec != self.spec:
            came = tree_paths(batch)
            raise problem(
                BATCH_CHANGED,
                "the batch has another structure than the one this step was traced for: "
                f"{counted(len(self.paths), 'leaf', 'leaves')} then, {counted(len(came), 'leaf', 'leaves')} now",
                help="pass what `trace_step` was given after `loss_fn`, in the same order and with the same keys",
                details=[f"{when}: {_inputs(paths)}" for when, paths in (("traced", self.paths), ("called", came))],
            )
        found = zip(self.paths, self.kinds, leaves, strict=True)
        others = [(path, kind, _kind(leaf)) for path, kind, leaf in found if not _same(kind, leaf)]
        if others:
            texts = [(path, _text(kind), _text(came)) for path, kind, came in others]
            shapes = any(isinstance(kind, TensorKind) for _, kind, _ in others)
            raise problem(
                BATCH_CHANGED,
                "the batch is not the one this step was traced for",
                help="trace one step for each shape, or pad the batch to the traced shape"
                if shapes
                else "trace one step for each, or pass what it was traced with: an object may be written to in place",
                details=_first(
                    [
                        f"input{path}: traced with {then}, called with {'another' if now == then else now}"
                        for path, then, now in texts
                    ]
                ),
            )
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


@frozen(eq=False)
class ModelSignature:
    """Of a model: what parameters and buffers it has, which need a gradient, and which modules are in train mode."""

    kinds: dict[str, TensorKind]
    requires_grad: dict[str, bool]
    modes: dict[str, bool]
    attributes: tuple[str, ...]
    """The plain attributes among ``kinds``."""

    @classmethod
    def of(cls, model: torch.nn.Module, state: ModelState) -> ModelSignature:
        named = dict(zip(state.names, state.tensors, strict=True))
        needs = {name: value.requires_grad for name, value in named.items()}
        modes = {path: module.training for path, module in model.named_modules()}
        return cls(_kinds(named), needs, modes, tuple(state.attributes))

    def check(self, model: torch.nn.Module, state: ModelState) -> None:
        """Raises PolicyGraphError if the graph no longer is the model's."""
        now = ModelSignature.of(model, state)
        if now.kinds == self.kinds and now.requires_grad == self.requires_grad and now.modes == self.modes:
            return
        raise problem(
            MODEL_CHANGED,
            "the model has changed since this step was traced, and the graph has not",
            help="trace the step again, or undo the change",
            details=_first(self._differences(now)),
        )

    def _differences(self, now: ModelSignature) -> list[str]:
        found = [f"`{name}`: gone" for name in self.kinds if name not in now.kinds]
        for name, kind in now.kinds.items():
            before = self.kinds.get(name)
            if before != kind:
                found.append(f"`{name}`: new" if before is None else f"`{name}`: traced with {before}, now {kind}")
        if not found:
            found += _turned(self.requires_grad, now.requires_grad, ("without one", "with a gradient"))
        found += _turned(self.modes, now.modes, ("in eval mode", "in train mode"))
        return found or ["its modules are others"]


@frozen(eq=False)
class OptimizerSignature:
    """What of an optimizer the graph holds."""

    kinds: dict[str, TensorKind]
    settings: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, state: OptimizerState) -> OptimizerSignature:
        return cls(_kinds(state.tensors), state.settings)

    def check(self, state: OptimizerState) -> None:
        """Raises PolicyGraphError if the graph no longer is the optimizer's."""
        now = OptimizerSignature.of(state)
        if list(self.kinds.items()) == list(now.kinds.items()) and self.settings == now.settings:
            return
        raise problem(
            MODEL_CHANGED,
            "the optimizer has changed since this step was traced, and the graph has not",
            help="learning rates and the values of its state may change; trace the step again for anything else",
            details=self._differences(now),
        )

    def _differences(self, now: OptimizerSignature) -> list[str]:
        found = [
            f"group {number}: `{key}` was {then[key]!r}, now {group.get(key)!r}"
            for number, (then, group) in enumerate(zip(self.settings, now.settings, strict=False))
            for key in then
            if then[key] != group.get(key)
        ]
        names = list(dict.fromkeys([*self.kinds, *now.kinds]))
        changed = [name for name in names if self.kinds.get(name) != now.kinds.get(name)]
        found += [f"`{name}`: traced with {self.kinds.get(name)}, now {now.kinds.get(name)}" for name in changed[:8]]
        return found


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorKind]:
    return {name: TensorKind.of(value) for name, value in tensors.items()}


def _turned(before: Mapping[str, bool], now: Mapping[str, bool], words: tuple[str, str]) -> Iterator[str]:
    for name, value in before.items():
        if now.get(name, value) != value:
            yield f"`{name or 'the model'}`: traced {words[value]}, now {words[not value]}"


def _kind(leaf: Any) -> Any:
    return TensorKind.of(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _same(kind: Any, leaf: Any) -> bool:
    if isinstance(kind, TensorKind):
        return isinstance(leaf, torch.Tensor) and kind == TensorKind.of(leaf)
    return leaf is kind or (type(leaf) is type(kind) and bool(leaf == kind))


def _text(kind: Any) -> str:
    text = str(kind) if isinstance(kind, TensorKind) else f"the {type(kind).__name__} `{kind!r}`"
    return text if "\n" not in text else f"the {type(kind).__name__}"


def _inputs(paths: Sequence[str]) -> str:
    return listed([f"input{path}" for path in paths], _MOST_DIFFERENCES) or "nothing"


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - _MOST_DIFFERENCES
    return lines if more <= 0 else [*lines[:_MOST_DIFFERENCES], f"and {more} more"]
