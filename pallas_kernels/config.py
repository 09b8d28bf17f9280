"""Launch settings of the Pallas kernels, and the default for a call's sizes."""

from __future__ import annotations

from dataclasses import dataclass

from sparse_decode.contract import MAX_SPLITS, REGION_TOKENS, Geometry


@dataclass(frozen=True)
class Config:
    """How the split and combine kernels are launched.

    Attributes:
        splits: Programs that share a row's live slots, 1 to 256.
        tile: Tokens a program loads at a time: 16, 32, 64 or 128.
        warps: Warps of a split program: 1, 2, 4 or 8.
        stages: Software pipeline depth of the split loop, 1 to 8.
        combine_warps: Warps of a combine program: 1, 2, 4 or 8.

    Raises:
        ValueError: A setting is out of range.
    """

    splits: int
    tile: int = 64
    warps: int = 4
    stages: int = 3
    combine_warps: int = 4

    def __post_init__(self) -> None:
        legal = {
            "splits": range(1, MAX_SPLITS + 1),
            "tile": (16, 32, 64, 128),
            "warps": (1, 2, 4, 8),
            "stages": range(1, 9),
            "combine_warps": (1, 2, 4, 8),
        }
        for name, values in legal.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value not in values:
                raise ValueError(f"Config.{name}: expected one of {values}, got {value!r}")

    @property
    def tile_regions(self) -> int:
        """Regions a program loads at a time."""
        return self.tile // REGION_TOKENS


def default_config(geometry: Geometry) -> Config:
    """Settings for a call's sizes."""
    tiles = -(-geometry.slots // (64 // REGION_TOKENS))
    splits = 1
    while splits < min(128, tiles) and geometry.rows * splits * 2 <= 1056:
        splits *= 2
    return Config(splits=splits)
