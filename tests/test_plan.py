"""Plans: sizes that no array of a test could have, and the default settings."""

from dataclasses import replace

import pytest

from sparse_decode.contract import ArraySpec, check_call
from sparse_decode.plan import SHAPES, check_offset, default_config, make_plan

OPTIONS = {"scale": 1.0, "clear_inactive": True}


def geometry_of(specs, splits=1, **options):
    return check_call(**specs, **OPTIONS, splits=splits, **options)


def plan_of(specs, **options):
    return make_plan(geometry_of(specs), specs, **OPTIONS, **options)


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
    return plan_of(specs)


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


@pytest.mark.parametrize(
    ("cache", "page", "last"),
    [
        ("bfloat16", 2**20, 2**20 - 64 * 384),
        ("bfloat16", 2**33, 2**31 - 64 * 384),
        ("float8_e4m3fn", 2**33, 2**31 - 1),
    ],
)
def test_offsets_into_pages_reach_as_far_as_32_bits(cache, page, last):
    specs = specs_of(4, 33, cache)
    specs["cache"] = ArraySpec((3, 1, 64, 384), cache, (page, 0, 384, 1))
    specs["block_table"] = ArraySpec((4, 64), "int32")
    plan = plan_of(specs, cache_unit=16, cache_page=page)
    assert plan.last_offset == last
    check_offset(last, plan.last_offset)
    with pytest.raises(NotImplementedError, match=rf"^cache: .*at most {last} .*got {last + 16}"):
        check_offset(last + 16, plan.last_offset)


@pytest.mark.parametrize(("pages", "fits"), [(2**27 - 1, True), (2**27, False)])
def test_places_count_to_32_bits(pages, fits):
    specs = specs_of(4, 33, "bfloat16")
    specs["cache"] = ArraySpec((pages, 1, 16, 384), "bfloat16")
    specs["block_table"] = ArraySpec((4, 64), "int32")
    if fits:
        assert plan_of(specs).geometry.pages == pages
    else:
        with pytest.raises(NotImplementedError, match=rf"^cache: .*2\*\*31 tokens.*{pages}"):
            plan_of(specs)


def specs_of(rows, slots, cache):
    """A call of one group and 8 heads whose requests have room for 65536 tokens."""
    specs = {
        "query": ArraySpec((rows, 8, 192), "bfloat16"),
        "cache": ArraySpec((4096, 1, 64, 384), cache),
        "regions": ArraySpec((rows, slots), "int32"),
        "block_table": ArraySpec((rows, 1024), "int32"),
        "positions": ArraySpec((rows,), "int32"),
        "active": ArraySpec((rows,), "bool"),
    }
    if cache == "float8_e4m3fn":
        specs |= {name: ArraySpec((), "float32") for name in ("k_scale", "v_scale")}
    return specs


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize(
    ("strides", "lines"),
    [
        ((2 * 16 * 384, 16 * 384, 384), 32),  # groups first
        ((2 * 16 * 384, 384, 2 * 384), 16),  # tokens first
        ((7 * 16 * 384, 16 * 384, 384), 112),  # more layers in a page
        ((2 * 16 * 400, 16 * 400, 400), 32),  # tokens apart
        ((33 * 800, 16 * 800 + 400, 800), 33),  # a group begins in the middle of a token
        ((2 * 16 * 384 + 16, 16 * 384, 384), 0),  # side data between pages
        ((2 * 16 * 384 + 384, 16 * 384 + 16, 384), 0),  # and between groups
        ((16 * 384, 8, 384), 0),  # groups that reach into the next token
        ((16 * 384, 0, 384), 16),
        ((0, 16 * 384, 384), 0),
        ((2 * 16 * 384, 16 * 384, 0), 0),
    ],
)
def test_lines_of_a_token_each(strides, lines, cache):
    specs = specs_of(4, 33, cache)
    specs["query"] = ArraySpec((8, 8, 192), "bfloat16")
    specs |= {"regions": ArraySpec((8, 33), "int32"), "positions": ArraySpec((8,), "int32")}
    specs |= {"active": ArraySpec((8,), "bool")}
    specs["cache"] = ArraySpec((64, 2, 16, 384), cache, (*strides, 1))
    assert plan_of(specs).page_lines == lines


@pytest.mark.parametrize(("pages", "lines"), [(2**21 - 1, 1024), (2**21, 0)])
def test_lines_count_to_32_bits(pages, lines):
    specs = specs_of(4, 33, "bfloat16")
    specs["cache"] = ArraySpec((pages, 1, 16, 384), "bfloat16", (1024 * 384, 0, 384, 1))
    assert plan_of(specs).page_lines == lines


