"""`tk.sdpa` in models that DDP and FSDP wrap: two ranks, each with half of a batch, train on this
package's kernels, here on the emulator, and have the gradients of the whole batch on PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import thunderkittens as tk
from helpers import ranks

OP = "_scaled_dot_product_flash_attention_for_cpu"
LAYERS, WIDTH, HEADS = 2, 32, 2
CASES: dict[str, Callable[[Any], None]] = {}


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2).bfloat16()
        out = F.scaled_dot_product_attention(*qkv.chunk(3, dim=1), is_causal=True)
        return x + self.o(out.transpose(1, 2).flatten(2).to(x.dtype))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def compare(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    model.load_state_dict(plain.state_dict())
    x = torch.randn(2 * ranks.RANKS, 17, WIDTH)
    loss_of(plain, x).backward()

    model = wrap(model)
    tk.sdpa_report(reset=True)
    with tk.sdpa(), tk.emulate():
        loss_of(model, x.chunk(ranks.RANKS)[dist.get_rank()]).backward()
    calls = {(c.op, c.taken): c.calls for c in tk.sdpa_report(reset=True)}
    assert calls == {(OP, True): LAYERS, (f"{OP}_backward", True): LAYERS}
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        error = (gradient - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.02


@case
def ddp(mesh) -> None:
    compare(nn.parallel.DistributedDataParallel)


@case
def fsdp(mesh) -> None:
    from torch.distributed.fsdp import fully_shard

    def wrap(model: nn.Module) -> nn.Module:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    compare(wrap)


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return ranks.faults_of(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.mark.emulator
@pytest.mark.timeout(360)
@pytest.mark.parametrize("name", CASES)
def test_case(faults, name):
    for of_rank in faults:
        assert name not in of_rank, of_rank[name]


if __name__ == "__main__":
    ranks.main(CASES)
