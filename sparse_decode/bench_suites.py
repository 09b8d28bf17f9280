"""The settings that are timed, and the suites that name them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparse_decode.contract import CACHE_DIM, REGION_TOKENS

CACHES = {"fp8": "float8_e4m3fn", "bf16": "bfloat16", "fp16": "float16"}
HEADLINE_ROWS = (1, 16, 64, 256)


@dataclass(frozen=True)
class Setting:
    """What is timed.

    Attributes:
        cache: "float8_e4m3fn", "bfloat16" or "float16".
        requests: Requests in the batch.
        heads, groups, query_len, slots, page_size: As in the contract.
        context: Tokens of each request.
        inactive: Share of the requests that is padding.

    Raises:
        ValueError: The cache is unknown, or a size is out of range.
    """

    cache: str
    requests: int
    heads: int = 8
    groups: int = 1
    query_len: int = 1
    slots: int = 513
    page_size: int = 64
    context: int = 65536
    inactive: float = 0.0

    def __post_init__(self) -> None:
        if self.cache not in CACHES.values():
            raise ValueError(f"cache: expected one of {[*CACHES.values()]}, got {self.cache!r}")
        for name in ("requests", "heads", "groups", "query_len", "slots", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.context < self.query_len:
            raise ValueError(
                f"context: expected at least query_len = {self.query_len}, got {self.context}"
            )
        if not 0 <= self.inactive < 1:
            raise ValueError(f"inactive: expected 0 to less than 1, got {self.inactive}")

    @property
    def rows(self) -> int:
        """Rows of the call."""
        return self.requests * self.query_len * self.groups

    @property
    def fp8(self) -> bool:
        """Whether the cache holds FP8."""
        return self.cache == CACHES["fp8"]

    @property
    def live_slots(self) -> int:
        """Slots of a row that hold a region: as many as the first token of a request can have."""
        return min(self.slots, (self.context - self.query_len) // REGION_TOKENS + 1)

    @property
    def active_requests(self) -> int:
        """Requests that are no padding, at least one."""
        return max(1, self.requests - round(self.requests * self.inactive))

    @property
    def bytes(self) -> int:
        """Bytes of keys and values in the regions of active rows."""
        rows = self.active_requests * self.query_len * self.groups
        return rows * self.live_slots * REGION_TOKENS * CACHE_DIM * (1 if self.fp8 else 2)

    @property
    def name(self) -> str:
        """Cache and rows, and in what the setting differs from the default."""
        short = {dtype: name for name, dtype in CACHES.items()}[self.cache]
        usual = type(self)(self.cache, self.requests)
        words = [
            word.format(getattr(self, field))
            for field, word in _WORDS.items()
            if getattr(self, field) != getattr(usual, field)
        ]
        return ", ".join([f"{short} {self.rows} rows", *words])


_WORDS = {
    "heads": "{} heads",
    "groups": "{} groups",
    "query_len": "query_len {}",
    "slots": "R {}",
    "page_size": "page {}",
    "context": "context {}",
    "inactive": "{:.0%} inactive",
}


def _both(**changes: float) -> tuple[Setting, ...]:
    """A setting of 64 rows unless changed, for an FP8 and for a bf16 cache."""
    return tuple(
        Setting(CACHES[cache], **{"requests": 64, **changes})  # type: ignore[arg-type]
        for cache in ("fp8", "bf16")
    )


def _at_rows(rows: tuple[int, ...], **changes: float) -> tuple[Setting, ...]:
    settings = (_both(requests=requests, **changes) for requests in rows)
    return tuple(sorted((s for both in settings for s in both), key=lambda s: not s.fp8))


SUITES: dict[str, tuple[Setting, ...]] = {
    "headline": _at_rows(HEADLINE_ROWS),
    "heads": _both(heads=4) + _both(heads=16),
    "groups": _both(requests=8, groups=8),
    "page": _both(page_size=16),
    "verify": _both(requests=16, query_len=4),
    "slots": _both(slots=1025),
    "short": _at_rows((16, 256), context=200),
    "inactive": _at_rows((64, 256), inactive=0.75),
    "fp16": tuple(replace(s, cache=CACHES["fp16"]) for s in _both(requests=64)[:1]),
}
SUITES["full"] = tuple(setting for suite in SUITES.values() for setting in suite)
SUITES["rows"] = _at_rows((2, 4, 8, 32, 128, 384, 512)) + _at_rows((64, 128), context=200)
SUITES["smoke"] = tuple(replace(s, context=4096, slots=65) for s in _both(requests=2))


def settings_of(suites: tuple[str, ...] | list[str]) -> list[Setting]:
    """The settings of several suites, each once and those with one cache side by side.

    Raises:
        ValueError: There is no such suite.
    """
    for name in suites:
        if name not in SUITES:
            raise ValueError(f"suite: expected one of {', '.join(SUITES)}, got {name!r}")
    settings = dict.fromkeys(setting for name in suites for setting in SUITES[name])
    order = [*CACHES.values()]
    return sorted(settings, key=lambda setting: order.index(setting.cache))
