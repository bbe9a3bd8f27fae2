"""Layers for PyTorch models, on the package's ops, with caches for generation.

`LolcatsAttention` takes the place of a Llama-like model's attention and loads the published LoLCATS
checkpoints; `BasedAttention` and `SlidingAttention` are the two mixers of the published Based
models. In bfloat16 and float16 (also by autocast) they call `tk.lolcats`, `tk.based` and
`tk.attention`. In float32 and float64 they call `tk.reference`, whose time and memory grow with the
square of the length: for tests, and for training on a CPU at small sizes.

`Mamba2Mixer` and `GatedDeltaNet` are the recurrent layers of hybrid models, with the parameters of
the published checkpoints: of Mamba-2, Nemotron-H, Granite 4 and Bamba, and of Qwen3-Next, Qwen 3.5
and flash-linear-attention. Their `RecurrentCache` has slots, as continuous batching wants them.

`PagedCache` holds the keys and values of a model's layers in pages, for generation loops of one's
own.

`tk.convert` makes the linear layers of a model `GemmLinear`, `tk.Fp8Linear`, `Nvfp4Linear` or
`Mxfp8Linear`, and returns a `ConvertReport`.
"""

from .based import BasedAttention, BasedCache
from .conversion import ConvertReport, LinearReport
from .gated_delta_net import GatedDeltaNet
from .linear import GemmLinear, Mxfp8Linear, Nvfp4Linear
from .lolcats import FeatureMap, LolcatsAttention, LolcatsCache
from .mamba2 import Mamba2Mixer
from .paged import PagedCache, PagedStep
from .recurrent import RecurrentCache
from .rotary import Rotary
from .sliding import SlidingAttention, SlidingCache

__all__ = [
    "BasedAttention",
    "BasedCache",
    "ConvertReport",
    "FeatureMap",
    "GatedDeltaNet",
    "GemmLinear",
    "LinearReport",
    "LolcatsAttention",
    "LolcatsCache",
    "Mamba2Mixer",
    "Mxfp8Linear",
    "Nvfp4Linear",
    "PagedCache",
    "PagedStep",
    "RecurrentCache",
    "Rotary",
    "SlidingAttention",
    "SlidingCache",
]
