"""Attention layers for PyTorch models, on the package's ops, with caches for generation.

`LolcatsAttention` takes the place of a Llama-like model's attention and loads the published LoLCATS
checkpoints; `BasedAttention` and `SlidingAttention` are the two mixers of the published Based
models. In bfloat16 and float16 (also by autocast) they call `tk.lolcats`, `tk.based` and
`tk.attention`. In float32 and float64 they call `tk.reference`, whose time and memory grow with the
square of the length: for tests, and for training on a CPU at small sizes.
"""

from .based import BasedAttention, BasedCache
from .lolcats import FeatureMap, LolcatsAttention, LolcatsCache
from .rotary import Rotary
from .sliding import SlidingAttention, SlidingCache

__all__ = [
    "BasedAttention",
    "BasedCache",
    "FeatureMap",
    "LolcatsAttention",
    "LolcatsCache",
    "Rotary",
    "SlidingAttention",
    "SlidingCache",
]
