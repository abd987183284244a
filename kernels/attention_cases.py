"""Batches on which attention is compared with its definition: every head size, group, window, cap
and kind of pool that a kernel set must support.

Tests run the table in interpreters, and `jitney bench device` on the devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jitney.kernels.proof_shapes import AttentionShapes, NormShapes, ServedShapes, StepShapes


@dataclass(frozen=True)
class AttentionCase:
    """One batch and the options of one call; `decode` holds context lengths, `prompts` pairs of
    (context length, new rows).
    """

    heads: tuple[int, int, int]  # query heads, key heads, head dim
    decode: tuple[int, ...] = ()
    prompts: tuple[tuple[int, int], ...] = ()
    rows: int = 0  # T; 0: no padding
    seqs: int = 0  # S; 0: no empty seats
    page: int = 16  # tokens of a page
    pages: int = 32  # P, entries of each sequence's page table
    window: int = 0  # positions that a row sees, its own included; 0: all
    softcap: float = 0.0  # of the scores; 0: none
    sinks: bool = False  # whether heads have sinks
    dtype: str = "float32"  # of activations
    pool: str = "float32"  # dtype of the pool
    scales: str = "head"  # or "pool"; for a quantised pool
    spare: int = 4  # unused pages, the trash page included
    value_dim: int = 0  # first numbers of a key that are its value; 0: values are stored separately

    @property
    def lens(self) -> list[int]:
        return [*self.decode, *(length for length, _ in self.prompts)]

    @property
    def counts(self) -> list[int]:
        return [1] * len(self.decode) + [count for _, count in self.prompts]

    @property
    def n_pages(self) -> int:
        return self.spare + sum(-(-length // self.page) for length in self.lens)

    def served_as(self, dtype: str) -> AttentionCase:
        """The case for an engine of that dtype: activations and a pool of floats use it."""
        pool = dtype if self.pool == self.dtype else self.pool
        return replace(self, dtype=dtype, pool=pool)

    def shapes(self) -> ServedShapes:
        """The served shapes with only attention."""
        n_heads, n_kv_heads, head_dim = self.heads
        attention = AttentionShapes(
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            windows=(self.window,),
            softcap=self.softcap,
            qk_norm=False,
            sinks=self.sinks,
            value_dim=self.value_dim,
            page_size=self.page,
            pages=self.pages,
            context=self.pages * self.page,
            kv_dtype=self.pool,
        )
        return ServedShapes(
            attention=attention,
            norms=NormShapes(1e-5, self.dtype),
            steps=StepShapes(decode=(), mixed=()),
            hidden_size=n_heads * head_dim,
            vocab_size=0,
            dtype=self.dtype,
            matrices=(),
            table=0,
        )


_MIXED = AttentionCase((8, 2, 64), (5, 90), ((120, 50), (17, 3), (9, 1)), rows=70, seqs=6, pages=24)
_DECODE = AttentionCase((8, 2, 64), (1, 700, 33, 257), rows=8, seqs=8, pages=64)

CASES = {
    "decode": _DECODE,
    "decode of contexts that double the span": AttentionCase(
        (4, 1, 32), (9000, 300, 8193), page=128, pages=128
    ),
    "decode that needs no merge": AttentionCase((4, 4, 64), (250, 3, 64), rows=4, seqs=4, pages=16),
    "prompts alone": AttentionCase(
        (8, 2, 64), (), ((70, 70), (17, 17), (1, 1)), rows=100, seqs=5, pages=8
    ),
    "mixed": _MIXED,
    "window in decode": replace(_DECODE, window=100),
    "window in mixed": replace(_MIXED, window=24),
    "sinks in decode": replace(_DECODE, sinks=True),
    "sinks, window in mixed": replace(_MIXED, window=24, sinks=True),
    "sinks, window, softcap in decode": replace(_DECODE, window=300, softcap=20.0, sinks=True),
    "sinks over an int8 pool": replace(_MIXED, pool="int8", sinks=True),
    "softcap": replace(_MIXED, softcap=5.0),
    "window, softcap in decode": replace(_DECODE, window=300, softcap=20.0),
    "no group": AttentionCase((3, 3, 64), (40, 90), ((30, 20),), rows=32, seqs=4, page=32, pages=8),
    "group of three": AttentionCase((9, 3, 64), (40, 90), ((130, 60),), rows=64, seqs=4),
    "group of seven": AttentionCase((14, 2, 64), (77,), ((170, 40),), rows=64, seqs=3, pages=30),
    "group of thirty-two": AttentionCase((32, 1, 64), (77,), ((90, 40),), rows=64, seqs=2),
    "group wider than a tile": AttentionCase((142, 1, 64), (20,), ((40, 7),), rows=16, seqs=2),
    "head dim 80": AttentionCase((4, 2, 80), (300,), ((100, 70),), rows=80, seqs=2),
    "head dim 96": AttentionCase(
        (4, 2, 96), (300,), ((100, 70),), rows=80, seqs=2, page=64, pages=8
    ),
    "head dim 128": AttentionCase(
        (4, 2, 128), (300,), ((100, 70),), rows=80, seqs=2, page=128, pages=4
    ),
    "head dim 256": AttentionCase((4, 2, 256), (300,), ((100, 40),), rows=48, seqs=2),
    "head dim 512": AttentionCase((4, 1, 512), (300,), ((60, 40),), rows=48, seqs=2),
    "int8 pool": replace(_MIXED, pool="int8"),
    "int8 pool, one factor": replace(_DECODE, pool="int8", scales="pool"),
    "int8 pool of wide pages, window in decode": replace(
        _DECODE, pool="int8", page=64, pages=16, window=300
    ),
    "fp8 e4m3 pool": replace(_MIXED, pool="float8_e4m3fn"),
    "fp8 e5m2 pool": replace(_DECODE, pool="float8_e5m2"),
    "latents in decode": replace(_DECODE, heads=(8, 1, 80), value_dim=64),
    "latents in mixed": replace(_MIXED, heads=(8, 1, 80), value_dim=64),
    "latents of 512": AttentionCase(
        (20, 1, 576), (300,), ((100, 40),), rows=48, seqs=2, value_dim=512
    ),
    "latents of 256, heads in tiles": AttentionCase(
        (64, 1, 320), (77,), ((90, 20),), rows=24, seqs=2, value_dim=256
    ),
    "float16": replace(_MIXED, dtype="float16", pool="float16"),
    "float16 over int8": replace(_DECODE, dtype="float16", pool="int8"),
}
