"""Tables of tile sizes by GPU, head dim, dtype and group, in place of an autotuner.

An autotuner would run in-place kernels several times, and programs compiled ahead cannot include
it. `docs/benchmarks/triton_configs.py` measures candidates on a device and prints rows for these
tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jitney.kernels.interface import KernelError


@dataclass(frozen=True)
class DecodeTiles:
    """Tile sizes of split-KV decode."""

    block_n: int  # keys per tile
    span: int  # least keys per split
    splits: int  # most splits of one sequence
    programs: int  # programs that share the list of work
    warps: int
    stages: int


@dataclass(frozen=True)
class PromptTiles:
    """Tile sizes of blocks of prompt rows."""

    block_m: int  # query rows, with the query heads of a key head packed
    block_n: int  # keys per tile
    warps: int
    stages: int


@dataclass(frozen=True)
class _MatmulTiles:
    """Tile sizes of products with int4 and fp8 weights."""

    block_m: int  # most rows per program
    block_n: int  # output columns per program
    warps: int
    stages: int


@dataclass(frozen=True)
class _ExpertTiles:
    """Tile sizes of products with a mixture's experts."""

    block_n: int  # output columns per program, half gates and half ups in gated products
    block_k: int  # inputs at a time
    warps: int
    stages: int


#: Streaming multiprocessors of the card a generation is tuned on: A100, L4, H100.
_PROCESSORS = {80: 108, 89: 58, 90: 132}
#: Registers of a multiprocessor, and threads of a warp.
_REGISTERS, _WARP = 65536, 32
#: (generation, padded head dim, bytes per activation) -> tiles. Programs are processors times
#: resident programs. Chosen by compiling, not yet by timing: all tiles fit and, with 2 bytes,
#: nothing spills. float32 is supported for correct results, not for speed.
_ATTENTION: dict[tuple[int, int, int], tuple[DecodeTiles, PromptTiles]] = {
    (80, 64, 2): (DecodeTiles(64, 256, 32, 108 * 4, 4, 3), PromptTiles(128, 64, 8, 2)),
    (80, 128, 2): (DecodeTiles(32, 256, 32, 108 * 4, 4, 3), PromptTiles(128, 32, 8, 2)),
    (80, 256, 2): (DecodeTiles(32, 256, 32, 108 * 2, 4, 2), PromptTiles(64, 32, 8, 2)),
    (89, 64, 2): (DecodeTiles(64, 256, 32, 58 * 4, 4, 2), PromptTiles(128, 64, 8, 2)),
    (89, 128, 2): (DecodeTiles(32, 256, 32, 58 * 4, 4, 2), PromptTiles(128, 32, 8, 2)),
    (89, 256, 2): (DecodeTiles(32, 256, 32, 58 * 2, 4, 2), PromptTiles(64, 32, 8, 2)),
    (90, 64, 2): (DecodeTiles(64, 256, 32, 132 * 4, 4, 3), PromptTiles(128, 64, 8, 3)),
    (90, 128, 2): (DecodeTiles(64, 256, 32, 132 * 3, 4, 2), PromptTiles(128, 64, 8, 3)),
    (90, 256, 2): (DecodeTiles(32, 256, 32, 132 * 2, 4, 3), PromptTiles(64, 64, 8, 2)),
    (80, 512, 2): (DecodeTiles(16, 256, 32, 108, 8, 2), PromptTiles(32, 32, 8, 1)),
    (89, 512, 2): (DecodeTiles(16, 256, 32, 58, 8, 1), PromptTiles(32, 16, 8, 1)),
    (90, 512, 2): (DecodeTiles(16, 256, 32, 132, 8, 2), PromptTiles(32, 32, 8, 1)),
    (80, 64, 4): (DecodeTiles(32, 256, 32, 108 * 3, 8, 2), PromptTiles(32, 16, 8, 1)),
    (80, 128, 4): (DecodeTiles(32, 256, 32, 108 * 2, 8, 2), PromptTiles(32, 32, 8, 1)),
    (80, 256, 4): (DecodeTiles(32, 256, 32, 108, 8, 2), PromptTiles(32, 16, 8, 1)),
    (89, 64, 4): (DecodeTiles(32, 256, 32, 58 * 3, 8, 2), PromptTiles(32, 16, 8, 1)),
    (89, 128, 4): (DecodeTiles(32, 256, 32, 58 * 2, 8, 2), PromptTiles(32, 32, 8, 1)),
    (89, 256, 4): (DecodeTiles(32, 256, 32, 58, 8, 2), PromptTiles(32, 16, 8, 1)),
    (90, 64, 4): (DecodeTiles(32, 256, 32, 132 * 3, 8, 2), PromptTiles(32, 16, 8, 1)),
    (90, 128, 4): (DecodeTiles(32, 256, 32, 132 * 3, 8, 2), PromptTiles(32, 32, 8, 1)),
    (90, 256, 4): (DecodeTiles(32, 256, 32, 132 * 2, 8, 2), PromptTiles(16, 16, 4, 1)),
    (80, 512, 4): (DecodeTiles(16, 256, 32, 108, 8, 1), PromptTiles(16, 16, 8, 1)),
    (89, 512, 4): (DecodeTiles(16, 256, 32, 58, 8, 1), PromptTiles(16, 16, 8, 1)),
    (90, 512, 4): (DecodeTiles(16, 256, 32, 132, 8, 2), PromptTiles(16, 16, 8, 1)),
}
#: Decode tiles if more than 16 query heads share a key head: a tile has 32 rows then. The table has
#: the cases in which its registers allow fewer programs, or spill. Up to 16 query heads, and for
#: any page size, the compiled kernel is the same (registers within 4, equal shared memory), so
#: neither is a key of the table.
_WIDE: dict[tuple[int, int, int], DecodeTiles] = {
    (80, 128, 2): DecodeTiles(32, 256, 32, 108 * 3, 4, 3),
    (80, 256, 2): DecodeTiles(32, 256, 32, 108, 8, 2),
    (89, 64, 2): DecodeTiles(64, 256, 32, 58 * 3, 4, 2),
    (89, 128, 2): DecodeTiles(32, 256, 32, 58 * 3, 4, 2),
    (89, 256, 2): DecodeTiles(32, 256, 32, 58, 4, 2),
    (90, 128, 2): DecodeTiles(64, 256, 32, 132 * 3, 4, 2),
}
#: Decode tiles for pools of one-byte numbers (int8, fp8) with up to 16 query heads: widened to
#: float16, they take fewer registers than bfloat16, and half the shared memory.
_BYTE_POOLS: dict[tuple[int, int, int], DecodeTiles] = {
    (80, 512, 2): DecodeTiles(16, 256, 32, 108, 8, 3),
    (89, 64, 2): DecodeTiles(64, 256, 32, 58 * 4, 4, 3),
    (89, 128, 2): DecodeTiles(32, 256, 32, 58 * 4, 4, 3),
    (90, 128, 2): DecodeTiles(64, 256, 32, 132 * 4, 4, 4),
    (90, 512, 2): DecodeTiles(16, 256, 32, 132, 8, 3),
}
#: The same with more query heads, where sums of even and of odd dims take registers.
_WIDE_BYTE_POOLS: dict[tuple[int, int, int], DecodeTiles] = {
    (80, 64, 2): DecodeTiles(32, 256, 32, 108 * 3, 4, 3),
    (89, 64, 2): DecodeTiles(32, 256, 32, 58 * 3, 4, 3),
    (90, 64, 2): DecodeTiles(32, 256, 32, 132 * 3, 4, 3),
    (90, 128, 2): DecodeTiles(64, 256, 32, 132 * 3, 4, 3),
}
#: (generation, bytes per activation) -> tiles if keys serve as values: up to 512 numbers of a key
#: are also the value, and 64 are not. Prompt kernels on sm_90 spill up to 32 bytes a thread for
#: products of warp groups.
_LATENT: dict[tuple[int, int], tuple[DecodeTiles, PromptTiles]] = {
    (80, 2): (DecodeTiles(32, 256, 32, 108, 8, 2), PromptTiles(32, 32, 8, 2)),
    (89, 2): (DecodeTiles(16, 256, 32, 58, 8, 2), PromptTiles(32, 16, 8, 1)),
    (90, 2): (DecodeTiles(32, 256, 32, 132, 8, 2), PromptTiles(64, 16, 8, 2)),
    (80, 4): (DecodeTiles(16, 256, 32, 108, 8, 1), PromptTiles(16, 16, 8, 1)),
    (89, 4): (DecodeTiles(16, 256, 32, 58, 8, 1), PromptTiles(16, 16, 8, 1)),
    (90, 4): (DecodeTiles(16, 256, 32, 132, 8, 1), PromptTiles(16, 16, 8, 1)),
}
#: Most query heads that share a tile of latents, by bytes per activation; and keys of a decode tile
#: on sm_90 with up to 16 query heads.
LATENT_HEADS = {2: 32, 4: 16}
_FEW_HEADS, _KEYS_OF_FEW = 16, 64
#: Most rows for which a narrow product uses the tiles of few rows, by bytes per activation: up to
#: there it is bound by reading weights. float32 takes three times the registers, and has no other
#: tiles.
_FEW_ROWS = {2: 64, 4: 16}
#: Most rows for which a program has room for gates and ups with the full number of columns.
_FEW_GATED_ROWS = 32
#: generation -> tiles of narrow products of a few rows.
_MATMUL: dict[int, _MatmulTiles] = {
    80: _MatmulTiles(64, 64, 4, 4),
    89: _MatmulTiles(64, 64, 4, 3),
    90: _MatmulTiles(64, 64, 4, 4),
}
#: The same for more rows, which are bound by the tensor cores.
_TALL_MATMUL: dict[int, _MatmulTiles] = {
    80: _MatmulTiles(128, 64, 8, 3),
    89: _MatmulTiles(128, 64, 8, 2),
    90: _MatmulTiles(128, 64, 8, 3),
}
#: (generation, rows of a block) -> tiles of products with experts, for 2-byte activations. Blocks
#: of few rows are bound by reading weights: the bytes of weights in flight matter most.
_EXPERTS: dict[tuple[int, int], _ExpertTiles] = {
    (80, 16): _ExpertTiles(128, 64, 4, 4),
    (80, 32): _ExpertTiles(128, 64, 4, 4),
    (80, 64): _ExpertTiles(128, 64, 4, 3),
    (80, 128): _ExpertTiles(128, 64, 8, 3),
    (89, 16): _ExpertTiles(128, 64, 4, 3),
    (89, 32): _ExpertTiles(128, 64, 8, 3),
    (89, 64): _ExpertTiles(128, 64, 4, 3),
    (89, 128): _ExpertTiles(128, 64, 8, 2),
    (90, 16): _ExpertTiles(128, 128, 4, 3),
    (90, 32): _ExpertTiles(128, 64, 4, 4),
    (90, 64): _ExpertTiles(128, 64, 4, 4),
    (90, 128): _ExpertTiles(128, 64, 8, 3),
}
#: The same in float32, which is supported for correct results, not for speed.
_WIDE_EXPERTS = _ExpertTiles(64, 32, 8, 2)
#: Most inputs of MXFP4 at a time, which divide gpt-oss's 2,880 inputs; and the most rows of a block
#: for which older GPUs do not spill the registers of wide tiles.
_MXFP4_INPUTS, _MXFP4_ROWS = 64, 64
#: Least columns of a program that multiplies with experts: with two matrices, 64 bytes of each row.
_LEAST_COLUMNS = 64


