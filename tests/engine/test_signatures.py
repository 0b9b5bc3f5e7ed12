"""Positional arguments bind to the parameters that PyTorch's names bind them to, or are refused by their type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clcomm import optim
from clcomm.engine import Tensor, nn
from clcomm.engine import functional as F

torch = pytest.importorskip("torch")

#: This package's names for PyTorch's.
NAMES = {
    "x": "input", "a": "input", "b": "other", "logits": "input", "prediction": "input", "log_probabilities": "input",
    "targets": "target", "indices": "input", "table": "weight", "axis": "dim", "keepdims": "keepdim",
    "tensors": "input", "sizes": "split_size_or_sections", "widths": "pad",
}  # fmt: skip
#: Where another argument is refused by its type: pairs are no flat list of numbers.
REFUSED = {"F.pad: value", "F.split: x"}
RECURRENT = ["bias", "batch_first", "dropout", "bidirectional"]
#: PyTorch's that are built in and have no signature, from its manual.
MANUAL = {
    "RNN": ["input_size", "hidden_size", "num_layers", "nonlinearity", *RECURRENT],
    **{name: ["input_size", "hidden_size", "num_layers", *RECURRENT] for name in ("LSTM", "GRU")},
    "conv2d": ["input", "weight", "bias", "stride", "padding", "dilation", "groups"],
    "conv_transpose2d": ["input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"],
    "max_pool2d": ["input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"],
    "avg_pool2d": ["input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"],
    "avg_pool1d": ["input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"],
    "max_pool1d": ["input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"],
    "conv1d": ["input", "weight", "bias", "stride", "padding", "dilation", "groups"],
    "conv_transpose1d": ["input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"],
    **{name: ["input", "output_size"] for name in ("adaptive_max_pool2d", "adaptive_avg_pool1d")},
    "conv3d": ["input", "weight", "bias", "stride", "padding", "dilation", "groups"],
    "conv_transpose3d": ["input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"],
    "max_pool3d": ["input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"],
    "avg_pool3d": ["input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"],
    **{name: ["input", "output_size"] for name in ("adaptive_max_pool1d", "adaptive_max_pool3d")},
    "unfold": ["input", "kernel_size", "dilation", "padding", "stride"],
    **{name: ["input", "dim", "index", "src"] for name in ("scatter", "scatter_add")},
    "median": ["input", "dim", "keepdim"],
    "ctc_loss": [
        "log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity",
    ],
    "pixel_shuffle": ["input", "upscale_factor"],
    "pixel_unshuffle": ["input", "downscale_factor"],
    "scaled_dot_product_attention": ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale"],
    "linear": ["input", "weight", "bias"],
    "gelu": ["input", "approximate"],
    "gather": ["input", "dim", "index"],
    "index_select": ["input", "dim", "index"],
    "flatten": ["input", "start_dim", "end_dim"],
    "sum": ["input", "dim", "keepdim"],
    "mean": ["input", "dim", "keepdim"],
    "logsumexp": ["input", "dim", "keepdim"],
    "stack": ["input", "dim"],
    "concat": ["input", "dim"],
    "matmul": ["input", "other"],
    "reshape": ["input", "shape"],
    **{name: ["input", "other"] for name in ("add", "sub", "mul", "div", "maximum", "minimum")},
    **{name: ["input", "dim", "keepdim"] for name in ("max", "min", "argmax", "argmin", "prod", "any", "all")},
    **{name: ["input", "diagonal"] for name in ("tril", "triu")},
    **{name: ["input", "dim", "descending"] for name in ("sort", "argsort")},
    **{name: ["input", "dim"] for name in ("squeeze", "unsqueeze", "cumsum", "cat")},
    **{name: ["input"] for name in ("exp", "log", "sqrt", "rsqrt", "abs", "square", "sin", "cos", "erf")},
    "clamp": ["input", "min", "max"],
    "pow": ["input", "exponent"],
    "topk": ["input", "k", "dim", "largest", "sorted"],
    "norm": ["input", "p", "dim", "keepdim"],
    **{name: ["input", "dim", "unbiased", "keepdim"] for name in ("var", "std", "var_mean", "std_mean")},
    "chunk": ["input", "chunks", "dim"],
    "where": ["condition", "input", "other"],
    "masked_fill": ["input", "mask", "value"],
    "one_hot": ["input", "num_classes"],
    "broadcast_to": ["input", "size"],
    "einsum": ["equation", "operands"],
    **{f"atleast_{n}d": ["input"] for n in (1, 2, 3)},
    "unique": ["input", "sorted", "return_inverse", "return_counts"],
}  # fmt: skip


def positional(function: Callable[..., Any]) -> list[str] | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in parameters if each.kind in kinds and each.name != "self"]


def pairs() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the name of each callable that both have, and the names of their positional parameters."""
    for name in nn.__all__:
        theirs, ours = getattr(torch.nn, name, None), getattr(nn, name)
        if inspect.isclass(theirs) and inspect.isclass(ours):
            yield f"nn.{name}", positional(ours.__init__) or [], MANUAL.get(name) or positional(theirs.__init__) or []
    for name in F.__all__:
        theirs = getattr(torch.nn.functional, name, None) or getattr(torch, name, None)
        names = MANUAL.get(name) or (positional(theirs) if callable(theirs) else None)
        if names is not None:
            yield f"F.{name}", positional(getattr(F, name)) or [], names
    for name in ("SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "RAdam", "RMSprop"):
        theirs, ours = getattr(torch.optim, name), getattr(optim, name)
        yield f"optim.{name}", positional(ours.__init__) or [], positional(theirs.__init__) or []


def test_every_positional_parameter_is_pytorchs_at_that_place():
    checked, wrong = 0, []
    for name, ours, theirs in pairs():
        checked += 1
        for place, own in enumerate(ours):
            theirs_there = theirs[place] if place < len(theirs) else None
            if theirs_there not in (own, NAMES.get(own)) and f"{name}: {own}" not in REFUSED:
                wrong.append(f"{name}: {own} where PyTorch has {theirs_there}")
    assert checked > 60
    assert wrong == []


#: Defaults that mean the same: corners are not aligned, -100 is ignored where the host knows it, and so on.
SAME = {
    "align_corners": (False, None), "ignore_index": (None, -100), "value": (0.0, None), "modules": ((), None),
    "values": ((), None),
}  # fmt: skip


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return {}
    return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}


