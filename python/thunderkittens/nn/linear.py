"""Linear layers on the package's products, which `tk.convert` makes of `torch.nn.Linear`.

They are made of layers that exist, in place: a layer stays the same object and becomes one of these
classes. `GemmLinear`, as `tk.Fp8Linear`, keeps the layer's parameters. `Nvfp4Linear` and
`Mxfp8Linear` keep the weight in that format, as buffers, for inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import _memory as memory
from ..ops._fp8_linear import Fp8Linear, fp8_linear
from ..ops._registration import transform_active
from ..ops.gemm import gemm
from ..ops.mxfp8_gemm import mxfp8_gemm
from ..ops.mxfp8_quantize import mxfp8_quantize
from ..ops.nvfp4_gemm import nvfp4_gemm
from ..ops.nvfp4_prepare import nvfp4_prepare
from ..ops.nvfp4_quantize import nvfp4_quantize
from ..reference.nvfp4_prepare import Nvfp4Weight

HALVES = (torch.bfloat16, torch.float16)
PAIR = ("gate_proj", "up_proj")


class GemmLinear(nn.Linear):
    """`torch.nn.Linear` by `tk.gemm`, in bfloat16 and float16, also by autocast; in other dtypes
    it is PyTorch's. Parameters are those of `torch.nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) to (..., N)."""
        if not _multiplies(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        if input.dim() < 2:
            return gemm(input[None], self.weight.t(), bias=self.bias)[0]
        return gemm(input, self.weight.t(), bias=self.bias)


def _multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether `tk.gemm` takes the operands, after autocast's conversion."""
    kind = x.device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind) in HALVES
    return x.dtype in HALVES and weight.dtype is x.dtype


