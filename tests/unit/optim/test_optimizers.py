"""Our optimizers against their equations written out plainly, and against torch where torch has the same."""

import copy

import pytest
import torch
from torch import nn

from fullspeed.base.errors import ConfigError, UsageError
from fullspeed.optim.lamb import Lamb
from fullspeed.optim.lion import Lion
from fullspeed.optim.muon import MuonWithAuxAdam, flag_muon_params, muon_param_groups
from fullspeed.optim.newton_schulz import orthogonalize
from fullspeed.optim.uncorrected_adam import UncorrectedAdam

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(4, 6), (5,), (3, 2, 2, 2)]


def make_params(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step, dtype, shapes=SHAPES):
    generator = torch.Generator().manual_seed(10 + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def run(optimizer, params, steps=5):
    for step in range(steps):
        for param, grad in zip(params, gradients(step, params[0].dtype, [p.shape for p in params]), strict=True):
            param.grad = grad
        optimizer.step()


def check(params, update, steps=5, tolerance=None):
    """Compare `params` after `steps` with `update(p, g, state, t)` iterated in fp64 from the same start."""
    dtype = params[0].dtype
    expected = [param.detach().double() for param in make_params(dtype, [p.shape for p in params])]
    states = [{} for _ in expected]
    for step in range(steps):
        grads = gradients(step, dtype, [p.shape for p in params])
        expected = [update(p, g.double(), s, step + 1) for p, g, s in zip(expected, grads, states, strict=True)]
    bound = tolerance or TOLERANCE[dtype]
    for param, value in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach().double(), value, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lion(dtype):
    params = make_params(dtype)
    run(Lion(params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1), params)

    def update(p, g, state, t):
        m = state.get("m", torch.zeros_like(p))
        state["m"] = 0.99 * m + 0.01 * g
        return p * (1 - 0.01 * 0.1) - 0.01 * torch.sign(0.9 * m + 0.1 * g)

    check(params, update)


def moments(state, g, t, betas, correct=True):
    state["m"] = betas[0] * state.get("m", torch.zeros_like(g)) + (1 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", torch.zeros_like(g)) + (1 - betas[1]) * g * g
    if not correct:
        return state["m"], state["v"]
    return state["m"] / (1 - betas[0] ** t), state["v"] / (1 - betas[1] ** t)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("correct", "inside"), [(True, False), (False, False), (True, True)])
def test_lamb(dtype, correct, inside):
    eps = 1e-3  # visible, so that its place matters
    params = make_params(dtype)
    optimizer = Lamb(
        params,
        lr=0.02,
        bias_correction=correct,
        eps=eps,
        eps_inside_sqrt=inside,
        weight_decay=0.1,
        max_coeff=1.1,
    )
    run(optimizer, params)
    ratios = []

    def update(p, g, state, t):
        m, v = moments(state, g, t, (0.9, 0.999), correct)
        u = m / ((v + eps).sqrt() if inside else v.sqrt() + eps) + 0.1 * p
        ratios.append((p.norm() / u.norm()).clamp(0.01, 1.1).item())
        return p - 0.02 * ratios[-1] * u

    check(params, update)
    assert optimizer.get_lamb_coeffs() == pytest.approx(ratios[-3:], rel=max(TOLERANCE[dtype], 1e-5))
    if correct:
        assert {ratio == 1.1 for ratio in ratios} == {True, False}  # the bound acts, and not always


def test_lamb_ratio_is_one_for_zero_norms():
    zero = nn.Parameter(torch.zeros(3))
    still = nn.Parameter(torch.ones(3))
    optimizer = Lamb([zero, still], lr=0.5)
    zero.grad, still.grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0]
    torch.testing.assert_close(zero.detach(), torch.full((3,), -0.5))
    assert torch.equal(still.detach(), torch.ones(3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [False, True])
def test_uncorrected_adam(dtype, decoupled):
    params = make_params(dtype)
    optimizer = UncorrectedAdam(params, lr=0.01, eps=1e-3, weight_decay=0.1, decoupled_weight_decay=decoupled)
    run(optimizer, params)

    def update(p, g, state, t):
        if decoupled:
            p = p * (1 - 0.01 * 0.1)
        else:
            g = g + 0.1 * p
        m, v = moments(state, g, t, (0.9, 0.999), correct=False)
        return p - 0.01 * m / (v.sqrt() + 1e-3)

    check(params, update)


def polynomial_of_singular_values(matrix, steps=5):
    """What five quintic steps do, through the SVD: an independent way to the same result."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / (torch.linalg.matrix_norm(matrix.double()) + 1e-7).unsqueeze(-1)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag_embed(s) @ vh


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(8, 8), (4, 32), (32, 4), (3, 6, 5), (1, 7), (7, 1)])
def test_newton_schulz(method, shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    result = orthogonalize(matrix, method)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), polynomial_of_singular_values(matrix), rtol=1e-4, atol=1e-4)


def test_newton_schulz_of_zero_is_zero():
    assert torch.equal(orthogonalize(torch.zeros(3, 4)), torch.zeros(3, 4))


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon(method, dtype):
    shapes = [(4, 6), (6, 4), (3, 5, 4), (4, 2, 3, 3)]
    params = make_params(dtype, shapes)
    group = {"params": params, "use_muon": True, "lr": 0.02, "weight_decay": 0.1, "ns_method": method}
    run(MuonWithAuxAdam([group]), params)

    def update(p, g, state, t):
        state["m"] = 0.95 * state.get("m", torch.zeros_like(p)) + 0.05 * g
        d = 0.95 * state["m"] + 0.05 * g
        d = d.flatten(1) if d.ndim == 4 else d
        o = polynomial_of_singular_values(d) * max(1.0, d.size(-2) / d.size(-1)) ** 0.5
        return p * (1 - 0.02 * 0.1) - 0.02 * o.view_as(p)

    check(params, update, tolerance=1e-4 if dtype == torch.float32 else 3e-2)


def test_muon_agrees_with_torch():
    mine, theirs = make_params(shapes=[(12, 8), (6, 20)]), make_params(shapes=[(12, 8), (6, 20)])
    run(MuonWithAuxAdam([{"params": mine, "use_muon": True, "lr": 0.02}]), mine)
    run(torch.optim.Muon(theirs, lr=0.02, weight_decay=0.0), theirs)
    for a, b in zip(mine, theirs, strict=True):  # torch iterates in bf16
        torch.testing.assert_close(a, b, rtol=0, atol=3e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_aux_adam_is_adamw(dtype):
    mine, theirs = make_params(dtype), make_params(dtype)
    run(MuonWithAuxAdam([{"params": mine, "use_muon": False, "weight_decay": 0.1}]), mine)
    run(torch.optim.AdamW(theirs, lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1), theirs)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_Embedding = nn.Embedding(5, 4)
        self.block = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 5, bias=False)


def test_flags_and_groups():
    model = Model()
    vars(model.block.bias)["use_muon"] = False
    flag_muon_params(model.named_parameters())
    flags = {fqn: param.use_muon for fqn, param in model.named_parameters()}
    assert [fqn for fqn, flag in flags.items() if flag] == ["block.weight"]
    muon, adam = muon_param_groups(model.parameters(), {"lr": 0.1, "adam_lr": 0.2, "betas": (0.8, 0.9)})
    assert muon == {"params": [model.block.weight], "use_muon": True, "lr": 0.1, "momentum": 0.95,
                    "weight_decay": 0.0, "ns_method": "gram"}  # fmt: skip
    assert (adam["lr"], adam["betas"], adam["eps"], adam["use_muon"]) == (0.2, (0.8, 0.9), 1e-10, False)
    assert len(adam["params"]) == 3
    assert muon_param_groups(model.named_parameters(), {})[0]["lr"] == 0.02


def test_groups_keep_their_own_entries():
    model = Model()
    flag_muon_params(model.named_parameters())
    given = [
        {"params": list(model.block.parameters()), "lr": 0.5, "name": "body"},
        {"params": [model.lm_head.weight]},
    ]
    groups = muon_param_groups(given, {"muon_lr": 0.1})
    assert [(g["use_muon"], g["lr"], g.get("name")) for g in groups] == [
        (True, 0.5, "body"), (False, 0.5, "body"), (False, 3e-4, None),
    ]  # fmt: skip


def test_a_user_flag_wins():
    weight = nn.Parameter(torch.zeros(2, 2))
    weight.use_muon = False
    flag_muon_params([("layer.weight", weight)])
    assert weight.use_muon is False


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([{"params": [nn.Parameter(torch.zeros(2, 2))]}], "use_muon"),
        (
            [{"params": [nn.Parameter(torch.zeros(2, 2))], "use_muon": True, "ns_method": "x"}],
            "gram or standard",
        ),
        ([{"params": [nn.Parameter(torch.zeros(2, 2))], "use_muon": True, "momentum": 1.0}], "momentum"),
        ([{"params": [nn.Parameter(torch.zeros(2, 2))], "use_muon": False, "betas": (0.9, 1.0)}], "betas"),
    ],
)
def test_muon_refuses(groups, text):
    with pytest.raises(ConfigError, match=text):
        MuonWithAuxAdam(groups)


def test_muon_refuses_vectors_and_unflagged_parameters():
    vector = nn.Parameter(torch.ones(3))
    vector.grad = torch.ones(3)
    with pytest.raises(UsageError, match="matrices only"):
        MuonWithAuxAdam([{"params": [vector], "use_muon": True}]).step()
    with pytest.raises(UsageError, match="flag_muon_params"):
        muon_param_groups([vector], {})


MAKERS = {
    "lion": lambda params: Lion(params, lr=0.01),
    "lamb": lambda params: Lamb(params, lr=0.01),
    "adam": lambda params: UncorrectedAdam(params, lr=0.01),
    "muon": lambda params: MuonWithAuxAdam(
        [{"params": params[:1], "use_muon": True}, {"params": params[1:], "use_muon": False}]
    ),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_resuming_changes_nothing(make):
    first, second = make_params(), make_params()
    saved, resumed = make(first), make(second)
    run(saved, first, steps=2)
    for param, value in zip(second, first, strict=True):
        param.data.copy_(value.data)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    run(saved, first, steps=3)
    run(resumed, second, steps=3)
    for a, b, start in zip(first, second, make_params(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, start)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_closure_missing_and_sparse_gradients(make):
    params = make_params()
    optimizer = make(params)
    before = [param.detach().clone() for param in params]

    def closure():
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == before[0].square().sum().item()
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1])
    params[0].grad = torch.zeros(params[0].shape).to_sparse()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()


@pytest.mark.parametrize("kind", [Lion, Lamb, UncorrectedAdam])
def test_all_bad_values_are_named(kind):
    with pytest.raises(ConfigError) as caught:
        kind([nn.Parameter(torch.zeros(1))], lr=-1.0, betas=(1.0, 0.5), weight_decay=-0.1)
    assert [fault.path for fault in caught.value.faults] == ["lr", "weight_decay", "betas"]


def test_lamb_coefficients_must_be_ordered():
    with pytest.raises(ConfigError, match="min_coeff"):
        Lamb([nn.Parameter(torch.zeros(1))], min_coeff=2.0, max_coeff=1.0)
