"""What snippets are written with: values, functions and their arguments, and arguments: x stands for a tensor."""

from __future__ import annotations

USUAL = (
    "0.5", "-1.25", "2.0", "3.0", "-0.75", "1.5", "0.25", "-2.0", "1.0", "4.0", "-0.5", "0.1", "7.0", "-3.0",
)  # fmt: skip
EDGES = (
    "0.0", "-0.0", "inf", "-inf", "nan", "1e30", "-3e38", "1e-30", "1.0", "-1.0", "0.5", "100.0", "-90.0", "2.5",
)  # fmt: skip
INTEGERS = {
    "int64": ("0", "1", "-1", "2", "3", "7", "-5", "100", "2147483647", "-2147483648"),
    "int32": ("0", "1", "-1", "2", "3", "7", "-5", "100", "2147483647", "-2147483648"),
    "int16": ("0", "1", "-1", "2", "300", "32767", "-32768"),
    "int8": ("0", "1", "-1", "2", "100", "127", "-128"),
    "uint8": ("0", "1", "2", "3", "100", "200", "255"),
}
CASTS = (
    "float()", "long()", "int()", "bool()", "to(torch.float32)", "to(torch.int64)", "to(torch.int32)",
    "to(torch.uint8)", "to(torch.int16)", "to(torch.int8)", "double()", "half()", "short()", "byte()",
)  # fmt: skip
UNARY = (
    "exp", "log", "sqrt", "abs", "neg", "sign", "sin", "cos", "tanh", "sigmoid", "relu", "square", "reciprocal",
    "rsqrt", "floor", "ceil", "round", "trunc", "frac", "log1p", "expm1", "erf", "isnan", "isinf", "isfinite", "atan",
    "log2", "nan_to_num", "exp2", "logical_not", "sgn", "positive", "erfc", "sinh", "cosh", "tan", "asin", "acos",
    "log10", "signbit", "isneginf", "deg2rad",
)  # fmt: skip
FUNCTIONS = (
    "F.relu({x})", "F.softplus({x})", "F.gelu({x})", "F.silu({x})", "F.elu({x})", "F.leaky_relu({x})",
    "F.softmax({x}, -1)", "F.log_softmax({x}, -1)", "F.normalize({x}, dim=-1)", "F.hardtanh({x})", "F.logsigmoid({x})",
    "F.pad({x}, (1, 1))", "torch.logsumexp({x}, -1)", "torch.softmax({x}, dim=0)", "{x}.cumsum(0)", "{x}.cumprod(-1)",
    "{x}.flip(0)", "{x}.roll(1)", "{x}.sort()[0]", "{x}.sort(descending=True)", "{x}.argsort()", "{x}.topk(1)",
    "{x}.clone()", "{x}.clamp(0, 1)", "{x}.clamp(min=-1)", "{x}.clamp(1, 0)", "{x}.clamp(max=nan)", "{x}.tril()",
    "{x}.unique()", "{x}.nonzero()", "{x}.tolist()", "{x}.repeat(2, 1)", "{x}.diff()", "torch.stack([{x}, {x}])",
    "torch.cat([{x}, {x}])", "torch.zeros_like({x})", "torch.full_like({x}, 2)", "{x}.new_zeros(2)",
    "{x}.new_tensor([1, 2])", "{x}.new_full((2,), 2.5)", "torch.where({x} > 0, {x}, 0.0)", "torch.where({x} > 0)",
    "{x}.masked_fill({x} > 0, 1)", "{x}.masked_fill({x} != {x}, 0.0)", "{x}.isnan().any()", "{x}.numel()", "len({x})",
    "{x}.size()", "{x}.shape", "{x}.dtype", "{x}.dim()", "{x}.is_floating_point()", "str({x}.dtype)", "{x}.std(0)",
    "F.one_hot({x})", "torch.bincount({x})", "torch.histc({x})", "{x}.softmax(0)", "torch.atleast_2d({x})",
    "{x}.median()", "{x}.mode()", "{x}.cummax(0)", "torch.clamp({x}, torch.zeros(()), None)", "{x}.quantile(0.5)",
    "bool({x}.any())", "torch.tensor({x})", "{x}.abs().max().item()", "F.glu({x})", "F.layer_norm({x}, {x}.shape[-1:])",
    "{x}.logcumsumexp(0)", "F.threshold({x}, 0.5, -1)", "F.celu({x})", "F.mish({x})", "F.hardswish({x})",
    "F.softsign({x})", "F.selu({x})", "{x}.view(torch.int32)", "torch.einsum('i...->...', {x})",
    "torch.einsum('ii', {x})", "{x}.trace()", "{x}.renorm(2, 0, 1.0)", "torch.complex({x}, {x})",
    "torch.linspace(0, 1, 3)", "torch.arange(5)", "torch.arange(0, 1, 0.25)", "torch.eye(2)", "torch.full((2,), 3)",
    "torch.full((2,), True)", "torch.arange(3.0)", "torch.arange(4, 0, -1)", "torch.arange(1, 2, 0.3)",
    "torch.linspace(3, -1, 4)", "torch.tensor(True)", "torch.tensor([1, 2.5])", "torch.tensor([True, 2])",
    "torch.tensor([])", "torch.tensor([[]])", "torch.logspace(0, 2, 3)", "torch.ones(2, 0).sum(1)",
    "torch.empty(0).mean()", "torch.zeros(0).max()",
)  # fmt: skip
OPERATORS = (
    "+", "-", "*", "/", "//", "%", "**", ">", "<=", "==", "!=", "@", "&", "|", "^", "<<", ">>",
)  # fmt: skip
BINARY = (
    "maximum", "minimum", "fmod", "remainder", "atan2", "hypot", "logaddexp", "xlogy", "fmax", "fmin", "copysign",
    "floor_divide", "true_divide", "eq", "lt", "dot", "outer", "matmul", "bitwise_and", "logical_xor", "gcd",
    "heaviside", "isclose", "allclose", "equal", "cross", "dist", "where",
)  # fmt: skip
REDUCTIONS = (
    "sum", "mean", "prod", "max", "min", "amax", "amin", "any", "all", "argmax", "argmin", "var", "std", "logsumexp",
    "norm", "median", "nansum", "nanmean", "cumsum", "count_nonzero", "aminmax", "var_mean", "std_mean", "unbind",
    "softmax", "sort", "topk", "argsort",
)  # fmt: skip
ARGUMENTS = (
    "", "0", "1", "-1", "dim=0", "dim=-1", "dim=()", "()", "[]", "dim=None", "None", "(0, 1)", "[0, 1]", "dim=(0, -1)",
    "0, 1", "0, True", "0, keepdim=True", "dim=1, keepdim=True", "keepdim=True", "1, False", "(0,), True", "axis=0",
    "axis=1, keepdims=True", "0, 0", "True", "dim=(0, 0)", "5", "-3", "1.0", "dim=0, dtype=torch.float32",
    "dtype=torch.int64", "unbiased=False", "0, False, True", "correction=0", "dim=0, correction=2",
    "dtype=torch.float64", "2", "dim='0'", "dim=torch.tensor(0)", "dim=0, keepdim=1", "0, None", "0.0",
)  # fmt: skip
IN_PLACE = (
    "zero_()", "fill_({n})", "add_({n})", "sub_({n})", "mul_({n})", "div_({n})", "clamp_(min=0)", "clamp_(-1, 1)",
    "neg_()", "abs_()", "exp_()", "sqrt_()", "pow_(2)", "relu_()", "sigmoid_()", "tanh_()", "round_()", "floor_()",
    "add_({v})", "mul_({v})", "copy_({v})", "sub_({v})", "div_({v})", "copy_({n})", "masked_fill_({m}, {n})",
    "index_fill_(0, torch.tensor([0]), {n})", "add_({v}, alpha=2)", "addcmul_({v}, {v})", "lerp_({v}, 0.5)",
    "remainder_(2)", "floor_divide_(2)", "fmod_(2)", "square_()", "reciprocal_()", "log_()", "trunc_()", "set_({v})",
    "index_add_(0, torch.tensor([0]), {v}[:1])", "t_()", "unsqueeze_(0)", "squeeze_()", "transpose_(0, 1)",
    "fill_(True)", "logical_not_()", "uniform_()", "normal_()", "random_(5)", "bernoulli_(1)", "requires_grad_()",
    "index_copy_(0, torch.tensor([0]), {v}[:1])", "scatter_(0, torch.zeros(1, 1, dtype=torch.long), {n})", "eq_({n})",
    "rsub_(1)", "bitwise_and_(1)", "detach_()", "masked_fill_({m}, {v}.sum())",
    "put_(torch.tensor([0]), torch.tensor([{n}]))", "addcdiv_({v}, {v})", "masked_scatter_({m}, {v})", "clip_(0, 1)",
    "nan_to_num_()", "cumsum_(0)", "erf_()", "fill_(torch.tensor({n}))", "mul_({m})",
    "index_put_((torch.tensor([0, 0]),), torch.tensor({n}))", "resize_(2)", "copy_({v}.T)", "swapaxes_(0, 1)",
    "sign_()", "rsqrt_()",
)  # fmt: skip
INITS = (
    "zeros_({x})", "ones_({x})", "constant_({x}, 2)", "uniform_({x}, -1, 1)", "normal_({x})", "xavier_uniform_({x})",
    "orthogonal_({x})", "kaiming_normal_({x})", "eye_({x})", "trunc_normal_({x}, std=0.5)", "sparse_({x}, 0.5)",
    "xavier_normal_({x}, gain=2)", "kaiming_uniform_({x}, a=2)",
)  # fmt: skip
COMPUTED = (
    "{x} * {y}", "{x} * {x}", "{x} / {y}", "{x}.exp()", "{x}.sigmoid()", "{x}.tanh()", "{x} * 2", "{x} + {y}",
    "{x}.relu()", "{x} ** 2", "{x}.view(-1)", "{x}.sum(0)", "{x}[0] * 2", "({x} * {y}).view(-1)", "{x}.softmax(-1)",
    "{x}.clamp(min=0)", "{x}.reshape(-1) * 3", "{x}.abs()", "F.layer_norm({x}, {x}.shape[-1:])", "{x}.max(0)[0]",
    "{x}.prod()", "{x}.std()", "{x}.T @ {y}", "{x}.norm()", "F.normalize({x}, dim=0)", "torch.cat([{x}, {y}])",
    "{x}.expand(2, *{x}.shape)", "{x}.masked_fill({x} > 0, 0.0)", "torch.where({x} > 0, {x}, {y})", "{x}.unsqueeze(0)",
    "{x}.log()", "{x}.sqrt()", "{x}.logsumexp(0)", "{x}.cumsum(0)", "{x}.detach() * {x}", "F.mse_loss({x}, {y})",
    "{x}.clone()", "{x}.cumprod(0)", "torch.maximum({x}, {y})", "{x}.atan2({y})", "torch.logaddexp({x}, {y})",
    "torch.hypot({x}, {y})", "{x}.pow({y})", "{x}.var(0)", "{x}.amax(0)", "{x}.min()", "{x}.sort(0)[0]", "{x}.flip(0)",
    "{x}.median()", "{x}.reciprocal()", "{x}.square()", "F.softplus({x})", "F.gelu({x})", "F.silu({x})",
    "F.smooth_l1_loss({x}, {y})", "F.l1_loss({x}, {y})",
)  # fmt: skip
KEPT = (
    "F.embedding({i}, {w})", "{w}[{i}]", "{w}.index_select(0, {i})", "F.cross_entropy({w}, {i})",
    "F.nll_loss({w}, {i})", "{w}.gather(1, {i}.view(-1, 1))", "{w}.scatter(0, {i}.view(1, -1), 2.0)",
    "{w}.index_add(0, {i}, {w})", "F.cross_entropy({w}, {i}, reduction='sum')", "F.multi_margin_loss({w}, {i})",
    "{w} * {i}", "{w} + {i}", "torch.take_along_dim({w}, {i}.view(-1, 1), 1)", "{w}.repeat_interleave({i}.abs(), 0)",
)  # fmt: skip
ITERATED = (
    "[row.sum() for row in {x}]", "list({x})", "sum({x})", "max({x}.view(-1))", "{x}.tolist()", "len({x})", "[*{x}]",
    "[n * row for n, row in enumerate({x})]", "[a + b for a, b in zip({x}, {x})]", "bool(({x} > 0).all())", "1 in {x}",
    "float({x}.sum())", "int({x}.max())", "f'{{{x}.sum():.2f}}'", "list(reversed({x}))",
    "[float(n) for n in {x}.view(-1)]", "torch.stack([row for row in {x}])", "{x}.unbind()", "{x}.max().item()",
    "sorted({x}.view(-1).tolist())", "[3, 4, 5, 6][{x}.view(-1)[0]]", "torch.tensor([row.sum() for row in {x}])",
    "copy.deepcopy({x}.detach())", "copy.copy({x})", "np.float32({x}.sum())", "range({x}.view(-1)[0])",
    "round({x}.sum().item(), 2)", "{x} is {x}.data", "{x}.sum() == {x}.sum()", "hash({x}) == hash({x})", "{x} == None",
    "{x} != 'a'", "not {x}.any()", "abs({x})", "-{x}", "~{x}", "{x}.__index__()",
)  # fmt: skip
DRAWN = (
    "torch.manual_seed(7)", "{n} = torch.Generator()", "{n} = torch.Generator().manual_seed(7)",
    "{n} = torch.rand(3{g})", "{n} = torch.randn(2, 2{g})", "{n} = torch.randperm(5{g})",
    "{n} = torch.randint(0, 9, (4,){g})", "{n} = torch.initial_seed()",
    "{n} = [list(part) for part in data.random_split(range(10), [7, 3]{g})]", "{n} = torch.rand(1{g}).item()",
    "{n} = [each.tolist() for each in data.DataLoader(torch.arange(6), batch_size=2, shuffle=True{g})]",
    "{n} = list(data.RandomSampler(range(5){g}))", "{n} = torch.empty(3).uniform_(0, 1{g})",
    "{n} = torch.empty(3).normal_(0, 1{g})", "{n} = torch.rand_like(torch.ones(2))", "{n} = nn.Linear(2, 2)",
    "{n} = torch.normal(0.0, 1.0, (3,){g})", "{n} = torch.get_rng_state()", "{n} = torch.random.initial_seed()",
    "{n} = torch.empty(20).random_(5{g})", "{n} = torch.seed()",
    "with torch.random.fork_rng():\n    {n} = torch.rand(2)",
    "{n} = [list(part) for part in data.random_split(range(10), [0.5, 0.5]{g})]",
    "{n} = init.normal_(torch.empty(3){g})", "{n} = torch.randint_like(torch.ones(3), 9)",
    "{n} = torch.default_generator.initial_seed()",
)  # fmt: skip
KEPT_MASKS = (
    "{w}.masked_fill({m}, 0.0)", "torch.where({m}, {w}, {w} * 2)", "{w}[{m}]", "{w} * {m}",
    "F.binary_cross_entropy_with_logits({w}, {m}.float())", "{w}.masked_select({m})",
)  # fmt: skip
ARRAYS = (
    "{a}[0] = 5", "{a} += 1", "{a}[...] = 0", "{n} = torch.from_numpy({a})", "{n} = torch.as_tensor({a})",
    "{n} = torch.tensor({a})", "{n} = {a}.sum()", "{a}.fill(2)",
)  # fmt: skip
AS_ARRAYS = (
    "{x}.numpy()", "{x}.detach().numpy()", "np.asarray({x})", "{x}.data.numpy()", "{part}.numpy()", "{x}.tolist()",
    "np.array({x})", "np.exp({x})", "{x}.cpu().numpy()",
)  # fmt: skip
ARRAY_TYPES = ("float32", "float32", "int64", "float64", "uint8", "int32", "bool_")
#: Parts of an index, with n for a number.
INDICES = (
    "{n}", ":", "{n}:", ":{n}", "::2", "[0, 1]", "[1, 0, 1]", "[{n}]", "None", "...", "torch.tensor([0, 1])",
    "torch.tensor({n})", "[[0], [1]]", "[True, False]", "True", "slice(None)", "np.array([1, 0])", "slice(0, {n})",
    "range(2)", "False", "[]", "(0, 1)", "-1:", ":-1", "torch.tensor([True, False])", "torch.tensor([-1])",
)  # fmt: skip
