"""The longer statements of snippets: losses of odd labels, modules and what is done to them, short trainings."""

from __future__ import annotations

import random

MODULES = (
    "nn.Linear(3, 2)", "nn.Linear(3, 2, bias=False)", "nn.BatchNorm1d(3)", "nn.LayerNorm(3)", "nn.Embedding(4, 3)",
    "nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))", "nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))",
    "nn.PReLU()", "nn.GRUCell(3, 2)", "nn.LSTM(3, 2)", "nn.Conv1d(2, 3, 1)",
    "nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))", "nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])",
    "nn.MultiheadAttention(4, 2)", "nn.Embedding(4, 3, padding_idx=1)",
    "nn.ParameterList([nn.Parameter(torch.ones(2))])", "nn.Bilinear(2, 3, 2)", "nn.GroupNorm(1, 3)",
    "nn.Sequential(*[nn.Linear(3, 3)] * 2)",
)  # fmt: skip
EDITS = (
    "{n} = list({m}.state_dict())", "{n} = [tuple(each.shape) for each in {m}.parameters()]",
    "{m}.state_dict()[[*{m}.state_dict()][0]].zero_()", "{m}.load_state_dict({m}.state_dict())",
    "for each in {m}.parameters():\n    each.data.fill_(0.5)",
    "for each in {m}.parameters():\n    each.requires_grad_(False)",
    "for each in {m}.parameters():\n    init.zeros_(each)", "{n} = sum(each.numel() for each in {m}.parameters())",
    "{n} = copy.deepcopy({m})", "for each in {m}.parameters():\n    each.data[0] = 1.0",
    "for each in {m}.parameters():\n    init.uniform_(each.data[:1], 2, 3)", "{m}.eval()", "{m}.train()",
    "with torch.no_grad():\n    for each in {m}.parameters():\n        each[0].mul_(2)", "{n} = {m}.training",
    "{m}.zero_grad()", "{m}.requires_grad_(False)",
    "with torch.no_grad():\n    for each in {m}.parameters():\n        each.add_(1)",
    "{m}.weight.data = torch.zeros({m}.weight.shape)", "{m}.weight = nn.Parameter(torch.ones({m}.weight.shape))",
    "{m}.bias.data.zero_()", "{m}.weight.data[:, 0] = 3.0", "{m}.weight.data.view(-1)[0] = 3.0",
    "{m}[0].weight.data.T[0] = 2.0", "{n} = {m}(torch.ones(2, 3))", "{m}(torch.randn(2, 3)).sum().backward()",
    "{m}(torch.randn(2, 3)).sum().backward()", "{m}(torch.tensor([0, 1, 1])).sum().backward()",
    "{n} = {m}(torch.tensor([[0, 3]]))", "{n} = {m}(torch.randn(2, 2, 3))", "{m}[1].running_mean[0] = 5.0",
    "{m}.running_mean.fill_(2)", "{n} = {m}.running_mean * 1", "{m}.momentum = 0.5", "{m}.eps = 1.0",
    "{m}[0].weight = {m}[-1].weight", "{m}[1].weight = {m}[0].weight",
    "{n} = [name for name, _ in {m}.named_parameters()]", "{n} = len(list({m}.parameters()))", "{m}.half()",
    "{m}.double()", "{m}.apply(lambda each: init.ones_(each.weight) if isinstance(each, nn.Linear) else None)",
    "{n} = [name for name, _ in {m}.named_modules()]", "optim.SGD({m}.parameters(), lr=0.1).step()",
    "optim.SGD({m}.parameters(), lr=0.1, weight_decay=0.1).step()",
    "optim.Adam({m}.parameters(), weight_decay=0.1).step()", "optim.AdamW({m}.parameters(), 0.1).step()",
    "{n} = nn.utils.clip_grad_norm_({m}.parameters(), 0.1)", "nn.utils.clip_grad_value_({m}.parameters(), 0.1)",
    "{n} = {m}.weight.grad", "{m}.weight.grad[0].zero_()", "{m}.weight.grad *= 2", "{m}.weight.grad.data[:, 0] = 0",
    "for each in {m}.parameters():\n    each.grad = None", "{m}.register_buffer('more', torch.ones(2))",
    "{n} = [name for name, _ in {m}.named_buffers()]", "{m}.new = nn.Parameter(torch.zeros(2))", "del {m}.bias",
    "{m}.bias = None", "init.orthogonal_({m}.weight.data[:2])", "init.xavier_uniform_({m}.weight[:1])",
    "{n} = nn.utils.parameters_to_vector({m}.parameters())", "{m}.weight.requires_grad = False", "{m}.train(False)",
    "{n} = {m}(torch.full((2, 3), inf))", "{m}.weight.data.clamp_(-0.1, 0.1)", "{m}.weight.data = {m}.weight.data * 2",
    "{n} = {m}.weight.T",
)  # fmt: skip
LOSSES = (
    "F.cross_entropy({x}, {c}{r})", "F.cross_entropy({x}, {c}, ignore_index={i}{r})",
    "F.cross_entropy({x}, {c}, label_smoothing=0.1{r})", "F.nll_loss({x}.log_softmax(1), {c}{r})",
    "F.cross_entropy({x}, {c}, weight=torch.tensor([1.0, 0.0, 2.0]){r})", "F.nll_loss({x}, {c}, ignore_index={i}{r})",
    "F.binary_cross_entropy({p}, {t}{r})", "F.binary_cross_entropy_with_logits({x}, {t}{r})",
    "F.binary_cross_entropy_with_logits({x}, {t}, pos_weight=torch.tensor([2.0, 1.0, 0.0]){r})",
    "nn.BCELoss()({p}, {t})", "nn.CrossEntropyLoss(ignore_index={i})({x}, {c})", "F.mse_loss({x}, {t}{r})",
    "F.kl_div({x}.log_softmax(1), {t}{r})", "F.kl_div({x}, {t}, log_target=True{r})", "F.l1_loss({x}, {t}{r})",
    "F.smooth_l1_loss({x}, {t}{r})", "F.smooth_l1_loss({x}, {t}, beta=0.0{r})", "F.huber_loss({x}, {t}, delta=0.5{r})",
    "F.cross_entropy({x}, {t}{r})", "F.multi_margin_loss({x}, {c}{r})", "F.hinge_embedding_loss({x}, {t}{r})",
    "F.poisson_nll_loss({x}, {t}{r})", "F.poisson_nll_loss({x}, {t}, log_input=False, full=True{r})",
    "F.gaussian_nll_loss({x}, {t}, {t}.abs(){r})", "F.soft_margin_loss({x}, {t}{r})",
    "F.cosine_embedding_loss({x}, {t}, torch.tensor([1, -1]){r})", "F.margin_ranking_loss({x}, {t}, {t}{r})",
    "F.triplet_margin_loss({x}, {t}, {x} * 2{r})", "F.mse_loss({x}, torch.ones(3){r})",
    "F.cross_entropy({x}, torch.tensor(1){r})", "F.cross_entropy({x}[0], {c}[0]{r})", "F.embedding({c}, {x})",
    "F.embedding({c}, {x}, padding_idx=0)", "F.cross_entropy({x}, {c}.float(){r})",
    "F.nll_loss({x}, {c}.view(-1, 1){r})", "F.one_hot({c}, 3)", "F.one_hot({c})",
    "F.multilabel_soft_margin_loss({x}, {t}{r})", "F.cross_entropy({x}, {c}[:1]{r})", "F.mse_loss({x}, {t}[:1]{r})",
    "F.cross_entropy({x}, {c}, weight=torch.ones(2){r})", "F.logsigmoid({x})", "F.softmax({x}, 1)",
    "F.gumbel_softmax({x}).sum(1)", "F.cross_entropy({x}.view(1, 3, 2), {c}.view(1, 2){r})",
    "F.cosine_similarity({x}, {t})", "F.normalize({x})", "F.pairwise_distance({x}, {t})",
    "F.cross_entropy({x}, {c}, {w}{r})",
)  # fmt: skip


