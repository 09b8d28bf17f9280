"""How a checked call is launched: settings, strides and buffers, as plain numbers.

The Pallas kernels address everything through dense two-dimensional buffers, `[lines, line stride]`,
with the strides inside a line as static numbers. `make_plan` works these out from the arrays of a
call, for JAX arrays and PyTorch tensors alike, and without either framework.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sparse_decode.contract import (
    HEAD_DIM,
    MAX_SPLITS,
    REGION_TOKENS,
    ArraySpec,
    Geometry,
)


@dataclass(frozen=True)
class Config:
    """How the split and combine kernels are launched.

    Attributes:
        splits: Programs that share a row's live slots, 1 to 256.
        tile: Tokens a program loads at a time: 16, 32, 64 or 128.
        warps: Warps of a split program: 1, 2, 4 or 8.
        stages: Software pipeline depth of the split loop, 1 to 8.
        combine_warps: Warps of a combine program: 1, 2, 4 or 8.
        combine_width: Dims that a combine program merges: 32, 64 or 192.
        pieces: In how many pieces the 192 dims of a key or a value are loaded: 3 equal ones, or 2,
            of 128 and 64.
        parts: In how many parts a split is attended to, one after the other, 1 or 4. With 4, and a
            multiple of 4 rows, programs of inactive rows take parts of active ones over.

    Raises:
        TypeError: A setting is no integer.
        ValueError: A setting is out of range.
    """

    splits: int
    tile: int = 32
    warps: int = 2
    stages: int = 3
    combine_warps: int = 4
    combine_width: int = 192
    pieces: int = 3
    parts: int = 1

    def __post_init__(self) -> None:
        for name, legal in _LEGAL.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"config.{name}: expected an integer, got {type(value).__name__}")
            if value not in legal:
                expected = f"{legal[0]} to {legal[-1]}" if isinstance(legal, range) else f"{legal}"
                raise ValueError(f"config.{name}: expected {expected}, got {value}")

    @property
    def combines(self) -> bool:
        """Whether several programs may attend to a row, and combine merges what they found."""
        return self.splits > 1 or self.parts > 1

    @property
    def tile_regions(self) -> int:
        """Regions a program loads at a time."""
        return self.tile // REGION_TOKENS


_LEGAL = {
    "splits": range(1, MAX_SPLITS + 1),
    "tile": (16, 32, 64, 128),
    "warps": (1, 2, 4, 8),
    "stages": range(1, 9),
    "combine_warps": (1, 2, 4, 8),
    "combine_width": (32, 64, 192),
    "pieces": (2, 3),
    "parts": (1, 4),
}


class Shape(NamedTuple):
    """The settings of a `Config` that make a split program what it is."""

    tile: int
    warps: int
    stages: int
    pieces: int
    parts: int = 1


SHAPES = {
    "lone tile": Shape(32, 4, 2, 3),
    "large tile": Shape(64, 4, 2, 3),
    "one warp": Shape(32, 1, 3, 2),
    "two pieces": Shape(32, 2, 3, 2),
    "two pieces in parts": Shape(32, 2, 3, 2, parts=4),
    "small tiles": Shape(16, 2, 3, 3),
    "small tiles in parts": Shape(16, 2, 3, 3, parts=4),
    "usual": Shape(32, 2, 3, 3),
}

_MULTIPROCESSORS = 132  # of an H200


def default_config(geometry: Geometry) -> Config:
    """Settings for a call's sizes, as runs on an H200 found them.

    Args:
        geometry: From `contract.check_call`.

    With four small programs at a time on each of the H200's 132 multiprocessors, the splits are
    those with the least estimated time: rounds of that many programs, each as long as its tiles and
    the fixed cost of a program, which is that of about four tiles; and a merge of two and a half,
    unless there is but one split.

    The shape of a program is the first of these that fits:

    - "lone tile", with at most 8 heads, and one program a multiprocessor or fewer if each has but
      32 tokens: so many splits, four warps, to be done sooner.
    - "large tile", with at most 8 heads, two programs a multiprocessor or fewer, and one tile of 64
      tokens for each.
    - FP8 with at most 8 heads and more than two programs a multiprocessor: "one warp", four of them
      a multiprocessor, if at most a fifth of these are missing and each has 256 tokens; else "two
      pieces", six of them, if each has 512; else "one warp" if each has 512. Instead of the first
      "two pieces in parts", with one row a request and where programs can help each other.
    - FP8 with more heads and 512 tokens a program: "two pieces".
    - 16 bits, more than one split and, with at most 8 heads, more than two programs a
      multiprocessor: "small tiles", in parts where programs can help each other.
    - "usual".

    Programs can help each other with at most 8 heads, a multiple of 4 rows, 16 tiles a program, and
    not too many splits.

    Combine has a program for every 64 dims while rows times heads are few, and for 32 where there
    are many splits; see `_combine`.
    """
    rows = geometry.rows
    tokens = min(geometry.slots, geometry.max_regions) * REGION_TOKENS
    tiles = -(-tokens // 64)
    at_once = 4 * _MULTIPROCESSORS

    def estimate(splits: int) -> tuple[float, int]:
        rounds = -(-rows * splits // at_once)
        return rounds * (-(-tiles // splits) + 4) + (2.5 if splits > 1 else 0), splits

    most = min(tiles, 128)
    splits = min(range(1, most + 1), key=estimate)
    few_heads = geometry.heads <= 8
    few = rows * splits <= at_once // 2 and few_heads

    def lends(name: str) -> bool:
        """Whether there are mates, and programs long enough for parts.

        And combine, which then holds the partials of four, has registers for them.
        """
        width = _combine(geometry, splits, SHAPES[name].parts)["combine_width"]
        fits = few_heads and _power_of_two(splits) * width <= 2048
        return fits and rows % 4 == 0 and splits * 16 * SHAPES[name].tile <= tokens

    shape = "usual"
    if few and rows * -(-tokens // 32) <= _MULTIPROCESSORS:
        splits, shape = -(-tokens // 32), "lone tile"
    elif few:
        shape = "large tile" if splits * 64 >= tokens else "usual"
    elif geometry.fp8 and few_heads:
        four, six = (min(programs * _MULTIPROCESSORS // rows, most) for programs in (4, 6))
        if rows * four >= 0.8 * at_once and four * 256 <= tokens:
            splits, shape = four, "one warp"
            if geometry.rows_per_request == 1 and lends("two pieces in parts"):
                shape = "two pieces in parts"
        elif six and six * 512 <= tokens:
            splits, shape = six, "two pieces"
        elif splits * 512 <= tokens:
            shape = "one warp"
    elif geometry.fp8 and splits * 512 <= tokens:
        shape = "two pieces"
    elif not geometry.fp8 and splits > 1:
        shape = "small tiles in parts" if lends("small tiles in parts") else "small tiles"
    chosen = SHAPES[shape]
    return Config(splits=splits, **chosen._asdict(), **_combine(geometry, splits, chosen.parts))


def _power_of_two(least: int) -> int:
    """The smallest one that is no less."""
    return 1 << (least - 1).bit_length()


def _combine(geometry: Geometry, splits: int, parts: int = 1) -> dict[str, int]:
    """Settings with which combine holds its partials in registers, and is done soonest."""
    many = 640 if parts > 1 else 512
    partials = _power_of_two(splits)
    width = 192 if geometry.rows * geometry.heads >= many else 64
    if partials * width > 4096:
        width = 64 if partials <= 64 else 32
    return {"combine_warps": 1 if partials <= 128 else 4, "combine_width": width}


@dataclass(frozen=True)
class Plan:
    """Everything static about one launch of the Pallas kernels.

    Strides count elements of the buffer they belong to; where `words`, those of the cache count
    words.

    Attributes:
        geometry: Sizes of the call; the splits of `config` hold.
        config: Launch settings.
        scale: Multiplies q.k.
        clear_inactive: Zero inactive rows; otherwise leave them as they are in `output`.
        return_lse: Whether natural-log lse is computed.
        words: Whether the cache is read as 16-bit words of two FP8 elements.
        query_strides: (row, head).
        cache_strides: (page, group, token).
        regions_stride: Row stride, in elements of the index dtype.
        wide_regions: Whether `regions` is int64, seen as pairs of int32.
        table_stride: Row stride of `block_table`.
        wide_positions: Whether `positions` is int64, seen as pairs of int32.
        output_strides: (row, head).
        gate_strides: (token, head); (0, 0) without a gate.
        shapes: Shape of each buffer that is laid out in lines, by name.
        offset_unit: The cache begins at an offset into its buffer that is an operand and a multiple
            of this many elements of the cache; 0 if there is no such operand.
        last_offset: Largest offset at which a page of the cache ends inside its page of the buffer,
            and within what 32 bits count from where that begins.
        dependent_launch: Wait for the preceding kernel inside this one (sm_90 and newer).
        interpret: Run in Pallas' interpreter.
    """

    geometry: Geometry
    config: Config
    scale: float
    clear_inactive: bool
    return_lse: bool
    words: bool
    query_strides: tuple[int, int]
    cache_strides: tuple[int, int, int]
    regions_stride: int
    wide_regions: bool
    table_stride: int
    wide_positions: bool
    output_strides: tuple[int, int]
    gate_strides: tuple[int, int]
    shapes: tuple[tuple[str, tuple[int, int]], ...]
    offset_unit: int = 0
    last_offset: int = 0
    dependent_launch: bool = False
    interpret: bool = False

    def buffer(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape in which the kernels see an array."""
        geometry = self.geometry
        dtypes = {
            "query": geometry.query_dtype,
            "cache": "uint16" if self.words else geometry.cache_dtype,
            "gate": geometry.gate_dtype,
            "output": geometry.output_dtype,
            "active": "bool",
            "k_scale": "float32",
            "v_scale": "float32",
        }
        shapes = {
            **dict(self.shapes),
            "positions": (geometry.rows * (2 if self.wide_positions else 1),),
            "active": (geometry.rows,),
            "k_scale": (1,),
            "v_scale": (1,),
            "offset": (1,),
        }
        return dtypes.get(name) or "int32", shapes[name]

    @property
    def lends(self) -> bool:
        """Whether programs of inactive rows take parts of active ones over."""
        return self.config.parts > 1 and self.geometry.rows % self.config.parts == 0

    @property
    def operand(self) -> str:
        """Dtype of the operands of the products."""
        return "float16" if self.geometry.fp8 else self.geometry.cache_dtype

    @property
    def padded_heads(self) -> int:
        """Heads, padded to what the tensor core's shape asks for."""
        return 8 if self.geometry.heads <= 8 else 16

    @property
    def line(self) -> int:
        """Buffer elements that hold the 192 dims of one key or value."""
        return HEAD_DIM // 2 if self.words else HEAD_DIM

    @property
    def page_lines(self) -> int:
        """Lines from one page to the next, where the cache can be seen as lines of a token each.

        0 where it cannot: a line then is a page.
        """
        geometry = self.geometry
        page_stride, group_stride, token_stride = self.cache_strides
        if not page_stride or not token_stride or page_stride % token_stride:
            return 0
        reach = (geometry.groups - 1) * (group_stride % token_stride) + 2 * self.line
        # The interpreter keeps to its line, from which an offset may lead away.
        if reach > token_stride or (self.interpret and self.offset_unit):
            return 0
        lines, rest = divmod(math.prod(dict(self.shapes)["cache"]), token_stride)
        return 0 if rest or lines >= 2**31 else page_stride // token_stride

    @property
    def key_pieces(self) -> tuple[tuple[int, int], ...]:
        """(begin, width) of the power-of-two pieces that make up a key."""
        third = self.line // 3
        if self.config.pieces == 2:
            return (0, 2 * third), (2 * third, third)
        return tuple((begin, third) for begin in range(0, self.line, third))

    @property
    def value_pieces(self) -> tuple[tuple[int, int], ...]:
        """The same for a value, which ends where the next key begins."""
        third = self.line // 3
        return ((0, third), (third, 2 * third)) if self.config.pieces == 2 else self.key_pieces


