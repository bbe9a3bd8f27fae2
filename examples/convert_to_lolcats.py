"""Converts a small softmax transformer to LoLCATS: `python examples/convert_to_lolcats.py`.

A byte-level language model with softmax attention learns the text of the package's demo. Then its
attention is replaced by `thunderkittens.nn.LolcatsAttention`, whose time and memory are linear in
the length, with the projections it has:

  stage 1, attention transfer    the feature maps and the window's factors learn to give what each
                                 layer's softmax attention gives; all else is frozen
  stage 2, low-rank adaptation   the model learns the text again, by factors of rank 8 beside the
                                 projections alone

and the loss on text that none of this has seen shows what the swap costs, and what the stages win
back. On a GPU the layers call the kernels, in bfloat16; on a CPU in float32 the reference formula.
The method is that of Zhang et al., "LoLCATs: On low-rank linearizing of large language models",
arXiv:2410.10254.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thunderkittens.demo import VOCABULARY, load_text
from thunderkittens.nn import LolcatsAttention, Rotary

HEAD_DIM = 64


@dataclass(frozen=True)
class Size:
    width: int
    layers: int
    heads: int
    kv_heads: int
    features: int
    context: int
    batch: int
    steps: tuple[int, int, int]  # of the softmax model, of stage 1, of stage 2
    held_out: int  # batches


SIZES = {
    "tiny": Size(64, 1, 1, 1, 32, 160, 1, (2, 2, 2), 1),
    "small": Size(128, 2, 2, 1, 32, 256, 4, (200, 80, 80), 8),
    "medium": Size(512, 6, 8, 4, 64, 1024, 16, (1000, 300, 300), 16),
}


class SoftmaxAttention(nn.Module):
    """What is to be replaced: causal grouped-query attention with rotary positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.rotary = Rotary(HEAD_DIM)
        self.q_proj = nn.Linear(size.width, size.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(size.width, size.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(size.width, size.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(size.heads * HEAD_DIM, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = self.rotary(torch.arange(x.shape[1], device=x.device))
        out = softmax(self.rotary.rotate(q, *angles), self.rotary.rotate(k, *angles), v)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return result


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        self.self_attn: nn.Module = SoftmaxAttention(size)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norms[0](x))
        hidden: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + hidden


class Model(nn.Module):
    """Bytes (B, S) to the logits of the next byte (B, S, 256)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.bytes(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def converted(model: Model, size: Size) -> Model:
    """A copy with LoLCATS in place of softmax attention, and the weights it had."""
    model = copy.deepcopy(model)
    for layer in model.layers:
        attention = LolcatsAttention(
            size.width,
            size.heads,
            kv_heads=size.kv_heads,
            head_dim=HEAD_DIM,
            features=size.features,
            window="terrace",
        ).to(next(model.parameters()).device)
        missing, unexpected = attention.load_state_dict(layer.self_attn.state_dict(), strict=False)
        assert not unexpected
        assert all(name.startswith(("feature_map", "window_factors")) for name in missing)
        layer.self_attn = attention
    return model


def transfer_loss(model: Model, tokens: Tensor) -> Tensor:
    """How far each layer's output is from that of softmax attention with the same queries, keys and
    values; the softmax outputs are what the next layer gets."""
    total = torch.zeros((), device=tokens.device)
    x = model.bytes(tokens)
    for layer in model.layers:
        attention = layer.self_attn
        with torch.no_grad():
            q, k, v = attention.queries_keys_values(layer.norms[0](x))
            wanted = softmax(q, k, v)
            x = x + attention.o_proj(wanted.transpose(1, 2).flatten(2))
            x = x + layer.down(F.gelu(layer.up(layer.norms[1](x))))
        total = total + F.mse_loss(attention.mix(q, k, v).float(), wanted.float())
    return 1000 * total


class LowRank(nn.Module):
    """A frozen linear layer plus a product of two small ones, at first zero."""

    def __init__(self, layer: nn.Linear, rank: int = 8, alpha: float = 16.0) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False, device=layer.weight.device)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False, device=layer.weight.device)
        nn.init.zeros_(self.lora_B.weight)
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + self.scale * self.lora_B(self.lora_A(x))
        return result


def adapt(model: Model) -> list[nn.Parameter]:
    """Puts low-rank factors beside the projections; returns them."""
    added: list[nn.Parameter] = []
    for layer in model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            adapter = LowRank(getattr(layer.self_attn, name))
            setattr(layer.self_attn, name, adapter)
            added += [*adapter.lora_A.parameters(), *adapter.lora_B.parameters()]
    return added


class Text:
    """Windows of the text: the first nine tenths to learn from, the rest to be judged by."""

    def __init__(self, size: Size, device: torch.device, seed: int) -> None:
        data = torch.frombuffer(bytearray(load_text()), dtype=torch.uint8)
        cut = len(data) * 9 // 10
        self.size, self.device = size, device
        self.parts = {"train": data[:cut], "held out": data[cut:]}
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, part: str, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        data, size = self.parts[part], self.size
        starts = torch.randint(
            len(data) - size.context, (size.batch, 1), generator=generator or self.generator
        )
        windows = data[starts + torch.arange(size.context + 1)].long().to(self.device)
        return windows[:, :-1], windows[:, 1:]


def text_loss(model: Model, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).float().flatten(0, 1), targets.flatten())


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, where the layers then call the kernels."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def held_out_loss(model: Model, text: Text) -> float:
    generator = torch.Generator().manual_seed(0)  # the same windows every time
    with precision(text.device):
        losses = [
            text_loss(model, *text.batch("held out", generator)) for _ in range(text.size.held_out)
        ]
    return float(torch.stack(losses).mean())


def train(
    model: Model,
    parameters: Iterable[nn.Parameter],
    loss: Callable[[], Tensor],
    steps: int,
    rate: float,
    device: torch.device,
) -> None:
    """Trains some parameters; the others are frozen."""
    chosen = list(parameters)
    model.requires_grad_(False)
    for parameter in chosen:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(chosen, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=max(steps, 2), pct_start=0.1
    )
    for _ in range(steps):
        with precision(device):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert a softmax transformer to LoLCATS.")
    parser.add_argument("--size", choices=SIZES, help="small on a CPU, medium on a GPU by default")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = SIZES[args.size or ("small" if device.type == "cpu" else "medium")]
    torch.manual_seed(args.seed)
    text = Text(size, device, args.seed)
    start = time.perf_counter()

    def report(what: str, model: Model) -> None:
        loss, seconds = held_out_loss(model, text), time.perf_counter() - start
        print(f"{what:42s} loss {loss:.3f}   ({seconds:.0f} s)", flush=True)

    base = Model(size).to(device)
    train(
        base,
        base.parameters(),
        lambda: text_loss(base, *text.batch("train")),
        size.steps[0],
        3e-3,
        device,
    )
    report("softmax attention", base)
    model = converted(base, size)
    report("LoLCATS in its place, as it begins", model)
    maps = [p for layer in model.layers for p in layer.self_attn.conversion_parameters()]
    train(
        model,
        maps,
        lambda: transfer_loss(model, text.batch("train")[0]),
        size.steps[1],
        1e-2,
        device,
    )
    report("after stage 1, attention transfer", model)
    train(
        model,
        adapt(model),
        lambda: text_loss(model, *text.batch("train")),
        size.steps[2],
        2e-3,
        device,
    )
    report("after stage 2, low-rank adaptation", model)


if __name__ == "__main__":
    main()