def loss(rng: random.Random, name: str) -> str:
    """Return a statement with a loss, and its gradient or not."""
    labels = rng.choice(("0, 2", "1, 1", "2, -100", "-100, -100", "1, 3", "-1, 2", "0, 1", "5, 1"))
    usual = ("0.5", "-1.5", "2.0", "0.1", "-0.3", "1.0")
    values = rng.choice(
        (
            usual,
            usual,
            ("100.0", "-100.0", "0.0", "1.0"),
            ("inf", "-inf", "0.0", "1.0"),
            ("nan", "1.0"),
            ("1e30", "-1e30", "3.0"),
        )
    )
    shares = rng.choice((("0.0", "1.0"), ("0.2", "0.7", "0.5"), ("0.0", "1.0", "0.5", "1e-30"), ("0.3", "1.2", "-0.1")))
    targets = rng.choice((("0.0", "1.0"), ("0.2", "0.7", "0.5"), ("1.0", "-1.0"), ("0.0", "3.0")))

    def rows(drawn: tuple[str, ...]) -> str:
        return ", ".join(f"[{', '.join(rng.choice(drawn) for _ in range(3))}]" for _ in range(2))

    function = rng.choice(LOSSES)
    given = {
        "x": "x", "c": "c", "t": "t", "p": "p", "i": rng.choice(("0", "1", "2", "-1", "-100", "255")),
        "w": "torch.tensor([0.0, 0.0, 0.0])",
        "r": rng.choice(("", "", ", reduction='sum'", ", reduction='none'", ", reduction='mean'",
                         ", reduction='batchmean'")),
    }  # fmt: skip
    lines = [f"x = torch.tensor([{rows(values)}], requires_grad=True)"]
    lines += [f"c = torch.tensor([{labels}])"] * ("{c}" in function) + [f"t = torch.tensor([{rows(targets)}])"] * (
        "{t}" in function
    )
    lines += [f"p = torch.tensor([{rows(shares)}], requires_grad=True)"] * ("{p}" in function)
    lines.append(f"{name} = {function.format(**given)}")
    if rng.random() < 0.7:
        lines.append(f"{name}.sum().backward()")
    return "\n".join(lines)


