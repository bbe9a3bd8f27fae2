"""`tk.convert`: what becomes of a model's linear layers, and that all else stays as it was."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import thunderkittens as tk
from thunderkittens import emulation
from thunderkittens.nn import linear as layers

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {
    "gemm": tk.nn.GemmLinear,
    "fp8": tk.Fp8Linear,
    "nvfp4": tk.nn.Nvfp4Linear,
    "mxfp8": tk.nn.Mxfp8Linear,
}
# Errors of the formats: steps of 2^-4 and 2^-2 of elements, on normal numbers.
TOLERANCE = {"gemm": 0.01, "fp8": 0.06, "mxfp8": 0.06, "nvfp4": 0.15}


class Swiglu(nn.Module):
    """The MLP of Llama, Qwen and Mistral."""

    def __init__(self, width, hidden, bias=False):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Geglu(Swiglu):
    def __init__(self, *args):
        super().__init__(*args)
        self.act_fn = nn.GELU()


class Forgetful(Swiglu):
    def forward(self, x):
        hidden = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(F.dropout(hidden, 0.5, self.training))


class Adapter(nn.Linear):
    """As an adapter's layer, a subclass of torch.nn.Linear."""


class Model(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.embed = nn.Embedding(11, 64)
        self.first = nn.Linear(64, 64)
        self.mlp = Swiglu(64, 96, bias)
        self.adapter = Adapter(64, 64)
        self.head = nn.Linear(64, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.first(self.embed(tokens))
        x = self.adapter(x + self.mlp(x))
        return self.head(x)


@pytest.fixture
def model(device):
    return Model().to(device, BF16)


@pytest.fixture
def tokens(device):
    return torch.randint(0, 11, (2, 5), device=device)


def relative(x, y):
    return float((x.detach().double() - y.detach().double()).norm() / y.detach().double().norm())


@pytest.mark.parametrize("linear", KINDS)
def test_outputs_and_report(device, linear, model, tokens):
    expected = copy.deepcopy(model).double()(tokens)
    before = {id(m): type(m) for m in model.modules()}
    report = tk.convert(model, linear, batch=tokens)
    assert [id(m) for m in model.modules()] == list(before)
    assert relative(model(tokens), expected) < 2 * TOLERANCE[linear]
    left = {x.name: x.reason for x in report.left}
    weight_only = linear in ("nvfp4", "mxfp8")
    assert list(left) == ["adapter", *["head"] * weight_only]
    assert "Adapter" in left["adapter"]
    assert "embed.weight" in left.get("head", "embed.weight")
    assert type(model.adapter) is Adapter
    for x in report.converted:
        assert type(model.get_submodule(x.name)) is KINDS[linear]
        assert x.kind == linear
        assert x.fused == (x.name in ("mlp.gate_proj", "mlp.up_proj"))
        assert 0 < x.error < TOLERANCE[linear]
        assert x.name in str(report)
    assert "left: it is a Adapter" in str(report)
    ratio = report.memory_after / report.memory_before
    assert ratio < 0.75 if weight_only else ratio == 1
    again = tk.convert(model, linear)
    assert (again.converted, again.left) == tuple(
        tuple(type(x)(**{**vars(x), "error": None}) for x in part)
        for part in (report.converted, report.left)
    )


@pytest.mark.parametrize("linear", ["gemm", "fp8"])
@pytest.mark.parametrize("bias", [False, True])
def test_training(device, linear, bias, tokens):
    """State, parameters, ties and an optimizer that was made before stay; gradients are right."""
    model = Model(bias).to(device, BF16)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    exact = copy.deepcopy(model).double()
    tk.convert(model, linear)
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert layers.adjacent(model.mlp.gate_proj.weight, model.mlp.up_proj.weight)
    for m in (model, exact):
        m(tokens).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert relative(p.grad, q.grad) < 4 * TOLERANCE[linear], name
    optimizer.step()
    assert not torch.equal(model.mlp.up_proj.weight, state["mlp.up_proj.weight"])
    model.load_state_dict(state)
    assert layers.adjacent(model.mlp.gate_proj.weight, model.mlp.up_proj.weight)
    fresh = Model(bias).to(device, BF16)
    fresh.load_state_dict(model.state_dict())
    report = tk.convert(model, None)
    assert not report.left or [x.name for x in report.left] == ["adapter"]
    assert [type(m) for m in model.modules()] == [type(m) for m in fresh.modules()]
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in fresh.modules()]
    assert torch.equal(model(tokens), fresh(tokens))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("changed", ["gate_proj", "up_proj"])
def test_no_gradient_after_a_change_in_place(device, changed, frozen):
    """As of torch.nn.Linear: both weights are one operand, and either may have changed."""
    for convert in (False, True):
        mlp = Swiglu(64, 96, False).to(device, BF16)
        mlp.requires_grad_(not frozen)
        if convert:
            tk.convert(mlp, "gemm")
        out = mlp(torch.randn(4, 64, device=device, dtype=BF16, requires_grad=True))
        with torch.no_grad():
            getattr(mlp, changed).weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
            out.sum().backward()


@pytest.mark.parametrize("linear", KINDS)
def test_copies_pickles_and_casts(device, linear, model, tokens):
    tk.convert(model, linear)
    expected = model(tokens)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    # PyTorch loads no tensors of fp8 dtypes from plain pickles.
    pickled = [] if linear == "mxfp8" else [pickle.loads(pickle.dumps(model))]
    for other in (
        *pickled,
        copy.deepcopy(model),
        torch.load(buffer, weights_only=False),
        copy.deepcopy(model).to("cpu").to(device),
        copy.deepcopy(model).float().to(BF16),
    ):
        assert isinstance(other.mlp, Swiglu)
        assert type(other.first) is KINDS[linear]
        assert torch.equal(other(tokens), expected)
        if linear in ("gemm", "fp8"):
            assert layers.adjacent(other.mlp.gate_proj.weight, other.mlp.up_proj.weight)
            assert other.mlp.gate_proj.weight.data_ptr() != model.mlp.gate_proj.weight.data_ptr()
    restored = Model().to(device, BF16)
    tk.convert(restored, linear)
    restored.load_state_dict(model.state_dict())
    assert torch.equal(restored(tokens), expected)


@pytest.mark.parametrize("linear", ["gemm", "mxfp8"])
def test_compiled(device, linear, model, tokens):
    tk.convert(model, linear)
    model.head = nn.Identity()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(tokens)
    torch.testing.assert_close(compiled(tokens), expected, atol=2e-2, rtol=2e-2)
    if linear == "gemm":  # weights that do not lie behind each other
        model.mlp.up_proj.weight = nn.Parameter(model.mlp.up_proj.weight.clone())
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                torch.testing.assert_close(model(tokens), expected, atol=2e-2, rtol=2e-2)


def test_what_is_fused(device):
    """Only what is a plain SwiGLU, and only while nothing watches its halves."""
    blocks = {"plain": Swiglu(64, 96), "gelu": Geglu(64, 96), "dropout": Forgetful(64, 96)}
    model = nn.ModuleDict(blocks).eval().to(device, BF16)
    report = tk.convert(model)
    fused = {x.name for x in report.layers if x.fused}
    assert fused == {"plain.gate_proj", "plain.up_proj"}
    x = torch.randn(3, 64, device=device, dtype=BF16)
    once, seen = model["plain"](x), []
    handle = model["plain"].gate_proj.register_forward_hook(lambda *args: seen.append(args[2]))
    torch.testing.assert_close(model["plain"](x), once, atol=2e-2, rtol=2e-2)
    assert seen[0].shape == (3, 96)
    handle.remove()
    tk.convert(model, "fp8", filter=lambda layer, name: name != "plain.up_proj")
    torch.testing.assert_close(model["plain"](x), once, atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize("factor", [1e-4, 1.0, 30.0, 0.0])
def test_what_is_fused_does_not_depend_on_the_size_of_weights(factor):
    """Weights of zero, which may be loaded later, do not tell one activation from another."""
    blocks = nn.ModuleDict({"plain": Swiglu(64, 96, True), "gelu": Geglu(64, 96, True)}).to(BF16)
    with torch.no_grad():
        for parameter in blocks.parameters():
            parameter *= factor
    fused = {x.name for x in tk.convert(blocks).layers if x.fused}
    assert fused == ({"plain.gate_proj", "plain.up_proj"} if factor else set())


def test_float32_runs_by_autocast(device, tokens):
    model = Model().to(device)
    expected = model(tokens)
    report = tk.convert(model, batch=tokens)
    assert [x.name for x in report.left] == ["adapter"]
    assert torch.equal(model(tokens), expected)
    with torch.autocast(device, BF16):
        out = model(tokens)
        assert model.first(model.embed(tokens)).dtype is BF16
    assert relative(out, expected) < 0.02
    out.float().sum().backward()
    assert model.mlp.gate_proj.weight.grad.dtype is FP32
    assert "float32" in tk.convert(Model().to(device), "nvfp4").left[0].reason


def test_what_is_refused(device, model):
    report = tk.convert(nn.Sequential(nn.Linear(24, 8, device=device, dtype=BF16)), "nvfp4")
    assert "24 input features" in report.left[0].reason
    assert tk.convert(nn.Linear(24, 8, device=device, dtype=torch.float64)).left[0].reason
    report = tk.convert(model, "nvfp4", filter=lambda layer, name: name == "first")
    assert [x.name for x in report.converted] == ["first"]
    assert "filter" in {x.name: x for x in report.left}["mlp.up_proj"].reason
    assert "NVFP4" in tk.convert(model, "gemm").left[0].reason
    with pytest.raises(ValueError, match="meta device"):
        tk.convert(nn.Linear(8, 8, device="meta"))
    with pytest.raises(ValueError, match="linear is 'int8'"):
        tk.convert(model, "int8")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        tk.convert(model.adapter.weight)
    with pytest.raises(TypeError, match="filter must be callable"):
        tk.convert(model, filter="head")


def test_inference_formats(device):
    """Gradients that pass a layer of NVFP4, and float16 with a bias in MXFP8."""
    layer = nn.Linear(64, 48, device=device, dtype=BF16)
    weight = layer.weight.detach().double()
    tk.convert(layer, "nvfp4")
    x = torch.randn(4, 64, device=device, dtype=BF16, requires_grad=True)
    layer(x).sum().backward()
    assert relative(x.grad, weight.sum(0).expand(4, -1)) < TOLERANCE["nvfp4"]
    assert layer.bias.grad.tolist() == [4.0] * 48
    layer = nn.Linear(64, 48, device=device, dtype=torch.float16)
    x = torch.randn(4, 64, device=device, dtype=torch.float16)
    expected = layer.double()(x.double())
    layer.half()
    tk.convert(layer, "mxfp8")
    assert relative(layer(x), expected) < TOLERANCE["mxfp8"]
    assert layer(x).dtype is torch.float16
    assert layer(x[0]).shape == (48,)


@pytest.mark.skipif(emulation.problem is not None, reason="no emulator")
@pytest.mark.parametrize("linear", KINDS)
def test_on_the_emulator(linear):
    """The kernels themselves, against the formulas."""
    model, tokens = Model().to(BF16), torch.randint(0, 11, (1, 3))
    tk.convert(model, linear)
    expected = model(tokens)
    with tk.emulate():
        out = model(tokens)
    assert relative(out, expected) < 0.02


def test_transformers_model(device, tmp_path):
    """A model of transformers, which saves and loads its weights as before."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    model = model.to(device, BF16).eval()
    tokens = torch.randint(0, 32, (1, 7), device=device)
    expected = model(tokens).logits
    report = tk.convert(model, batch={"input_ids": tokens})
    assert len(report.converted) == 8
    assert sum(x.fused for x in report.layers) == 2
    assert relative(model(tokens).logits, expected) < 0.02
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    for (name, x), y in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(x, y.cpu()), name
