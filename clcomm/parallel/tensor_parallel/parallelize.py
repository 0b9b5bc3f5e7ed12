"""parallelize_module: the layers of a model divided between ranks by a plan of name patterns."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

from clcomm.base.errors import ArgumentError
from clcomm.base.host.launcher import launched_rank
from clcomm.comm.collectives.runner import refused_on_all
from clcomm.comm.communicator import Communicator
from clcomm.engine.nn.module import Module
from clcomm.engine.parameter import Parameter
from clcomm.engine.random_stream import RandomStream
from clcomm.parallel.exchange import Exchange
from clcomm.parallel.mesh import require_communicator
from clcomm.parallel.tensor_parallel.shards import PARAMETERS, Cut, Shards
from clcomm.parallel.tensor_parallel.styles import ColumnParallel, SequenceParallel, Style
from clcomm.sync.agreement import require_agreement

M = TypeVar("M", bound=Module)

#: Attributes that are numbers of heads in the modules that people write.
_HEADS = ("heads", "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads")
#: Added to the lowest rank's number: all ranks' common random numbers are none of their own.
_COMMON = 1 << 31


def parallelize_module(module: M, comm: Communicator, plan: Mapping[str, Style] | Style) -> M:
    """Divide the layers of a model between ranks, in place, and return it; collective.

    Every rank first gets rank 0's parameters and buffers, of which it then keeps its parts. `state_dict()` gathers
    whole parameters under their names as before, `load_state_dict()` takes them. From then on dropout draws the same
    numbers on all ranks of `comm`, except in modules that compute with a part of the sequence.

    Args:
        module: of `clcomm.engine`, before it has an optimizer, a Synchronizer or a flat space. All of its inputs are
            the same on all ranks.
        comm: the ranks, such as `mesh["tp"]`.
        plan: styles by patterns of modules' names: `{"blocks.*.mlp.0": ColumnParallel()}`. A `*` stands
            for any text without a dot, "" for the module itself; a single style is for that. Other modules
            compute on all ranks alike.

    Raises:
        ArgumentError: a pattern names no module, or a style does not suit a module or its sizes; on every rank.
        MismatchError: ranks differ in the plan, the model, or their devices' kind or driver, whose kernels round
            otherwise what all ranks compute alike; on every rank.
    """
    require_communicator(comm, "mesh['tp']")
    styles = _agreed_styles(module, comm, {"": plan} if isinstance(plan, Style) else plan)
    _share_values(module, comm)
    modules = dict(module.named_modules())
    ranks = Exchange(comm, next(module.parameters()).device)
    _draw_alike(ranks)
    shards, replaced = Shards(comm), {}
    for name, style in styles.items():
        replaced[id(modules[name])] = style.applied(modules[name], shards, ranks)
    for each in modules.values():
        for key, inner in tuple(each._modules.items()):
            if replaced.get(id(inner), inner) is not inner:
                setattr(each, key, replaced[id(inner)])
    return replaced.get(id(module), module)  # type: ignore[return-value]


def _share_values(module: Module, comm: Communicator) -> None:
    if comm.size > 1:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_from(comm.broadcast(tensor.numpy().copy(), 0, label=PARAMETERS))


def _draw_alike(ranks: Exchange) -> None:
    """Set the device's dropout to the same numbers on all ranks, different from any rank's own."""
    if ranks.size > 1:
        launched = ranks.comm.all_gather_object(launched_rank() or 0, label=PARAMETERS)
        stream = RandomStream.of(ranks.device)
        stream.stand_for(_COMMON + min(launched))
        stream.load(ranks.comm.broadcast(stream.state(), 0, label=PARAMETERS))  # as many uses so far, the same seed


# --- the plan ---


@partial(refused_on_all, runner_of=lambda module, comm, plan: comm.runner)
def _agreed_styles(module: Module, comm: Communicator, plan: Mapping[str, Style]) -> dict[str, Style]:
    """Return the style of each module named by the plan, the same on every rank; collective."""
    if not isinstance(module, Module):
        raise ArgumentError(f"module: expected one of clcomm.engine, got {type(module).__name__}")
    if not isinstance(plan, Mapping) or not plan:
        raise ArgumentError(f"plan: expected a dict of name patterns and styles, got {plan!r}")
    modules, styles = dict(module.named_modules()), dict[str, Style]()
    for name, parameter in module.named_parameters():
        if parameter.slot is not None or parameter.part is not None:
            raise ArgumentError(
                f"module: expected one without an optimizer, a Synchronizer or divided layers, got one with {name!r} "
                "in its place already; call parallelize_module first"
            )
    for pattern, style in plan.items():
        for name in _named(pattern, modules):
            if name in styles and styles[name] != style:
                raise ArgumentError(f"plan[{pattern!r}]: expected one style for each module, got two for {name!r}")
            styles[name] = style
            _check(pattern, name, modules[name], style, comm.size)
    _check_heads(modules, styles)
    _check_sequences(modules, styles)
    _check_shared(modules, styles)
    family = next(module.parameters()).device.family  # another's rounds otherwise what all ranks compute alike
    lines = [f"device: {family}", *(f"{name}: {style}" for name, style in styles.items())]
    lines += [f"{name} {parameter.shape}" for name, parameter in module.named_parameters()]
    require_agreement(comm, "parallelize_module", lines, "give every rank the same model, plan and kind of device")
    return styles


def _named(pattern: str, modules: Mapping[str, Module]) -> list[str]:
    if not isinstance(pattern, str):
        raise ArgumentError(f"plan: expected patterns of names, got {pattern!r}")
    found = [name for name in modules if _fits(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, [name for name in modules if name], 3, 0.0)
        raise ArgumentError(f"plan[{pattern!r}]: expected the name of a module, such as {near}, got one of none")
    return found


def _fits(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return bool(name) == bool(pattern) and len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _check(pattern: str, name: str, module: Module, style: Style, ranks: int) -> None:
    where = f"plan[{pattern!r}]" if pattern == name else f"plan[{pattern!r}]: {name}"
    if not isinstance(style, Style):
        raise ArgumentError(f"{where}: expected a style such as ColumnParallel(), got {style!r}")
    try:
        style.check(module, ranks)
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {type(style).__name__}: {error}") from None


def _check_heads(modules: Mapping[str, Module], styles: Mapping[str, Style]) -> None:
    """Refuse a divided layer in a module with a number of heads that is not divided: it would compute other heads."""
    for name, style in styles.items():
        owner = name.rpartition(".")[0]
        if not isinstance(style, ColumnParallel) or style.gather_output or not name or owner in styles:
            continue
        heads = next((each for each in _HEADS if isinstance(getattr(modules.get(owner), each, None), int)), None)
        if heads is not None:
            raise ArgumentError(
                f"plan: expected an entry for {owner!r} too, whose {heads} {getattr(modules[owner], heads)} would be "
                f"those of the whole: HeadsParallel({heads!r}), or HeadsParallel() if they have nothing to do with "
                f"{name!r}"
            )


def _check_sequences(modules: Mapping[str, Module], styles: Mapping[str, Style]) -> None:
    """Refuse styles that do not compute with a part of the sequence within modules that do."""
    for outer, style in styles.items():
        for name, inner in styles.items() if isinstance(style, SequenceParallel) else ():
            if name != outer and name.startswith(f"{outer}." if outer else "") and not inner.fits_sequence:
                raise ArgumentError(
                    f"plan: expected a sequence_axis for {name!r}, as it is within {outer!r}, which is "
                    f"SequenceParallel, got {inner}"
                )


def _check_shared(modules: Mapping[str, Module], styles: Mapping[str, Style]) -> None:
    """Refuse a parameter of several modules that these do not divide alike."""
    seen: dict[int, tuple[str, Cut | None]] = {}
    for place, parameter, cut in _cuts(modules, styles):
        other, before = seen.setdefault(id(parameter), (place, cut))
        if before != cut:
            raise ArgumentError(
                f"plan: expected {place!r} divided like {other!r}, which it is too, got {_in_words(cut)} and "
                f"{_in_words(before)}"
            )


def _cuts(modules: Mapping[str, Module], styles: Mapping[str, Style]) -> Iterator[tuple[str, Parameter, Cut | None]]:
    for name, module in modules.items():
        cuts = styles[name].cuts(module) if name in styles else {}
        for key, parameter in module._parameters.items():
            yield (f"{name}.{key}" if name else key), parameter, cuts.get(key)


def _in_words(cut: Cut | None) -> str:
    if cut is None:
        return "a whole"
    return f"dimension {cut.axis} divided" + (f" in {cut.sections} sections" if cut.sections > 1 else "")