class _Quantized(nn.Module):
    """What layers with weights of a format share. `to` and its kin move the weight, and leave it in
    its format."""

    in_features: int
    out_features: int
    bias: nn.Parameter | None

    def become(self, weight: Tensor, bias: Tensor | None) -> None:
        """Takes over a weight (N, K), and the bias as it is."""
        self.out_features, self.in_features = weight.shape
        self.register_parameter("bias", bias)  # type: ignore[arg-type]
        with torch.no_grad():
            for name, part in self.quantized(weight.detach()).items():
                self.register_buffer(name, part)

    @staticmethod
    def quantized(weight: Tensor) -> dict[str, Tensor]:
        """The buffers that stand for a weight."""
        raise NotImplementedError

    @staticmethod
    def product(x: Tensor, parts: dict[str, Tensor], n: int, bias: Any, activation: Any) -> Tensor:
        """activation(x @ weight.T + bias) for rows x and n rows of the weight."""
        raise NotImplementedError

    def forward(self, input: Tensor, activation: str | None = None) -> Tensor:
        """(..., K) to (..., N)."""
        kind = input.device.type
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        rows = input.reshape(-1, input.shape[-1])
        parts = {name: x for name, x in self._buffers.items() if x is not None}
        bias = None if self.bias is None else self.bias.to(input.dtype)
        out = self.product(rows, parts, self.out_features, bias, activation)
        return out.view(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype is not old.dtype:
                self._buffers[name] = old.to(new.device)
        return self


class Nvfp4Linear(_Quantized):
    """A linear layer with a weight of NVFP4, by `tk.nvfp4_gemm`: for activations of bfloat16 or
    float16, which are not quantised. Buffers: `data` and `global_scale` of an `Nvfp4Weight`. The
    gradients of activations and bias flow, the weight has none."""

    @staticmethod
    def quantized(weight: Tensor) -> dict[str, Tensor]:
        made = nvfp4_prepare(*nvfp4_quantize(weight))
        return {"data": made.data, "global_scale": made.global_scale}

    @staticmethod
    def product(x: Tensor, parts: dict[str, Tensor], n: int, bias: Any, activation: Any) -> Tensor:
        kept = Nvfp4Weight(**parts, rows=n, columns=x.shape[1])
        return nvfp4_gemm(x, kept, bias=bias, activation=activation)


class Mxfp8Linear(_Quantized):
    """A linear layer with a weight of MXFP8, by `tk.mxfp8_gemm`. Activations, of bfloat16 or
    float16, are quantised to MXFP8 in each call. Buffers: `data` and `scale`. No gradients."""

    @staticmethod
    def quantized(weight: Tensor) -> dict[str, Tensor]:
        data, scale = mxfp8_quantize(weight)
        return {"data": data, "scale": scale}

    @staticmethod
    def product(x: Tensor, parts: dict[str, Tensor], n: int, bias: Any, activation: Any) -> Tensor:
        data, scale = mxfp8_quantize(x.detach())
        narrow = bias is None or bias.dtype is torch.bfloat16
        options: dict[str, Any] = {"path": "rebased", "out_dtype": x.dtype}
        if narrow:
            options |= {"bias": bias, "activation": activation}
        out = mxfp8_gemm(data, parts["data"].t(), scale, parts["scale"], **options)
        if narrow:
            return out
        out = out + bias
        return out if activation is None else F.silu(out)


# SwiGLU: down_proj(silu(gate_proj(x)) * up_proj(x)).


class _Joined(torch.autograd.Function):
    """Two weights that lie behind each other, as one. The result shares the first weight's version
    counter alone, so the second is kept where a product keeps the result (`kept`): autograd then
    refuses a gradient after a change in place of either."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor, kept: bool) -> Tensor:
        ctx.rows = first.shape[0]
        if kept:
            ctx.save_for_backward(second)
        return _behind(first, second)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.saved_tensors  # noqa: B018, the access compares the versions
        return grads[0][: ctx.rows], grads[0][ctx.rows :], None


class _Unchanged(torch.autograd.Function):
    """x. Autograd refuses its gradient after a change in place of `kept`, a weight that learns
    nothing and is read through another tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.saved_tensors  # noqa: B018, the access compares the versions
        return grads[0], None


def _behind(first: Tensor, second: Tensor) -> Tensor:
    rows, columns = first.shape
    return first.detach().as_strided((rows + second.shape[0], columns), (columns, 1))


def adjacent(first: Tensor, second: Tensor) -> bool:
    """Whether the second weight lies right behind the first."""
    return (
        first.is_contiguous()
        and second.is_contiguous()
        and first.dtype is second.dtype
        and second.data_ptr() == first.data_ptr() + first.nbytes
        and second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    )


def lay_behind(first: Tensor, second: Tensor, fresh: bool = False) -> bool:
    """Lays two weights behind each other, so that they are one without a copy; whether they are.
    Parameters stay the objects that they are. Those that lie in memory of others stay there, unless
    they are fresh, as those of a copy are."""
    if not all(memory.has_addresses(x) and type(x.data) is Tensor for x in (first, second)):
        return False
    if adjacent(first, second):
        return True
    if first.dtype is not second.dtype or first.device != second.device:
        return False
    if not fresh and any(x.untyped_storage().nbytes() != x.nbytes for x in (first, second)):
        return False
    both = torch.cat([first.data, second.data])
    first.data, second.data = both[: first.shape[0]], both[first.shape[0] :]
    return True


def _joined(first: Tensor, second: Tensor, x: Tensor, kept: bool) -> tuple[Tensor | None, Tensor]:
    """The two weights as one, and x: in place, or, where a gradient is worth a copy, copied. `kept`
    says whether the product keeps the weight for its gradient."""
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (first, second, x))
    traced = torch.compiler.is_compiling() or transform_active()
    if not traced and memory.has_addresses(first) and adjacent(first, second):
        if wanted and (first.requires_grad or second.requires_grad):
            return _Joined.apply(first, second, kept), x  # type: ignore[no-untyped-call]
        if wanted and kept:
            x = _Unchanged.apply(x, second)  # type: ignore[no-untyped-call]
        return _behind(first, second), x
    return (torch.cat([first, second]) if wanted and first.dtype is second.dtype else None), x


def _swiglu_gemm(gate: Any, up: Any, x: Tensor) -> Tensor:
    weight, x = _joined(gate.weight, up.weight, x, kept=True)
    if weight is None:
        opened: Tensor = gemm(x, gate.weight.t(), bias=gate.bias, activation="silu")
        return opened.mul(gemm(x, up.weight.t(), bias=up.bias))
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
    return gemm(x, weight.t(), bias=bias, activation="swiglu")


