"""The tape: each operation on tensors that need gradients leaves a node, and backward() walks the nodes in reverse.

An op states its forward and backward side by side:

    class Scale(Op):
        @staticmethod
        def forward(ctx, x, *, factor):
            ctx.factor = factor
            ...launch a kernel that fills y...
            return y

        @staticmethod
        def backward(ctx, grad):
            dx = ctx.out(0)      # for a parameter's first gradient, its slice of the flat gradients
            ...launch a kernel that fills dx...
            return (dx,)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from clcomm.base.errors import ArgumentError
from clcomm.engine.launch_queue import orders
from clcomm.engine.modes import modes, no_grad
from clcomm.engine.ops.types import expand
from clcomm.engine.tape import nodes_before, nodes_since, require_unwritten
from clcomm.engine.tensor import Node, Shape, Tensor, constant, copy_into, empty, float_tensor

_backwards = itertools.count(1)


class Context(Node):
    """An op's node on the tape, with the values it keeps from forward to backward; an op may set further attributes.

    Attributes:
        needs: whether each input needs a gradient.
        saved: the arguments of `save`.
        attrs: the operation's, beside the inputs, of one that is linear.
    """

    op: type[Op]
    attrs: dict[str, Any]
    inputs: Any  # as a Node has them; an op knows which of its inputs there are

    def __init__(self, inputs: tuple[Tensor | None, ...], needs: tuple[bool, ...]):
        self.inputs = inputs
        self.needs = needs
        self.saved: tuple[Any, ...] = ()

    if TYPE_CHECKING:  # the op's own attributes

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...

    def save(self, *tensors: object) -> None:
        """Keep tensors for backward, after which they are released."""
        self.saved = tensors

    def out(self, index: int, shape: Shape | None = None) -> Tensor:
        """Return the tensor for the gradient of input `index`, every element of which backward must write.

        That is the input's own gradient if it is a leaf without one yet, else a new tensor.
        """
        source: Tensor = self.inputs[index]
        if self.is_leaf(index):
            claimed = source.claim_gradient()
            if claimed is not None:
                return claimed
        return empty(source.device, source.shape if shape is None else shape)

    def is_leaf(self, index: int) -> bool:
        """Return whether the gradient of input `index` is a leaf's, and not a result by itself."""
        return self.producers[index] is None and modes.apart is None and not _has_gradient_hooks(self.inputs[index])

    def taken(self, index: int) -> Tensor | None:
        """Return what input `index` has got of its gradient so far, and take it away: the caller's result includes it.

        That of a leaf is in memory to which the caller has to write the result.
        """
        x, producer = self.inputs[index], self.producers[index]
        if modes.apart is not None:
            return modes.apart.pop(producer or id(x), None)
        if producer is not None:
            before, producer.grad = producer.grad, None
            producer.owns_grad = producer.is_masked = False
            return before
        if _has_gradient_hooks(x):
            return modes.pending.pop(id(x), None)
        return None if x.grad is None else x.gradient_for_update()

    def mask_of(self, index: int) -> Tensor | None:
        """Return the mask of the op that made input `index`, if this gradient is the only one that it receives.

        The caller has to set the gradient to 0 where the mask is not positive or NaN.
        """
        producer = self.producers[index]
        if producer is None or producer.mask is None or producer.grad is not None or producer.hooks:
            return None
        if modes.apart is not None:
            return None
        producer.is_masked = True
        return producer.mask

    def release(self) -> None:
        """Let go of what was kept for backward."""
        self.inputs = self.mask = None
        self.saved = ()


