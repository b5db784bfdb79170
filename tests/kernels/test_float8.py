"""Products in float8: rounding against its definition, products against rounded factors, torchao against ours."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from shardwise.kernels import float8
from shardwise.kernels.float8 import E4M3, E5M2, Float8, quantize
from shardwise.kernels.linear import defer_weight_gradients, use_float8

SCALINGS = ("tensorwise", "rowwise")
# Format -> bits of the mantissa, smallest normal exponent, largest number (arXiv 2209.05433, table 1).
FORMATS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}


def rounded(values: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
    """`values` scaled, rounded to the nearest number of the format, ties to even, and scaled back, in fp64."""
    bits, least, largest = FORMATS[dtype]
    wide = values.double()
    most = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = (largest / most).float()
    if dim is not None:
        scale = torch.tensor([2.0 ** math.floor(math.log2(each)) for each in scale.flatten()]).view_as(scale)
    scaled = (values.float() * scale).double()
    exponent = scaled.abs().clamp(min=2.0**least).log2().floor()
    unit = torch.exp2(exponent - bits)
    return (scaled / unit).round() * unit / scale.double()


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rounding_is_to_the_nearest_number_of_the_format(dtype: torch.dtype, dim: int | None) -> None:
    torch.manual_seed(0)
    values = torch.randn(24, 40) * torch.logspace(-6, 2, 40)
    found = quantize(values, dtype, dim)
    assert found.values.dtype == dtype
    torch.testing.assert_close(
        found.values.double() / found.scale.double(), rounded(values, dtype, dim), rtol=0, atol=0
    )
    assert float(found.values.float().abs().max()) <= FORMATS[dtype][2]


def test_zeros_stay_zeros_and_what_is_no_number_shows() -> None:
    assert float(quantize(torch.zeros(4, 4), E4M3).values.float().abs().max()) == 0.0
    broken = torch.ones(4, 4)
    broken[1, 2] = math.inf
    assert not torch.isfinite(Float8("emulate", "tensorwise").product(broken, torch.ones(4, 4), "output")).all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("kind", ["linear", "conv1d", "deferred"])
def test_a_layer_multiplies_rounded_factors(kind: str, scaling: str) -> None:
    torch.manual_seed(1)
    module = Conv1D(48, 32) if kind == "conv1d" else nn.Linear(32, 48)
    nn.init.normal_(module.weight)
    later = defer_weight_gradients([module]) if kind == "deferred" else None
    use_float8([module], Float8("emulate", scaling))
    values = torch.randn(2, 16, 32, requires_grad=True)
    output = module(values)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    if later is not None:
        assert module.weight.grad is None
        later.take()()

    rows, columns = (1, 0) if scaling == "rowwise" else (None, None)
    of_gradient = E4M3 if scaling == "rowwise" else E5M2
    weight = module.weight.detach().T if kind == "conv1d" else module.weight.detach()
    x, g = values.detach().flatten(0, 1), gradient.flatten(0, 1)
    expected = rounded(x, E4M3, rows) @ rounded(weight.T, E4M3, columns) + module.bias.detach().double()
    of_values = rounded(g, of_gradient, rows) @ rounded(weight, E4M3, columns)
    of_weight = rounded(g.T, of_gradient, rows) @ rounded(x, E4M3, columns)
    given = module.weight.grad.T if kind == "conv1d" else module.weight.grad
    for ours, theirs in ((output, expected), (values.grad, of_values), (given, of_weight)):
        torch.testing.assert_close(ours.detach().flatten(0, -2).double(), theirs, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.bias.grad, g.sum(0))
    plain = (x @ weight.T + module.bias.detach()).double()
    error = float((output.detach().flatten(0, 1).double() - plain).abs().max() / plain.abs().max())
    assert 1e-3 < error < 0.1  # it has been rounded, and no more than that


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_torchao_emulates_the_same_numbers(scaling: str, gathered: bool, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(2)
    x, weight, g = (torch.randn(*shape).to(dtype) for shape in ((48, 32), (64, 32), (48, 64)))
    ours = Float8("emulate", scaling, gathered)
    for a, b, what in ((x, weight.T, "output"), (g, weight, "input gradient"), (g.T, x, "weight gradient")):
        theirs = float8._by_torchao(a, b, what, ours, emulate=True)
        assert torch.equal(ours.product(a, b, what), theirs)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_layer_of_torchao_has_the_same_gradients(scaling: str) -> None:
    """torchao's own Float8Linear with its recipe, against ours: recipes are theirs, not our reading of them."""
    ao = pytest.importorskip("torchao.float8")
    from dataclasses import replace

    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(32, 64, bias=False))
    ours = nn.Linear(32, 64, bias=False)
    ours.load_state_dict(plain[0].state_dict())
    config = replace(ao.Float8LinearConfig.from_recipe_name(scaling), emulate=True)
    theirs = ao.convert_to_float8_training(plain, config=config)
    use_float8([ours], Float8("emulate", scaling))
    values = [torch.randn(2, 16, 32) for _ in range(1)] * 2
    inputs = [value.clone().requires_grad_() for value in values]
    outputs = [module(value) for module, value in zip((theirs, ours), inputs)]
    assert torch.equal(*outputs)
    gradient = torch.randn_like(outputs[0])
    for output in outputs:
        output.backward(gradient)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    assert torch.equal(theirs[0].weight.grad, ours.weight.grad)


@pytest.mark.slow
@pytest.mark.timeout(600)  # the compiler is slow on a busy machine
@pytest.mark.parametrize("door", ["emulate", "torchao"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_compiled_layer_has_the_same_gradients(scaling: str, door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao's tensors are behind one node of the graph, in its emulation here."""
    if door == "torchao":
        pytest.importorskip("torchao")
        monkeypatch.setattr(
            Float8, "product", lambda self, a, b, what: float8._by_torchao(a, b, what, self, emulate=True)
        )
    torch.manual_seed(4)
    modules = [nn.Linear(32, 64) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    use_float8(modules, Float8("emulate", scaling))
    values = torch.randn(2, 16, 32)
    for run in (modules[0], torch.compile(modules[1].forward, fullgraph=True)):
        run(values).square().sum().backward()
    for ours, theirs in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