def module(rng: random.Random, name: str) -> str:
    """Return a statement with a new module."""
    return f"{name} = {rng.choice(MODULES)}"


def edit(rng: random.Random, module: str, name: str) -> str:
    """Return a statement about a module."""
    return rng.choice(EDITS).format(m=module, n=name)


OPTIMIZERS = (
    "optim.SGD({p}, lr=0.1)", "optim.SGD({p}, lr=0.1, momentum=0.9)", "optim.SGD({p}, lr=0.1, weight_decay=0.1)",
    "optim.Adam({p}, lr=0.01)", "optim.AdamW({p}, lr=0.01, weight_decay=0.1)",
    "optim.Adam({p}, lr=0.01, weight_decay=0.1)", "optim.SGD({p}, lr=0.1, momentum=0.9, nesterov=True)",
    "optim.RMSprop({p}, lr=0.01)", "optim.Adagrad({p}, lr=0.1)",
)  # fmt: skip
#: A network, what it is given, and losses that fit.
CLASSES = (
    "F.cross_entropy(model(x), y)", "F.nll_loss(F.log_softmax(model(x), 1), y)",
    "F.cross_entropy(model(x), y, ignore_index=1)", "F.cross_entropy(model(x), y, reduction='sum')",
    "F.cross_entropy(model(x), y, label_smoothing=0.1)", "F.multi_margin_loss(model(x), y)",
)  # fmt: skip
VALUES = (
    "F.mse_loss(model(x), y)", "F.smooth_l1_loss(model(x), y)", "F.binary_cross_entropy_with_logits(model(x), y)",
    "F.binary_cross_entropy(model(x).sigmoid(), y)", "F.l1_loss(model(x), y)",
    "nn.BCELoss()(torch.sigmoid(model(x)), y)",
)  # fmt: skip
NETWORKS = (  # no bias before a norm over the batch: its gradient is rounding alone
    ("nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 3))", "torch.randn(4, 3)"),
    ("nn.Sequential(nn.Linear(3, 5, bias=False), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))", "torch.randn(4, 3)"),
    ("nn.Linear(3, 3)", "torch.randn(4, 3)"),
    ("nn.Sequential(nn.Embedding(6, 4), nn.Flatten(), nn.Linear(8, 3))", "torch.randint(0, 6, (4, 2))"),
    ("nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.GELU(), nn.Linear(3, 3))", "torch.randn(4, 3)"),
)  # fmt: skip
#: What happens late in a course: to labels, inputs or weights.
LATE_LABELS = (
    "y[1] = -100", "y[1] = 3", "y[1] = -1", "y[1] = 1", "y[:] = -100", "y.fill_(1)",
)  # fmt: skip
LATE_VALUES = (
    "y[1] = 1.0", "y[0, 0] = nan", "y[0, 0] = 2.0", "y.zero_()", "y[:, 1] = 0.0",
)  # fmt: skip
LATE = (
    "x[0, 0] = 6", "x[0] = nan", "x[0, 0] = 1e30", "list(model.parameters())[0].data[0] = 0.0",
    "list(model.parameters())[0].data.mul_(0.5)", "list(model.parameters())[0].requires_grad_(False)", "model.eval()",
    "for each in model.parameters():\n            each.data.clamp_(-0.2, 0.2)",
    "for group in optimizer.param_groups:\n            group['lr'] = 0.01", "optimizer.zero_grad(set_to_none=False)",
    "model.load_state_dict(kept)", "with torch.no_grad():\n            list(model.parameters())[-1].fill_(1)",
    "init.zeros_(list(model.parameters())[0])", "x = x[:2]; y = y[:2]", "list(model.parameters())[-1].grad = None",
    "x.mul_(2)", "torch.manual_seed(3)", "optimizer.state_dict()", "x = x * 0",
)  # fmt: skip