#: Columns and rows of a tile of a product in parts, the most programs that its parts give work to
#: (two for each processor of an H100), and the most parts.
_PART_COLUMNS, _PART_ROWS, _PART_PROGRAMS, _MOST_PARTS = 128, 64, 256, 8
#: The least inputs of a part; their number is a multiple of 16. With more than 3,072, XLA, which
#: multiplies the parts, would divide them once more.
_PART_INPUTS, _PART_VECTOR, _PART_LONG = 256, 16, 3072


def parts_of(rows: int, size_in: int, size_out: int) -> int:
    """Number of parts of a product, a power of two; 1: it is not divided. Up to 64 rows it follows
    from the weight's shape alone, so that a row's result does not depend on the number of rows.
    """
    tiles = -(-size_out // _PART_COLUMNS) * -(-rows // _PART_ROWS)
    parts = 1
    while parts < _MOST_PARTS:
        long = rows <= _PART_ROWS and size_in > parts * _PART_LONG
        if 2 * parts * tiles > _PART_PROGRAMS and not long:
            break
        if size_in % (2 * parts * _PART_VECTOR) or size_in < 2 * parts * _PART_INPUTS:
            break
        parts *= 2
    return parts


def _generation(sm: int) -> int:
    """The tuned generation used for compute capability `sm`: the last one that is not newer.

    sm_120 has the shared memory of sm_89 (99 KiB), sm_100 that of sm_90.
    """
    if sm >= 120:
        return 89
    return max((tuned for tuned in _PROCESSORS if tuned <= sm), default=80)


def attention_tiles(
    sm: int, head_dim: int, itemsize: int, group: int, pool_itemsize: int
) -> tuple[DecodeTiles, PromptTiles]:
    """Tiles for head_dim padded to a power of two, activations of `itemsize` bytes, `group` query
    heads to a key head and pools of `pool_itemsize` bytes; KernelError for a head dim above 512."""
    if head_dim > 512:
        raise KernelError(
            f"kernels triton take a head dim up to 512, not {head_dim}; choose kernels reference"
        )
    key = _generation(sm), max(head_dim, 64), itemsize
    decode, prompt = _ATTENTION[key]
    if group > 16:
        decode = _WIDE.get(key, decode)
    if pool_itemsize == 1:
        byte_pools = _WIDE_BYTE_POOLS if group > 16 else _BYTE_POOLS
        decode = byte_pools.get(key, decode)
    return decode, prompt


def most_registers(sm: int, tiles: DecodeTiles) -> int:
    """The most registers a thread with which all programs of a decode kernel are resident. ptxas
    itself settles on fewer, 128, and spills.
    """
    resident = max(1, tiles.programs // _PROCESSORS[_generation(sm)])
    return min(255, _REGISTERS // (_WARP * tiles.warps * resident) // 8 * 8)


def latent_tiles(
    sm: int, value_dim: int, itemsize: int, group: int
) -> tuple[DecodeTiles, PromptTiles]:
    """Tiles for keys that serve as values of value_dim numbers (padded to a power of two), and for
    `group` query heads. Raises KernelError for more than 512 numbers.
    """
    if value_dim > 512:
        raise KernelError(
            f"kernels triton take latents up to 512, not {value_dim}; choose kernels reference"
        )
    generation = _generation(sm)
    decode, prompt = _LATENT[generation, itemsize]
    if (generation, itemsize) == (90, 2) and group <= _FEW_HEADS:
        decode = replace(decode, block_n=_KEYS_OF_FEW)
    return decode, prompt


@dataclass(frozen=True)
class ProductTiles:
    """Tiles of products with narrow weights and with experts, for compute capability `sm`."""

    sm: int

    @property
    def _generation(self) -> int:
        return _generation(self.sm)

    def are_few(self, rows: int, itemsize: int) -> bool:
        """Whether `rows` rows of activations of `itemsize` bytes use the tiles of few rows."""
        return rows <= _FEW_ROWS[itemsize]

    def matmul(
        self, rows: int, itemsize: int, groups: int, size_out: int
    ) -> tuple[_MatmulTiles, int]:
        """Tiles of a product with narrow weights, and the number of programs that share the sum of
        one output.

        For few rows this number follows from the weight's shape alone, so that a row's result does
        not depend on the number of rows. For more rows, it is at most the number that fills the GPU
        once, since each program writes its sums as float32.
        """
        tuned = self._generation
        tiles = _MATMUL[tuned]
        waves = 2
        if itemsize == 4:
            tiles = replace(tiles, block_m=_FEW_ROWS[4])
        elif not self.are_few(rows, itemsize):
            tiles = _TALL_MATMUL[tuned]
            waves = 1
        blocks = -(-size_out // tiles.block_n)
        if waves == 1:
            blocks *= -(-rows // tiles.block_m)
        splits = 1
        while 2 * splits * blocks <= waves * _PROCESSORS[tuned] and 8 * splits <= groups:
            splits *= 2
        return tiles, splits

    def gated(self, rows: int, itemsize: int, inner: int) -> _MatmulTiles:
        """Tiles of a gated int4 product; each program computes `block_n` gates and as many ups.
        inner: number of gates.

        Half as many for more than 32 rows and in float32, where registers would be spilled, and
        if there would be fewer programs than processors.
        """
        tuned = self._generation
        tiles = _MATMUL[tuned]
        narrow = replace(tiles, block_n=tiles.block_n // 2)
        if itemsize == 4:
            return replace(narrow, block_m=_FEW_ROWS[4])
        if not self.are_few(rows, itemsize):
            return replace(_TALL_MATMUL[tuned], block_n=narrow.block_n)
        if rows > _FEW_GATED_ROWS or inner < _PROCESSORS[tuned] * tiles.block_n:
            return narrow
        return tiles

    def experts(
        self, rows: int, itemsize: int, blocks: int, size_out: int, *, mxfp4: bool = False
    ) -> _ExpertTiles:
        """Tiles of a product with experts: at most `blocks` blocks of `rows` rows, and `size_out`
        columns, including gates and ups. mxfp4: the weights are widened in registers.

        Tiles are narrower if there would be fewer programs than processors. They add the inputs of
        a sum in the same order, so a row has the same result.
        """
        tuned = self._generation
        tiles = _WIDE_EXPERTS if itemsize == 4 else _EXPERTS[tuned, rows]
        if mxfp4:
            tiles = replace(tiles, block_k=min(tiles.block_k, _MXFP4_INPUTS))
            if rows > _MXFP4_ROWS and tuned < 90:
                tiles = replace(tiles, block_n=_LEAST_COLUMNS)
        while tiles.block_n > _LEAST_COLUMNS:
            if blocks * -(-size_out // tiles.block_n) >= _PROCESSORS[tuned]:
                break
            tiles = replace(tiles, block_n=tiles.block_n // 2)
        return tiles