def _swiglu_fp8(gate: Fp8Linear, up: Fp8Linear, x: Tensor) -> Tensor:
    weight, x = _joined(gate.weight, up.weight, x, kept=False)
    if weight is None:
        product: Tensor = F.silu(gate(x)) * up(x)
        return product
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
    options = {"grad_dtype": gate.grad_dtype, "accurate": gate.accurate}
    z = fp8_linear(x, weight, bias, scaling=gate.scaling, **options)  # type: ignore[arg-type]
    opened, value = z.chunk(2, -1)
    return F.silu(opened) * value


class FusedSwiglu:
    """What a class of SwiGLU layers gets: gate and up as one product, if nothing watches them."""

    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj, self.up_proj
        kind = type(gate)
        if kind is not type(up) or x.dim() < 2 or any(_watched(m) for m in (gate, up)):
            plain: Tensor = super().forward(x)  # type: ignore[misc]
            return plain
        if kind is GemmLinear and _multiplies(x, gate.weight):
            hidden = _swiglu_gemm(gate, up, x)
        elif kind is Fp8Linear:
            hidden = _swiglu_fp8(gate, up, x)
        elif kind in (Nvfp4Linear, Mxfp8Linear):
            hidden = gate(x, activation="silu") * up(x)
        else:
            plain = super().forward(x)  # type: ignore[misc]
            return plain
        out: Tensor = self.down_proj(hidden)
        return out

    def _apply(self: Any, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[misc]
        self._lay()
        return self

    def __setstate__(self: Any, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        self._lay(fresh=True)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # The class is made at run time, so it is made again where a copy or a pickle is.
        return _empty, (base_of(type(self)),), self.__dict__

    def _lay(self: Any, fresh: bool = False) -> None:
        gate, up = (self._modules.get(name) for name in PAIR)
        if isinstance(gate, nn.Linear) and isinstance(up, nn.Linear):
            lay_behind(gate.weight, up.weight, fresh)


def _watched(module: nn.Module) -> bool:
    """Whether something wants to see the calls of a layer."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


_fused_classes: dict[type[nn.Module], type[nn.Module]] = {}


def fused_class(base: type[nn.Module]) -> type[nn.Module]:
    """A class of SwiGLU layers whose products are fused."""
    if base not in _fused_classes:
        _fused_classes[base] = type(base.__name__, (FusedSwiglu, base), {"__doc__": base.__doc__})
    return _fused_classes[base]


def base_of(made: type[nn.Module]) -> type[nn.Module]:
    """The class that `fused_class` was given."""
    return made.__mro__[made.__mro__.index(FusedSwiglu) + 1]


def _empty(base: type[nn.Module]) -> nn.Module:
    made = fused_class(base)
    return made.__new__(made)


def is_swiglu(module: nn.Module) -> bool:
    """Whether a layer is down_proj(silu(gate_proj(x)) * up_proj(x)) of three linear layers without
    more: by its parts, and by what it gives for two rows. These are scaled so that the activation
    gets numbers around 1 and 4, where others differ from SiLU by more than a rounding, however
    small the weights are. Weights of zero, which tell nothing, are no such layer."""
    parts = module._modules
    if set(parts) - {"act_fn"} != {*PAIR, "down_proj"} or "forward" in module.__dict__:
        return False
    gate, up, down = (parts[name] for name in (*PAIR, "down_proj"))
    if not all(type(m) is nn.Linear and not _watched(m) for m in (gate, up, down)):
        return False
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return False
    wave = torch.arange(2 * gate.in_features, device=gate.weight.device).view(2, -1).float().sin()
    dtype = gate.weight.dtype
    training = module.training
    try:
        with torch.no_grad():
            size = gate(wave.to(dtype)).float().square().mean(1, keepdim=True).sqrt()
            x = (wave * wave.new_tensor([[1.0], [4.0]]) / size).to(dtype)
            module.training = True  # where dropout would show
            given = module(x)
            expected = down(F.silu(gate(x)) * up(x))  # type: ignore[misc]
    except (TypeError, RuntimeError, ValueError):
        return False
    finally:
        module.training = training
    if not isinstance(given, Tensor) or given.shape != expected.shape:
        return False
    norm = expected.float().norm(dim=1)
    error = (given.float() - expected.float()).norm(dim=1)
    return bool(((norm > 0) & (error <= 0.02 * norm)).all())