def course(rng: random.Random) -> str:
    """Return a training of some steps, in which something odd happens late."""
    network, inputs = rng.choice(NETWORKS)
    is_of_classes = rng.random() < 0.6
    targets = (
        "torch.randint(0, 3, (4,))"
        if is_of_classes
        else rng.choice(("torch.rand(4, 3)", "(torch.rand(4, 3) > 0.5).float()"))
    )
    loss = rng.choice(CLASSES if is_of_classes else VALUES)
    steps = rng.choice((3, 6, 14, 18))
    lates = [
        rng.choice((LATE_LABELS if is_of_classes else LATE_VALUES) if rng.random() < 0.5 else LATE)
        for _ in range(rng.choice((1, 1, 2)))
    ]
    heads = rng.random() < 0.2
    if heads:
        return _heads(rng)
    parameters = rng.choice(
        ("model.parameters()",) * 3
        + ("list(model.parameters())[:1]", "[{'params': [each]} for each in model.parameters()]")
    )
    lines = [f"model = {network}"]
    if rng.random() < 0.1 and network.startswith("nn.Sequential(nn.Linear(3, 3)"):
        lines.append("model[-1].weight = model[0].weight")
    lines += ["kept = copy.deepcopy(model.state_dict())",
              f"optimizer = {rng.choice(OPTIMIZERS).format(p=parameters)}", "losses = []",
              "def step(x, y):", f"    loss = {loss}"]  # fmt: skip
    if rng.random() < 0.15:
        lines.append(f"    {rng.choice(('y.zero_()', 'x.zero_()', 'y += 1', 'x.add_(1)'))}")
    lines += ["    loss.backward()", "    return loss"]
    lines += ["step = replayed(step)"] * (rng.random() < 0.6)
    lines += [f"for n in range({steps}):", f"    x = {inputs}", f"    y = {targets}"]
    lines += [f"    if n == {steps - 2 - place}:\n        {late}" for place, late in enumerate(lates)]
    body = [
        rng.choice(
            (
                "    optimizer.zero_grad()",
                "    optimizer.zero_grad()",
                "    model.zero_grad()",
                "    optimizer.zero_grad(set_to_none=False)",
                "    pass",
            )
        )
    ]
    body.append(rng.choice(("    losses.append(step(x, y).item())", "    step(x, y)", "    loss = float(step(x, y))")))
    if rng.random() < 0.2:
        body.append(rng.choice(("    nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
                                "    for each in model.parameters():\n        each.grad.mul_(0.5)",
                                "    nn.utils.clip_grad_value_(model.parameters(), 0.01)",
                                "    list(model.parameters())[0].grad[0].zero_()",
                                "    list(model.parameters())[0].grad[0] = 0")))  # fmt: skip
    return "\n".join([*lines, *body, "    optimizer.step()"])


def _heads(rng: random.Random) -> str:
    optimizer = rng.choice(OPTIMIZERS).format(p="[*trunk.parameters(), *heads.parameters()]")
    step = rng.choice(
        ("optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", "trunk.zero_grad(); heads.zero_grad()")
    )
    return f"""\
trunk, heads = nn.Linear(3, 4), nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
optimizer = {optimizer}
for n in range({rng.choice((4, 8, 14))}):
    {step}
    heads[n {rng.choice(("% 2", "// 4 % 2", "% 3 // 2"))}](trunk(torch.randn(4, 3))).square().mean().backward()
    optimizer.step()"""
