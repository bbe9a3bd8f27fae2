"""A paged cache of keys and values, for generation loops of one's own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..ops._cache import CODES
from ..ops.append_kv import append_kv
from ..ops.attention import attention
from ..ops.attention_paged import attention_paged
from ..ops.attention_schedule import attention_schedule
from ..reference.append_kv import rotate
from .based import KERNEL_DTYPES

_NAME = "tk.nn.PagedCache"
SCALES = ("token", "tensor")
# The length of a sequence that does not run: its new tokens are before the first key, where they
# have no place. Nothing is written or read for them.
IDLE = -(1 << 28)
_NOT_EMPTY = (
    "tk.nn.PagedCache: prompt=True, and a sequence has keys, which its new tokens would not see; "
    "leave it out behind the first step of a sequence"
)


class PagedCache:
    """Keys and values of all layers of a model, in pages, for a fixed number of sequences.

    A step of the model is three things. `reserve`, on the host, gives pages to the sequences for
    new tokens. `step`, in the model, is handed to the layers, each of which appends and attends by
    one call of `PagedStep.attend`. `PagedStep.advance`, after the layers, counts the new tokens.

        cache = tk.nn.PagedCache(layers, batch, kv_heads, head_dim, max_length=4096, device="cuda")
        cache.reserve(1)                      # on the host, outside of graphs
        step = cache.step(1)                  # from here on in the model
        out = step.attend(layer, q, k, v)     # (B, 1, Hq, D), in each layer
        step.advance()

    Lengths and the page table are on the device, and what `step`, `attend` and `advance` do is read
    there: tensors keep their addresses, and a CUDA graph of a step replays with other lengths, new
    pages, and sequences that have ended or begun. The host knows an upper bound of each length, for
    the pages. Sequences are running and empty at first.

    Args:
        layers: how many layers the model has.
        batch: how many sequences there is room for, B.
        kv_heads: heads of keys and values, Hkv.
        head_dim: columns of a key, D: a multiple of 8 up to 256.
        max_length: the most keys of a sequence.
        value_dim: columns of a value, Dv; None is D.
        pages: pages of a layer, which all sequences share. None: as many as all of them may need.
        page_size: tokens of a page, from 1 on.
        dtype: of the cache: bfloat16, float16, or 8 bits: float8_e4m3fn, float8_e5m2, int8; or
            float4_e2m1fn_x2 for NVFP4, with D and Dv multiples of 64.
        scales: of a cache of 8 bits. "token": a factor for each token and head, found when it is
            written. "tensor": one for each layer, `k_scales[layer]` and `v_scales[layer]`, 1 at
            first, and so it always is of NVFP4, whose blocks have scales besides.
        split_size: as for `tk.attention_paged`; a number makes results batch-invariant.
        device: where the cache is.

    Attributes:
        k, v: of each layer, (pages, page_size, Hkv, D) and (.., Dv); of NVFP4 half as many columns.
        k_scales, v_scales: of each layer, float32, (pages, page_size, Hkv) or (1,); None of a cache
            of 16 bits.
        k_block_scales, v_block_scales: of NVFP4, of each layer, float8_e4m3fn, (pages, page_size,
            Hkv, D / 16) and (.., Dv / 16); else None.
        page_table: (B, pages of a sequence), int32.
        lengths: (B,), int32: keys of each sequence; negative where it does not run.

    Raises:
        TypeError: a dtype that no cache has.
        ValueError: numbers that are too small, or scales that are none of the above.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        max_length: int,
        value_dim: int | None = None,
        pages: int | None = None,
        page_size: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        scales: str = "token",
        split_size: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        sizes = {"layers": layers, "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim}
        sizes |= {"max_length": max_length, "page_size": page_size}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{_NAME}: {name} is {size}; it must be at least 1")
        if scales not in SCALES:
            raise ValueError(f"{_NAME}: scales is {scales!r}; it must be one of {SCALES}")
        nvfp4 = dtype is torch.float4_e2m1fn_x2
        if not nvfp4 and dtype not in (*CODES, *KERNEL_DTYPES, torch.float32, torch.float64):
            raise TypeError(f"{_NAME}: dtype is {dtype}; it must be of 16 bits, or one of {CODES}")
        self.max_length, self.page_size, self.split_size = max_length, page_size, split_size
        most = -(-max_length // page_size)
        count = batch * most if pages is None else pages
        shape = count, page_size, kv_heads

        def memory(*sizes: int, dtype: torch.dtype, value: int | None = None) -> Tensor:
            x = torch.empty(sizes, dtype=dtype, device=device)
            if value is not None:
                x.fill_(value)
            # A compiled step, too, changes it where it is.
            torch._dynamo.mark_static_address(x)
            return x

        dims = head_dim, head_dim if value_dim is None else value_dim
        if nvfp4 and any(dim % 64 for dim in dims):
            raise ValueError(
                f"{_NAME}: head dims of NVFP4 are {dims}; they must be multiples of 64"
            )
        self.k, self.v = (
            [memory(*shape, dim // 2 if nvfp4 else dim, dtype=dtype) for _ in range(layers)]
            for dim in dims
        )
        self.codes = nvfp4 or dtype in CODES
        self.k_scales: list[Tensor] | None = None
        self.v_scales: list[Tensor] | None = None
        self.k_block_scales: list[Tensor] | None = None
        self.v_block_scales: list[Tensor] | None = None
        if nvfp4:
            self.k_block_scales, self.v_block_scales = (
                [memory(*shape, dim // 16, dtype=torch.float8_e4m3fn) for _ in range(layers)]
                for dim in dims
            )
        if self.codes:
            of = shape if scales == "token" and not nvfp4 else (1,)
            self.k_scales, self.v_scales = (
                [memory(*of, dtype=torch.float32, value=1) for _ in range(layers)] for _ in dims
            )
        self.page_table = memory(batch, most, dtype=torch.int32, value=-1)
        self.lengths = memory(batch, dtype=torch.int32, value=0)
        self._runs = [True] * batch
        self._bounds = [0] * batch
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._free = list(range(count))

    def reserve(self, tokens: int | Sequence[int], rows: Iterable[int] | None = None) -> None:
        """Gives pages to running sequences for so many more tokens. It is called before each step,
        outside of graphs, and waits for nothing on the device.

        Args:
            tokens: of each sequence, or one number for all: those that the step is given.
            rows: which sequences; None: all.

        Raises:
            ValueError: a sequence would be longer than max_length.
            RuntimeError: there are too few pages. Nothing has changed then.
        """
        chosen = list(range(len(self._runs)) if rows is None else rows)
        counts = [tokens] * len(chosen) if isinstance(tokens, int) else list(tokens)
        wanted = [(b, self._bounds[b] + n) for b, n in zip(chosen, counts, strict=True)]
        wanted = [(b, length) for b, length in wanted if self._runs[b]]
        for b, length in wanted:
            if length > self.max_length:
                raise ValueError(
                    f"{_NAME}: sequence {b} would have {length} keys; max_length is "
                    f"{self.max_length}"
                )
        missing = {b: -(-n // self.page_size) - len(self._pages[b]) for b, n in wanted}
        total = sum(max(0, n) for n in missing.values())
        if total > len(self._free):
            raise RuntimeError(
                f"{_NAME}: {total} more pages are needed, and {len(self._free)} are free; finish a "
                "sequence, or make the cache with more pages"
            )
        places: list[tuple[int, int, int]] = []
        for b, length in wanted:
            self._bounds[b] = length
            for _ in range(missing[b]):
                page = self._free.pop()
                places.append((b, len(self._pages[b]), page))
                self._pages[b].append(page)
        if places:
            at = torch.tensor(places, dtype=torch.int32).to(self.page_table.device).unbind(1)
            self.page_table[at[0].long(), at[1].long()] = at[2]

    def step(self, tokens: int, *, rows: Tensor | None = None, prompt: bool = False) -> PagedStep:
        """A step of the model, in which each sequence gets so many tokens, which must have been
        reserved: else the layers read pages that are nobody's.

        Args:
            tokens: how many, s.
            rows: (b,), int32: which sequences take part; None: all. Those that do not run may be
                among them: nothing is written for them, and their results mean nothing.
            prompt: the sequences have no keys yet. The new tokens then attend to each other by
                `tk.attention`, which is made for many queries. Prompts that are shorter than s are
                padded behind their tokens, and `PagedStep.advance` is told how long they are. They
                see keys as they are, also where the cache rounds them to 8 bits.

        Raises:
            RuntimeError: it is a prompt, and a sequence has keys; an assertion on the device.
        """
        return PagedStep(self, tokens, rows, prompt)

    def finish(self, rows: Iterable[int]) -> None:
        """Sequences end: they give their pages back, and do not run."""
        self._begin(list(rows), False)

    def reset(self, rows: Iterable[int] | None = None) -> None:
        """Sequences begin anew, empty and running; None: all of them."""
        self._begin(list(range(len(self._runs)) if rows is None else rows), True)

    def synchronize(self) -> None:
        """The bounds that the host knows become the lengths, which are read from the device, and
        pages beyond them go back. It is of use where a step's tokens are often not accepted."""
        for b, length in enumerate(self.lengths.clamp(min=0).tolist()):
            self._bounds[b] = length
            kept = -(-length // self.page_size)
            self._free.extend(self._pages[b][kept:])
            del self._pages[b][kept:]

    def _begin(self, rows: list[int], runs: bool) -> None:
        for b in rows:
            self._free.extend(self._pages[b])
            self._pages[b], self._bounds[b], self._runs[b] = [], 0, runs
        at = torch.tensor(rows, dtype=torch.int64).to(self.lengths.device)
        self.page_table[at] = -1
        self.lengths[at] = 0 if runs else IDLE


class PagedStep:
    """One step of a model over a `PagedCache`, as `PagedCache.step` makes it.

    Attributes:
        lengths: (b,), int32: keys of each sequence before the step, until `advance` is called.
        positions: (b, s), int32: the positions of the new tokens.
    """

    def __init__(self, cache: PagedCache, tokens: int, rows: Tensor | None, prompt: bool) -> None:
        self.cache, self.tokens, self.rows, self.prompt = cache, tokens, rows, prompt
        self.lengths = cache.lengths if rows is None else cache.lengths[rows]
        self._schedules: dict[tuple[Any, ...], Tensor] = {}
        if prompt:
            torch._assert_async((self.lengths <= 0).all(), _NOT_EMPTY)

    @property
    def positions(self) -> Tensor:
        steps = torch.arange(self.tokens, dtype=torch.int32, device=self.lengths.device)
        return (self.lengths.clamp(min=0)[:, None] + steps).contiguous()

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        scale: float | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
    ) -> Tensor:
        """Appends the new keys and values of a layer, and attends to all, causally.

        Layers of the same heads and window share a schedule, which the first of them makes. In
        bfloat16 and float16 it is `tk.attention_paged`, of a prompt `tk.append_kv` and
        `tk.attention`; in float32 and float64 their formulas, for tests. There is no gradient.

        Args:
            layer: the layer's number, from 0 on.
            q: (b, s, Hq, D), any strides.
            k: (b, s, Hkv, D).
            v: (b, s, Hkv, Dv).
            window_size: as for `tk.attention`.
            softcap: likewise.
            alibi_slopes: likewise.
            sink: likewise.
            scale: likewise.
            rotary_cos: (length, R / 2), dtype and device of q: queries and new keys are rotated by
                their positions. None: they are not.
            rotary_sin: likewise.
            rotary_interleaved: neighbouring columns are pairs, else columns i and i + R / 2.

        Returns:
            (b, s, Hq, Dv).

        Raises:
            TypeError, ValueError, RuntimeError: as `tk.attention_paged` and `tk.append_kv`.
        """
        cache = self.cache
        kernels = q.dtype in KERNEL_DTYPES
        pages = cache.k[layer], cache.v[layer]
        place: dict[str, Any] = {"cache_batch_idx": self.rows}
        if cache.k_scales is not None and cache.v_scales is not None:
            place |= {"k_scale": cache.k_scales[layer], "v_scale": cache.v_scales[layer]}
        if cache.k_block_scales is not None and cache.v_block_scales is not None:
            place["k_block_scale"] = cache.k_block_scales[layer]
            place["v_block_scale"] = cache.v_block_scales[layer]
        options: dict[str, Any] = {"window_size": window_size, "softcap": softcap, "sink": sink}
        options |= {"alibi_slopes": alibi_slopes, "scale": scale}
        if self.prompt:
            if rotary_cos is not None and rotary_sin is not None:
                table = rotary_cos, rotary_sin
                q, k = (self._rotated(x, *table, rotary_interleaved) for x in (q, k))
            append = append_kv if kernels else reference.append_kv
            place |= {"page_table": cache.page_table, "seq_lens": self.lengths}
            append(k, v, *pages, **place)
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            whole: Any = attention if kernels else reference.attention
            out: Tensor = whole(*heads_first, causal=True, **options)
            return out.transpose(1, 2)
        if kernels:
            options |= {"schedule": self._schedule(q, k, v, window_size)}
            options |= {"split_size": cache.split_size}
        call: Any = attention_paged if kernels else reference.attention_paged
        result: Tensor = call(
            q,
            *pages,
            cache.page_table,
            self.lengths,
            k=k,
            v=v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            **place,
            **options,
        )
        return result

    def advance(self, accepted: Tensor | None = None) -> None:
        """Counts the step's tokens, after all layers, on the device.

        Args:
            accepted: (b,), int32: how many of each sequence's tokens, from the first one on, remain
                in the cache, as with shorter prompts or drafted tokens. None: all.
        """
        count = self.tokens if accepted is None else accepted
        grown = torch.where(self.lengths >= 0, count, 0).to(torch.int32)
        if self.rows is None:
            self.cache.lengths.add_(grown)
        else:
            self.cache.lengths.index_add_(0, self.rows, grown)

    def _schedule(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int, int]) -> Tensor:
        shape = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
        kind = (*shape, *window)
        if kind not in self._schedules:
            self._schedules[kind] = attention_schedule(
                self.lengths,
                *shape,
                max_seqlen_q=self.tokens,
                new_keys=self.tokens,
                window_size=window,
                split_size=self.cache.split_size,
                codes=self.cache.codes,
            )
        return self._schedules[kind]

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """The tokens of a prompt, rotated."""
        turned: Tensor = rotate(x.flatten(0, 1), cos, sin, self.positions.flatten(), interleaved)
        return turned.view(x.shape)