class Op:
    """An operation: `forward(ctx, *inputs, **attrs)` and `backward(ctx, grad)`, called through `apply`."""

    #: Whether a result with as many columns as an input has that input's: of divided rows it is divided, too.
    keeps_columns = False
    #: Whether inputs may have no elements, as those of operations that keep columns; others raise ArgumentError.
    takes_none = False
    #: Whether the result has the first input's shape, also where that has no elements.
    keeps_shape = False
    #: Whether it is linear in its one input, but for a `value` that it writes beside it, so that gradients of gradients
    #: need no rule; its arguments are kept then.
    is_linear = False

    @classmethod
    def shape_of_none(cls, *inputs: Any, **attrs: Any) -> Shape | None:
        """Return the shape of the result, of zeros if any, where an input has no elements; None: it is an error."""
        return inputs[0].shape if cls.keeps_shape else None

    @staticmethod
    def forward(ctx: Context, *inputs: Any, **attrs: Any) -> Tensor:
        """Queue the kernels of the result and return it."""
        raise TypeError("an Op defines forward")

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Queue the kernels of the inputs' gradients and return them, None for inputs that need none."""
        raise TypeError("an Op defines backward")

    @classmethod
    def apply(cls, *inputs: Tensor | None, **attrs: object) -> Tensor:
        """Run forward and, if an input needs a gradient, put the op on the tape; an input may be None."""
        if modes.recording:
            needs = tuple([x is not None and x._requires_grad for x in inputs])
            recorded = True in needs
        else:
            needs, recorded = (False,) * len(inputs), False
        for x in inputs:
            if x is not None and 0 in x.shape and not (cls.takes_none or cls.keeps_columns):
                shape = cls.shape_of_none(*inputs, **attrs)
                if shape is not None:
                    return OfNone.apply(*inputs, shape=shape)
                raise ArgumentError(f"{cls.__name__}: expected one element or more, got a tensor of shape {x.shape}")
        ctx = Context(inputs, needs)
        result = cls.forward(ctx, *inputs, **attrs)
        if cls.keeps_columns:
            for x in inputs:
                if x is not None and x.whole_columns and result.shape[-1:] == x.shape[-1:]:
                    result.whole_columns = x.whole_columns
        if recorded:
            if any(kept is result for kept in ctx.saved):  # a node that holds its own result would be a reference cycle
                ctx.saved = tuple([result.detach() if kept is result else kept for kept in ctx.saved])
            ctx.op = cls
            if cls.is_linear:
                ctx.attrs = attrs
            ctx.order = next(orders)
            ctx.producers = tuple([None if x is None else x._node for x in inputs])
            result._node = ctx
            result._requires_grad = True
        return result


class OfNone(Op):
    """The zeros, or the result without elements, of an operation whose inputs have none; so are the gradients."""

    takes_none = True

    @staticmethod
    def forward(ctx: Context, *inputs: Tensor | None, shape: Shape) -> Tensor:
        ctx.device = next(x.device for x in inputs if x is not None)
        return expand(constant(ctx.device, 0.0), shape)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        zero = constant(ctx.device, 0.0)
        return tuple([expand(zero, x.shape) if need else None for x, need in zip(ctx.inputs, ctx.needs, strict=True)])


def backward(root: Tensor, gradient: Tensor | float | None = None, retain_graph: bool = False) -> None:
    if not root._requires_grad:
        raise ArgumentError("backward: this tensor needs no gradient (no leaf with requires_grad, or no_grad() is on)")
    seed = seed_of(root, gradient)
    number = next(_backwards)
    outer, modes.backward = modes.backward, number
    pending, modes.pending = modes.pending, {}
    try:
        _backpropagate(root, seed, retain_graph)
    finally:
        modes.backward, modes.pending = outer, pending
    for end in tuple(root.device.backward_ends):
        action = end(number)
        if action is not None:
            root.device.on_host(action)


def _backpropagate(root: Tensor, seed: Tensor, retain_graph: bool) -> None:
    if root._node is None:
        with no_grad():
            _receive(root, seed)
            _run_hooks(root)
        return
    nodes, uses = nodes_before(root._node)
    require_unwritten(nodes, root.device)
    root._node.grad = seed
    with no_grad():
        for node in nodes:
            _run_node(node, uses, retain_graph)


def seed_of(root: Tensor, gradient: Tensor | float | None) -> Tensor:
    """Return the gradient of a backward's result; ArgumentError for one that does not fit."""
    if isinstance(gradient, Tensor):
        if float_tensor("backward: gradient", gradient).shape != root.shape:
            raise ArgumentError(f"backward: expected a gradient of shape {root.shape}, got {gradient.shape}")
        return gradient
    if gradient is None and root.numel() != 1:
        raise ArgumentError(f"backward: a tensor of shape {root.shape} needs gradient=; only one element does not")
    value = constant(root.device, 1.0 if gradient is None else float(gradient))
    if root.shape == ():
        return value
    return expand(value, root.shape)


def backward_again(function: Callable[[], Tensor], grad: Tensor) -> None:
    """Run a function again, recorded, and go back through what it computed, within the backward() that runs.

    Gradients arrive where they would have, had they been recorded before; leaves' hooks are left to that backward().
    """
    if modes.apart is not None:
        raise ArgumentError("grad: expected a result without checkpoint(), whose gradients only backward() computes")
    begun, recording, outer = next(orders), modes.recording, modes.recomputing
    modes.recording = modes.recomputing = True
    try:
        result = function()
    finally:
        modes.recording, modes.recomputing = recording, outer
    nodes = nodes_since(begun, result)
    nodes[0].grad = grad
    for node in nodes:
        _run_node(node, None, False)