def make_plan(
    geometry: Geometry,
    specs: Mapping[str, ArraySpec],
    *,
    scale: float,
    clear_inactive: bool,
    return_lse: bool = False,
    config: Config | None = None,
    splits: int | None = None,
    cache_unit: int = 0,
    cache_page: int = 0,
    cache_is_even: bool = True,
) -> Plan:
    """Works out how a checked call is launched.

    Args:
        geometry: From `contract.check_call`.
        specs: The arrays of the call by name; without `output`, a dense new one is made.
        scale: As in the call.
        clear_inactive: As in the call.
        return_lse: Whether natural-log lse is wanted.
        config: Launch settings; None takes `default_config`.
        splits: Overrides the splits of `config` if not None; without a `config`, also takes back
            that a split has parts.
        cache_unit: For a cache inside larger pages, what each offset into them is a multiple of, in
            elements.
        cache_page: The size of these larger pages, in elements.
        cache_is_even: Whether the cache begins at an even address.

    Raises:
        NotImplementedError: The cache has 2**31 tokens or more, an FP8 cache in odd strides spans
            more than 2 GiB, or what belongs to one page or row reaches over 2**31 elements or more.
    """
    given, config = config, config or default_config(geometry)
    if splits is not None:
        combine = {} if given else {**_combine(geometry, int(splits)), "parts": 1}
        config = replace(config, splits=int(splits), **combine)
    output = specs.get("output") or ArraySpec(
        (geometry.rows, geometry.heads, HEAD_DIM), geometry.output_dtype
    )
    lines = {**specs, "output": output}
    shapes = {
        name: _lines(lines[name])
        for name in ("query", "cache", "regions", "block_table", "gate", "output")
        if name in lines
    }
    if cache_unit:
        shapes["cache"] = (geometry.pages, cache_page)
    cache_strides = (
        shapes["cache"][1] if specs["cache"].stride(0) else 0,
        specs["cache"].stride(1) if geometry.groups > 1 else 0,
        specs["cache"].stride(2),
    )
    if geometry.pages * geometry.page_size >= 2**31:
        raise NotImplementedError(
            "cache: expected pages with fewer than 2**31 tokens in all, got "
            f"{geometry.pages} pages of {geometry.page_size} tokens"
        )
    numbers = (*cache_strides, shapes["cache"][1], cache_unit)
    words = geometry.fp8 and cache_is_even and not any(number % 2 for number in numbers)
    if words:
        shapes["cache"] = (shapes["cache"][0], shapes["cache"][1] // 2)
        cache_strides = tuple(stride // 2 for stride in cache_strides)
    elif geometry.fp8 and shapes["cache"][0] * shapes["cache"][1] > 2**31:
        raise NotImplementedError(
            "cache: FP8 at odd strides or an odd address is implemented up to 2 GiB, "
            f"got a span of {shapes['cache'][0] * shapes['cache'][1]} bytes"
        )
    last_offset = 0
    if cache_unit:
        room = min(cache_page, 2**32 if words else 2**31) - extent(specs["cache"])
        last_offset = min(room, 2**31 - 1)
    for name in shapes:
        reach = extent(lines[name]) // (2 if words and name == "cache" else 1)
        if reach >= 2**31:
            raise NotImplementedError(
                f"{name}: expected strides by which what shares the first index lies within "
                f"2**31 elements, got {list(lines[name].strides or ())}"
            )
    wide_regions = specs["regions"].dtype == "int64"
    if wide_regions:
        shapes["regions"] = (shapes["regions"][0], 2 * shapes["regions"][1])
    return Plan(
        geometry=replace(geometry, splits=config.splits),
        config=config,
        scale=float(scale),
        clear_inactive=clear_inactive or "output" not in specs,
        return_lse=return_lse,
        words=words,
        query_strides=(specs["query"].stride(0), specs["query"].stride(1)),
        cache_strides=cache_strides,
        regions_stride=specs["regions"].stride(0),
        wide_regions=wide_regions,
        table_stride=specs["block_table"].stride(0),
        wide_positions=specs["positions"].dtype == "int64",
        output_strides=(output.stride(0), output.stride(1)),
        gate_strides=(specs["gate"].stride(0), specs["gate"].stride(1))
        if "gate" in specs
        else (0, 0),
        shapes=tuple(shapes.items()),
        offset_unit=cache_unit,
        last_offset=last_offset,
    )


def plan_again(plan: Plan, specs: Mapping[str, ArraySpec], **changes: Any) -> Plan:
    """The plan of the same call for a cache that lies otherwise.

    Args:
        plan: From `make_plan`.
        specs: The arrays of the call by name.
        **changes: Arguments of `make_plan` that say how the cache lies.

    Raises:
        NotImplementedError: As in `make_plan`.
    """
    return make_plan(
        plan.geometry,
        specs,
        scale=plan.scale,
        clear_inactive=plan.clear_inactive,
        return_lse=plan.return_lse,
        config=plan.config,
        **changes,
    )


def check_offset(offset: int, last: int) -> None:
    """Raises NotImplementedError for an offset beyond the last one of a plan."""
    if offset > last:
        raise NotImplementedError(
            f"cache: expected an offset of at most {last} elements into its pages, so that 32 bits "
            f"reach its end, got {offset}"
        )


def _lines(spec: ArraySpec) -> tuple[int, int]:
    """A two-dimensional dense shape, lines of the first stride, that spans the array."""
    inside, stride = extent(spec), spec.stride(0)
    if spec.shape[0] == 1 or stride == 0:
        return 1, inside
    span = inside + (spec.shape[0] - 1) * stride
    return -(-span // stride), stride


def extent(spec: ArraySpec) -> int:
    """Elements from the first to the last of one line, both counted."""
    return 1 + sum((spec.shape[dim] - 1) * spec.stride(dim) for dim in range(1, len(spec.shape)))