def test_every_default_is_pytorchs():
    wrong, checked = [], 0
    places = ((nn, torch.nn), (F, torch.nn.functional), (nn.init, torch.nn.init))
    for library, pytorch in places:
        for name in library.__all__:
            ours, theirs = getattr(library, name), getattr(pytorch, name, None)
            if inspect.isclass(ours) and inspect.isclass(theirs):
                ours, theirs = ours.__init__, theirs.__init__
            known = defaults(theirs) if callable(theirs) else {}
            for own, value in defaults(ours).items() if known else ():
                given = known.get(own, known.get(NAMES.get(own, own), value))
                checked += 1
                if value != given and SAME.get(own) != (value, given) and own != "activation":
                    wrong.append(f"{name}: {own}={value!r} where PyTorch has {given!r}")
    assert checked > 200 and wrong == []


@pytest.mark.parametrize(("ours", "theirs"), [
    (lambda: nn.Conv2d(3, 8, 3, 1, 2, 2), lambda: torch.nn.Conv2d(3, 8, 3, 1, 2, 2)),
    (lambda: nn.Conv2d(16, 16, 3, 1, 1, 1, 4, False), lambda: torch.nn.Conv2d(16, 16, 3, 1, 1, 1, 4, False)),
    (lambda: nn.ConvTranspose2d(4, 8, 3, 2, 1, 1, 2), lambda: torch.nn.ConvTranspose2d(4, 8, 3, 2, 1, 1, 2)),
    (lambda: nn.ConvTranspose2d(4, 8, 3, 2, 1, 1, 2, False, 2),
     lambda: torch.nn.ConvTranspose2d(4, 8, 3, 2, 1, 1, 2, False, 2)),
])  # fmt: skip
def test_a_layer_made_by_position_is_pytorchs(ours, theirs):
    own, other = ours(), theirs()
    state = {name: value.numpy() for name, value in other.state_dict().items()}
    own.load_state_dict(state)
    x = torch.rand(2, state["weight"].shape[1] * getattr(other, "groups", 1), 9, 9)
    if isinstance(other, torch.nn.ConvTranspose2d):
        x = torch.rand(2, state["weight"].shape[0], 9, 9)
    result = own(Tensor(x.numpy())).numpy()
    assert result == pytest.approx(other(x).detach().numpy(), rel=1e-4, abs=1e-5)