def test_an_offset_leads_away_from_a_line_that_the_interpreter_keeps_to():
    specs = specs_of(4, 33, "bfloat16")
    plan = plan_of(specs, cache_unit=16, cache_page=64 * 384)
    assert (plan.page_lines, replace(plan, interpret=True).page_lines) == (64, 0)


@pytest.mark.parametrize("cache", ["float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 16, 64, 133, 140, 256, 384, 600, 1024])
@pytest.mark.parametrize("slots", [1, 7, 9, 24, 25, 64, 513, 1025])
def test_default_settings_are_those_of_the_table(cache, rows, slots):
    """The table of `docs/performance.md`."""
    fp8 = cache == "float8_e4m3fn"
    specs = specs_of(rows, slots, cache)
    config = default_config(geometry_of(specs))
    shape = {name for name, shape in SHAPES.items() if replace(config, **shape._asdict()) == config}
    tokens = slots * 8

    four, six = (programs * 132 // rows for programs in (4, 6))
    lends = rows % 4 == 0 and config.splits * 16 * config.tile <= tokens
    lends = lends and 2 ** (config.splits - 1).bit_length() * config.combine_width <= 2048
    if rows * -(-tokens // 32) <= 132:
        assert shape == {"lone tile"}
    elif rows * config.splits <= 264 and config.splits * 64 >= tokens:
        assert shape == {"large tile"}
    elif fp8 and rows > 1 and four * rows >= 423 and four * 256 <= tokens:
        name = "two pieces in parts" if lends else "one warp"
        assert (shape, config.splits) == ({name}, four)
    elif fp8 and rows > 1 and six and six * 512 <= tokens:
        assert (shape, config.splits) == ({"two pieces"}, six)
    elif fp8 and rows > 1 and config.splits * 512 <= tokens:
        assert shape == {"one warp"}
    elif not fp8 and config.splits > 1 and rows * config.splits > 264:
        assert shape == {"small tiles in parts" if lends else "small tiles"}
    else:
        assert shape == {"usual"}


@pytest.mark.parametrize(
    ("rows", "splits", "shape"),
    [
        (32, 16, "one warp"),
        (63, 8, "one warp"),
        (64, 8, "two pieces in parts"),
        (96, 5, "two pieces in parts"),
        (140, 5, "two pieces"),
        (256, 2, "two pieces in parts"),
        (384, 2, "two pieces"),
        (512, 1, "two pieces in parts"),
        (600, 1, "two pieces"),
        (1024, 1, "one warp"),
    ],
)
def test_programs_of_fp8_fill_the_gpu(rows, splits, shape):
    specs = specs_of(rows, 513, "float8_e4m3fn")
    config = default_config(geometry_of(specs))
    assert config == replace(config, splits=splits, **SHAPES[shape]._asdict())


def test_rows_of_one_request_stay_with_one_warp():
    specs = specs_of(64, 513, "float8_e4m3fn")
    specs["block_table"] = ArraySpec((16, 1024), "int32")
    config = default_config(geometry_of(specs, query_len=4))
    assert config == replace(config, splits=8, **SHAPES["one warp"]._asdict())


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_default_settings_of_long_selections(rows):
    """As many splits as combine may have, and two warps for a few programs."""
    specs = specs_of(rows, 8192, "float8_e4m3fn")
    config = default_config(geometry_of(specs))
    assert config.splits == 128
    shape = "usual" if rows < 3 else "two pieces"
    assert config == replace(config, **SHAPES[shape]._asdict())


@pytest.mark.parametrize(
    ("splits", "warps", "width"),
    [(16, 1, 192), (17, 1, 64), (64, 1, 64), (65, 1, 32), (128, 1, 32), (129, 4, 32), (256, 4, 32)],
)
def test_combine_holds_the_partials_of_other_splits(splits, warps, width):
    specs = specs_of(64, 513, "bfloat16")
    geometry = geometry_of(specs, splits)
    config = make_plan(geometry, specs, **OPTIONS, splits=splits).config
    assert config == replace(config, splits=splits, parts=1)
    assert (config.combine_warps, config.combine_width) == (warps, width)
    given = default_config(geometry)
    plan = make_plan(geometry, specs, **OPTIONS, splits=splits, config=given)
    assert plan.config == replace(given, splits=splits)
    assert given.parts == 4


@pytest.mark.parametrize(
    ("rows", "slots", "shape"),
    [
        (64, 1025, "small tiles in parts"),
        (92, 8192, "small tiles in parts"),
        (16, 2049, "small tiles"),
    ],
)
def test_programs_are_lent_where_combine_holds_what_four_found(rows, slots, shape):
    specs = specs_of(rows, slots, "bfloat16")
    config = default_config(geometry_of(specs))
    assert config == replace(config, **SHAPES[shape]._asdict())
