"""Horovod's DistributedOptimizer: an optimizer whose steps use the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from clcomm.base.errors import ArgumentError
from clcomm.comm.collectives.runner import CollectiveRunner, refused_on_all
from clcomm.comm.tensors.arrays import require_usable
from clcomm.horovod.calls import Adasum, Average, Sum, refused_in_set
from clcomm.horovod.operations import Compression, ReduceOp
from clcomm.horovod.reduction import Reduction, UsageError
from clcomm.horovod.world import ProcessSet, global_process_set


class _Distributed:
    """What a wrapped optimizer's class has in place of its own methods."""

    _reduction: Reduction

    @property
    def runner(self) -> CollectiveRunner | None:
        """What raises a mistake of this rank on all."""
        return self._reduction.runner

    @property
    def backward_passes_per_step(self) -> int:
        """How many backwards come before a step; settable, as by `set_backward_passes_per_step`."""
        return self._reduction.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @refused_on_all
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless that is to be skipped, and step; collective."""
        reduction = self._reduction
        reducing = reduction.op is not Adasum
        if reducing and reduction.should_synchronize and closure is None:
            if reduction.synchronized and not reduction.has_new_gradients():
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): the "
                    "gradients are not reduced again; call step() within that block",
                    stacklevel=2,
                )
            else:
                self.synchronize()
        elif closure is None:
            reduction.require_reduced()
        reduction.synchronized = False
        if closure is not None and reducing:
            closure = partial(self._reduced_after, closure)
        result = super().step(closure) if reducing or not reduction.is_needed else self._step_together(closure)  # type: ignore[misc]
        reduction.note_step()
        return result

    # PyTorch's mark: the class's own step calls the hooks of steps, and this one not once more after load_state_dict.
    step.hooked = True  # type: ignore[attr-defined]

    def _reduced_after(self, closure: Callable[[], object]) -> Any:
        with torch.enable_grad():
            loss = closure()
        if self._reduction.should_synchronize:
            self.synchronize()
        else:
            self._reduction.require_reduced()
        self._reduction.synchronized = False
        return loss

    def _step_together(self, closure: Callable[[], object] | None) -> Any:
        self._reduction.require_same_start()
        starts = {each: each.detach().clone() for each in self._reduction.trained().values()}
        result = super().step(closure)  # type: ignore[misc]
        self._reduction.add_steps(starts)
        return result

    @refused_on_all
    def synchronize(self) -> None:
        """Wait for the reductions that backward began, run the others, and replace the gradients; collective."""
        self._reduction.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` within this block use what `synchronize` left; UsageError after another backward."""
        if self._reduction.op is Adasum:
            raise UsageError("skip_synchronize: expected another op than Adasum, whose ranks meet after their steps")
        self._reduction.should_synchronize = False
        try:
            yield
        finally:
            self._reduction.should_synchronize = True

    @refused_on_all
    def zero_grad(self, *args: object, **kwargs: object) -> None:
        """Clear the gradients. Raises UsageError where backward has begun to reduce them."""
        if self._reduction.is_under_way:
            raise UsageError(
                "zero_grad: expected step() or synchronize() after backward(), got zero_grad() while gradients are "
                "being reduced"
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state, and expect all backwards of a step."""
        self._reduction.synchronized, self._reduction.should_synchronize = False, True
        self._reduction.start_over()
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]

    @refused_on_all
    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backwards come before a step, from the next one on."""
        self._reduction.passes = _passes(passes)
        self._reduction.start_over()


@refused_in_set
def DistributedOptimizer(
    optimizer: object,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: object = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: object = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class, parameters and state whose steps use all ranks' gradients; collective.

    Gradients are reduced in buckets of the Communicator's size, or in `groups`, in the reverse order of the parameters,
    while backward goes on; a rank without a gradient counts as zero.

    Args:
        optimizer: a torch.optim.Optimizer; use the returned one in its place.
        named_parameters: such as model.named_parameters(), for messages.
        compression: `Compression.fp16` sends and sums gradients as float16; or a program's own Compressor.
        backward_passes_per_step: how many backwards accumulate gradients before a step; they are not averaged.
        op: Average, Sum, or Adasum of the ranks' steps.
        gradient_predivide_factor: with Average, divide by this before the sum and by size / this after it.
        groups: a number: parameters in their order are divided into that many groups, each of which is reduced at once
            when it is complete; or a list of lists of parameters, where one that is in no list is a group of its own;
            None or 0: as many gradients as fit into a bucket.
        num_groups: Horovod's older name of a number of groups; `groups` counts where both are given.
        sparse_as_dense: accepted; sparse gradients travel as dense ones, and come back as what they were.
        process_set: the ranks that train the model; another one gets an optimizer that steps by itself.

    Raises:
        ArgumentError: an argument is invalid.
        MismatchError: ranks have other parameters; on every rank.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if op not in (Average, Sum, Adasum):
        raise ArgumentError(f"op: expected hvd.Average, hvd.Sum or hvd.Adasum, got {op!r}")
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ArgumentError(f"gradient_predivide_factor: expected 1.0 unless op is Average, got {op}")
    if not gradient_predivide_factor > 0.0:
        raise ArgumentError(f"gradient_predivide_factor: expected a number above 0, got {gradient_predivide_factor!r}")
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ArgumentError(f"compression: expected hvd.Compression.fp16 or another Compressor, got {compression!r}")
    grouped = _groups("num_groups", num_groups) if groups is None else _groups("groups", groups)
    names = _names(optimizer, named_parameters)
    for parameter, name in names.items():
        require_usable(parameter, f"parameter {name!r}")
    kind = type(type(optimizer).__name__, (_Distributed, type(optimizer)), {"__module__": __name__})
    wrapped: Any = object.__new__(kind)
    wrapped.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    passes = _passes(backward_passes_per_step)
    wrapped._reduction = Reduction(
        wrapped, names, compression, passes, op, gradient_predivide_factor, grouped, process_set
    )
    return wrapped


def _passes(passes: int) -> int:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ArgumentError(f"backward_passes_per_step: expected a number from 1 up, got {passes!r}")
    return passes


def _groups(name: str, groups: object) -> int | list[list[torch.Tensor]]:
    """Return the checked argument."""
    if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
        return groups
    if name != "groups" or not isinstance(groups, (list, tuple)):
        lists = " or lists of parameters" if name == "groups" else ""
        raise ArgumentError(f"{name}: expected a number from 0 up{lists}, got {groups!r}")
    seen: set[torch.Tensor] = set()
    for index, group in enumerate(groups):
        if not isinstance(group, (list, tuple)) or not all(isinstance(each, torch.Tensor) for each in group):
            raise ArgumentError(f"groups[{index}]: expected a list of parameters, got {type(group).__name__}")
        twice = [each for each in group if each in seen or seen.add(each)]  # type: ignore[func-returns-value]
        if twice:
            raise ArgumentError(
                f"groups[{index}]: expected each parameter once, got one of shape {list(twice[0].shape)} again"
            )
    return [list(group) for group in groups]


def _names(optimizer: Any, named: Iterable[tuple[str, torch.Tensor]] | None) -> dict[torch.Tensor, str]:
    """Return the names of an optimizer's parameters."""
    own = [each for group in optimizer.param_groups for each in group["params"]]
    if named is None:
        return {each: f"allreduce.noname.{index}" for index, each in enumerate(own)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        raise ArgumentError("named_parameters: expected pairs of name and parameter, as model.named_parameters() gives")
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ArgumentError(f"named_parameters: expected different names, got {name!r} twice")
        seen.add(name)
    names = {parameter: name for name, parameter in pairs}
    nameless = sum(each not in names for each in own)
    if nameless:
        raise ArgumentError(
            f"named_parameters: expected all parameters of the optimizer, got {nameless} without a name"
        )
    return names