def _run_node(node: Context, uses: dict[int, int] | None, retain_graph: bool) -> None:
    """Run one node's backward, pass its gradients on, and release the saved tensors unless they are to be retained.

    uses: of each leaf with hooks, how often it is still to come; None: they are not called.
    """
    inputs = node.inputs
    for hook in node.hooks if node.grad is not None else ():
        node.grad = hooked(hook, node.grad)
    grads = node.op.backward(node, node.grad) if node.grad is not None else (None,) * len(inputs)
    for x, producer, grad, needed in zip(inputs, node.producers, grads, node.needs, strict=True):
        if not needed:
            continue
        if grad is not None:
            if grad.shape != x.shape:
                raise ArgumentError(
                    f"{node.op.__name__.removesuffix('Op')}: backward gave shape {grad.shape} for an input {x.shape}"
                )
            if producer is None:
                _receive(x, grad)
            else:
                _add_to_node(producer, grad)
        if producer is None and x._hooks and uses is not None:
            uses[id(x)] -= 1
            if not uses[id(x)]:
                _run_hooks(x)
    node.grad = None
    if retain_graph:
        node.owns_grad = node.is_masked = False
        return
    node.release()


def hooked(hook: Callable[[Tensor], Tensor | None], grad: Any) -> Tensor:
    """Return a gradient, or what a hook gives for it."""
    changed = hook(grad)
    if changed is None:
        return grad  # type: ignore[no-any-return]
    if not isinstance(changed, Tensor) or changed.shape != grad.shape:
        given = changed.shape if isinstance(changed, Tensor) else type(changed).__name__
        raise ArgumentError(f"register_hook: expected None or a gradient of shape {grad.shape}, got {given}")
    return changed


def _has_gradient_hooks(leaf: Tensor) -> bool:
    return bool(leaf._hooks) and any(planned is None for _, planned in leaf._hooks or ())


def _receive(leaf: Tensor, grad: Tensor) -> None:
    """Add a gradient to a leaf's, or to what its gradient hooks are to be called with."""
    if not _has_gradient_hooks(leaf):
        _accumulate(leaf, grad)
    elif id(leaf) in modes.pending:
        _add_into(modes.pending[id(leaf)], grad)
    else:
        total = modes.pending[id(leaf)] = empty(grad.device, grad.shape)
        copy_into(total, grad)


def _accumulate(leaf: Tensor, grad: Tensor) -> None:
    """Add a gradient to a leaf's, unless the kernel has written it there already."""
    place = leaf.grad
    if place is not None:
        if place.buffer is grad.buffer:
            return
        _add_into(leaf.gradient_for_update(), grad)
        return
    claimed = leaf.claim_gradient()
    assert claimed is not None
    copy_into(claimed, grad)


def _add_to_node(node: Node, grad: Tensor) -> None:
    if node.grad is None:
        node.grad = grad
        return
    node.is_masked = False
    if node.owns_grad:
        _add_into(node.grad, grad)
    else:  # the first gradient may be shared with another node
        total = empty(grad.device, grad.shape)
        copy_into(total, node.grad)
        _add_into(total, grad)
        node.grad, node.owns_grad = total, True


def _add_into(total: Tensor, grad: Tensor) -> None:
    device, size = total.device, total.numel()
    device.launch(device.kernel("elementwise", "add_into"), *device.grid(size), total.buffer, grad.buffer, size)


def _run_hooks(leaf: Tensor) -> None:
    hooks = leaf._hooks or []
    grad = modes.pending.pop(id(leaf), None)
    if grad is not None:
        for hook, planned in hooks:
            grad = grad if planned is not None else hooked(hook, grad)
        _accumulate(leaf, grad)
    # Planned ones come last: they may send the gradient, which the program's own may change.
    for hook, planned in sorted([each for each in hooks if each[1] is not None], key=_is_planned):
        if not planned:
            leaf.device.on_host(hook, leaf)
            continue
        action = hook(leaf)
        if action is not None:
            leaf.device.on_host(action)


def _is_planned(entry: tuple[object, bool | None]) -> bool:
    return bool(entry[1])


# Tensor.backward() calls this function; tensor.py cannot import this module, which imports it.
Tensor._backward = staticmethod(backward)
