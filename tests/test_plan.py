"""Plans that no array of a test could have: what 32-bit places inside a line cannot reach."""

import pytest

from sparse_decode.contract import ArraySpec, check_call
from sparse_decode.plan import make_plan


def plan(group_stride, cache):
    """A call whose two groups lie `group_stride` elements apart."""
    specs = {
        "query": ArraySpec((2, 8, 192), "bfloat16"),
        "cache": ArraySpec((4, 2, 16, 384), cache, (16 * 384, group_stride, 384, 1)),
        "regions": ArraySpec((2, 5), "int32"),
        "block_table": ArraySpec((1, 4), "int32"),
        "positions": ArraySpec((2,), "int32"),
        "active": ArraySpec((2,), "bool"),
        "k_scale": ArraySpec((), "float32"),
        "v_scale": ArraySpec((), "float32"),
    }
    options = {"scale": 1.0, "clear_inactive": True}
    return make_plan(check_call(**specs, **options, splits=1), specs, **options)


@pytest.mark.parametrize(
    ("cache", "group_stride"), [("bfloat16", 2**31 - 2**14), ("float8_e4m3fn", 2**32 - 2**14)]
)
def test_groups_as_far_apart_as_32_bits_reach(cache, group_stride):
    words = 2 if cache == "float8_e4m3fn" else 1
    assert plan(group_stride, cache).cache_strides[1] == group_stride // words


@pytest.mark.parametrize(("cache", "group_stride"), [("bfloat16", 2**31), ("uint8", 2**32)])
def test_groups_further_apart_are_refused(cache, group_stride):
    with pytest.raises(NotImplementedError, match=rf"^cache: .* 2\*\*31 .*{group_stride}"):
        plan(group_stride, cache)
