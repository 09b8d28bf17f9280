"""The oracle against a naive program written from the contract's text, and the tolerance rule.

`naive` walks tokens one at a time in Python floats and shares nothing with `sparse_decode.oracle`.
"""

import dataclasses
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from sparse_decode import captures
from sparse_decode.cases import CASES, build
from sparse_decode.oracle import attended, evaluate
from sparse_decode.tolerance import judge, limits

CASE = {case.name: case for case in CASES}
CAPTURES = sorted(Path(__file__).with_name("captures").glob("*.safetensors"))


def e4m3(bits: int) -> float:
    """FP8 E4M3 (finite and NaN) by its definition: sign, 4 bits of exponent, 3 of mantissa."""
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


FP8_VALUES = [e4m3(bits) for bits in range(256)]


def naive_tokens(call, row):
    """Places (page, offset) of the tokens that a row attends to, and the table entries it reads."""
    groups, page_size = call.cache.shape[1:3]
    position, slots = int(call.positions[row]), call.regions.shape[1]
    request = row // (groups * call.query_len)
    places, entries = [], set()
    if not call.active[row] or position < 0:
        return places, entries
    live = min(max(position, 0) // 8 + 1, slots)
    for slot in range(slots - live, slots):
        region = int(call.regions[row, slot])
        for j in range(8):
            token = 8 * region + j
            if region < 0 or token > position or token >= call.block_table.shape[1] * page_size:
                continue
            entries.add((request, token // page_size))
            page = int(call.block_table[request, token // page_size])
            if 0 <= page < call.cache.shape[0]:
                places.append((page, token % page_size))
    return places, entries


def naive(call, places_of=lambda call, row: naive_tokens(call, row)[0]):
    """Output with its rounding points, the same unrounded, and natural-log lse."""
    rows, heads, _ = call.query.shape
    groups = call.cache.shape[1]
    fp8 = call.cache.dtype.itemsize == 1
    out_dtype = (call.query if call.output is None else call.output).dtype.type
    k_scale = float(call.k_scale.item()) if fp8 else 1.0
    v_scale = float(call.v_scale.item()) if fp8 else 1.0
    rounded = np.zeros((rows, heads, 192), out_dtype)
    exact = np.zeros((rows, heads, 192))
    lse = np.full((rows, heads), -math.inf)
    for row in range(rows):
        lines = []
        for page, offset in places_of(call, row):
            line = call.cache[page, row % groups, offset]
            if fp8:
                lines.append([FP8_VALUES[byte] for byte in line.view(np.uint8).tolist()])
            else:
                lines.append([float(x) for x in line])
        for head in range(heads):
            if not call.active[row]:
                continue
            query = [float(x) for x in call.query[row, head]]
            result = [0.0] * 192
            if lines:
                logits = [
                    call.scale * k_scale * math.fsum(map(float.__mul__, query, line))
                    for line in lines
                ]
                top = max(logits)
                weights = [math.exp(logit - top) for logit in logits]
                total = math.fsum(weights)
                lse[row, head] = top + math.log(total)
                for weight, line in zip(weights, lines, strict=True):
                    for dim in range(192):
                        result[dim] += weight / total * line[192 + dim] * v_scale
            factor = factor_rounded = 1.0
            if call.gate is not None:
                token, group = row // groups, row % groups
                logit = float(call.gate[token, group * heads + head])
                factor = 1 / (1 + math.exp(-logit))
                factor_rounded = float(call.gate.dtype.type(np.float32(factor)))
            for dim in range(192):
                exact[row, head, dim] = result[dim] * factor
                value = out_dtype(result[dim])
                if call.gate is not None:
                    value = out_dtype(np.float32(float(value)) * np.float32(factor_rounded))
                rounded[row, head, dim] = value
    return rounded, exact, lse


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


NAIVE_CASES = [
    "fp8_heads4",
    "fp8_query_fp16",  # gate in float16
    "fp8_output_fp16",
    "uint8_verify4_groups2",  # gate in float32
    "fp8_head1",
    "fp8_groups3",
    "fp8_one_slot",
    "fp8_edges",  # gate in bfloat16
    "fp8_inactive",
    "fp8_inactive_kept",
    "fp8_blank_rows",
    "fp8_holes_repeated",
    "fp8_outside",
    "fp8_token_major_strided",
    "fp8_strided_gate",
    "bf16_head1_page8",
    "bf16_verify4",
    "bf16_outside",
    "bf16_packed_strided",
    "bf16_sharp",
    "fp16_heads4_gate",
    "empty",
]


@pytest.mark.parametrize("name", NAIVE_CASES)
def test_oracle_is_what_the_contract_says(name):
    call = build(CASE[name])
    reference = evaluate(call)
    rounded, exact, lse = naive(call)
    assert reference.output.dtype == rounded.dtype
    np.testing.assert_allclose(reference.exact, exact, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(reference.lse, lse, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(bits(reference.output + 0), bits(rounded + 0))  # -0 is 0
    kept = ~call.active if not call.clear_inactive else np.zeros(len(call.active), bool)
    np.testing.assert_array_equal(reference.touched, ~kept)


@pytest.mark.parametrize("name", NAIVE_CASES)
def test_attended_places(name):
    call = build(CASE[name])
    for row in range(len(call.query)):
        pages, offsets = attended(call, row)
        found = list(zip(pages.tolist(), offsets.tolist(), strict=True))
        assert sorted(found) == sorted(naive_tokens(call, row)[0])


def test_fp8_values_agree_with_ml_dtypes():
    theirs = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(float)
    np.testing.assert_array_equal(theirs, FP8_VALUES)


def test_wide_ids_are_not_cut_to_32_bits():
    """Ids of 2**32 + i and positions beyond int32 mean what they say."""
    call = build(CASE["bf16"])
    wide = call.regions.copy()
    wide[0, -1] += 1 << 32
    dropped = call.regions.copy()
    dropped[0, -1] = -1
    results = [evaluate(dataclasses.replace(call, regions=ids)) for ids in (wide, dropped)]
    np.testing.assert_array_equal(results[0].exact, results[1].exact)
    assert not np.array_equal(results[0].exact[0], evaluate(call).exact[0])
    far = call.positions.copy()
    far[0] = (1 << 32) + 3
    near = call.positions.copy()
    near[0] = 3
    counts = [
        len(attended(dataclasses.replace(call, positions=positions), 0)[0])
        for positions in (far, near)
    ]
    assert counts[0] > 8 > counts[1]


# --- what must not matter


def poisoned_again(call, seed):
    """The call with new random content in everything that the contract says does not matter."""
    rng = np.random.default_rng(seed)
    dtype = call.cache.dtype

    def garbage(shape, dtype):
        raw = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]
        if dtype.kind != "i" and dtype.itemsize > 1:
            raw = np.where(rng.random(shape) < 0.2, dtype.type(math.inf), raw)
        return raw.astype(dtype)

    cache = garbage(call.cache.shape, dtype)
    table = garbage(call.block_table.shape, call.block_table.dtype)
    regions = call.regions.copy()
    query, gate = call.query.copy(), None if call.gate is None else call.gate.copy()
    positions = call.positions.copy()
    groups, slots = call.cache.shape[1], regions.shape[1]
    for row in range(len(call.query)):
        places, entries = naive_tokens(call, row)
        for page, offset in places:
            cache[page, row % groups, offset] = call.cache[page, row % groups, offset]
        for entry in entries:
            table[entry] = call.block_table[entry]
        live = min(max(int(positions[row]), 0) // 8 + 1, slots)
        live = live if call.active[row] and positions[row] >= 0 else 0
        regions[row, : slots - live] = garbage((slots - live,), regions.dtype)
        if not call.active[row]:
            query[row] = garbage(query[row].shape, query.dtype)
            positions[row] = rng.integers(-(2**31), 2**31)
            if gate is not None:
                gate[row // groups] = math.inf
    return dataclasses.replace(
        call,
        cache=cache,
        block_table=table,
        regions=regions,
        query=query,
        gate=gate,
        positions=positions,
        output=None if call.output is None else garbage(call.output.shape, call.output.dtype),
    )


@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        "uint8_verify4_groups2",
        "fp8_inactive",
        "fp8_inactive_split1",
        "fp8_inactive_kept",
        "fp8_outside",
        "fp8_blank_rows",
        "fp8_packed",
        "fp8_edges",
        "bf16_inactive",
        "bf16_outside",
        "bf16_packed_strided",
        "fp16_heads4_gate",
    ],
)
def test_what_is_not_attended_does_not_matter(name):
    call = build(CASE[name])
    first = evaluate(call)
    for seed in range(3):
        changed = poisoned_again(call, seed)
        assert not np.array_equal(bits(changed.cache), bits(call.cache))
        again = evaluate(changed)
        for field in dataclasses.fields(first):
            np.testing.assert_array_equal(
                bits(getattr(first, field.name)), bits(getattr(again, field.name)), field.name
            )
        plain = [evaluate(each, plain=True).exact for each in (call, changed)]
        np.testing.assert_array_equal(*plain)


def test_order_of_ids_does_not_matter():
    call = build(CASE["fp8"])
    rng = np.random.default_rng(0)
    shuffled = call.regions.copy()
    for row, position in enumerate(call.positions):
        rng.shuffle(shuffled[row, -min(int(position) // 8 + 1, shuffled.shape[1]) :])
    assert not np.array_equal(shuffled, call.regions)
    again = evaluate(dataclasses.replace(call, regions=shuffled))
    np.testing.assert_allclose(again.exact, evaluate(call).exact, rtol=0, atol=1e-13)


def test_an_id_listed_twice_counts_twice():
    """All slots of the case hold the current region, so lse is that of one slot plus ln(count)."""
    call = build(CASE["fp8_holes_repeated"])
    counts = np.array([(row >= 0).sum() for row in live_slots(call)])
    assert counts.min() > 1
    once = np.full_like(call.regions, -1)
    once[:, -1] = call.positions // 8
    expected = evaluate(dataclasses.replace(call, regions=once))
    found = evaluate(call)
    np.testing.assert_allclose(found.lse - expected.lse, np.log(counts)[:, None] + 0 * found.lse)
    np.testing.assert_allclose(found.exact, expected.exact, atol=1e-13)


def live_slots(call):
    slots = call.regions.shape[1]
    return [
        call.regions[row, slots - min(int(position) // 8 + 1, slots) :]
        for row, position in enumerate(call.positions)
    ]


# --- recorded outputs


@pytest.mark.parametrize("path", CAPTURES, ids=lambda path: path.stem)
def test_recorded_outputs_are_within_tolerance(path):
    capture = captures.load(path)
    verdict = judge(limits(capture.call), capture.output, None, None)
    assert verdict.ok, verdict.fault
    assert 0 < verdict.share <= 1


def test_all_captures_are_there():
    assert len(CAPTURES) == 12


# --- planted faults


def good(call):
    """A result that is right: what a plain program computes."""
    plain = evaluate(call, plain=True)
    return plain.output.copy(), plain.lse.astype(np.float32)


def verdict_on(call, output, lse=None, before=None):
    return judge(limits(call), output, lse, before)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_plain_program_is_within_tolerance(case):
    call = build(case)
    output, lse = good(call)
    if not call.clear_inactive:
        output[~call.active] = call.output[~call.active]
    verdict = verdict_on(call, output, lse, call.output)
    assert verdict.ok, verdict.fault
    assert max(verdict.share, verdict.lse_share) <= 0.5  # the rule allows twice its error


# Largest limit of a row, as a share of its largest output: 16-bit roundings and little else.
@pytest.mark.parametrize(
    ("name", "share"), [("fp16", 0.003), ("fp8_output_fp16", 0.003), ("bf16", 0.02), ("fp8", 0.012)]
)
def test_limits_are_tight(name, share):
    allowed = limits(build(CASE[name]))
    largest = np.abs(allowed.reference.exact).max(axis=2)
    assert (allowed.output <= share * largest).all()
    assert (allowed.lse <= 1e-5).all()


def without_token(call, row, index):
    """The output of a program that forgets one attended token of one row."""

    def places(call, other):
        found = naive_tokens(call, other)[0]
        return found[:index] + found[index + 1 :] if other == row else found

    rounded, _, lse = naive(call, places)
    return rounded, lse.astype(np.float32)


def one_row(call, row):
    """The call of one row alone; for calls of one group and one query token a request."""
    pick = slice(row, row + 1)
    per_row = ("query", "regions", "block_table", "positions", "active", "output", "gate")
    arrays = {name: array[pick] for name, array in call.arrays().items() if name in per_row}
    return dataclasses.replace(call, **arrays)


# fp16 all through: every token of a row, however small its weight, is missed in some head.
@pytest.mark.parametrize("index", range(0, 77, 7))
@pytest.mark.parametrize("name", ["fp16", "fp8_output_fp16"])
def test_a_dropped_token_is_found(name, index):
    call = one_row(build(CASE[name]), 1)
    output, lse = without_token(call, 0, index)
    assert not verdict_on(call, output).ok
    assert not verdict_on(call, good(call)[0], lse).ok


def test_a_token_past_the_position_is_found():
    """Past tokens hold NaN in the case; here they hold ordinary lines, as they do in the field."""
    call = one_row(build(CASE["fp16"]), 1)
    places = naive_tokens(dataclasses.replace(call, positions=call.positions + 1), 0)[0]
    (extra,) = set(places) - set(naive_tokens(call, 0)[0])
    cache = call.cache.copy()
    cache[extra[0], 0, extra[1]] = cache[places[0][0], 0, places[0][1]]
    call = dataclasses.replace(call, cache=cache)
    assert verdict_on(call, *good(call)).ok
    output, lse = good(dataclasses.replace(call, positions=call.positions + 1))
    assert not verdict_on(call, output).ok
    assert not verdict_on(call, good(call)[0], lse).ok


def test_a_nan_past_the_position_is_found():
    call = build(CASE["fp16"])
    output, _ = good(dataclasses.replace(call, positions=call.positions + 1))
    verdict = verdict_on(call, output)
    assert "nan where" in verdict.fault
    assert verdict.error == math.inf


def swapped_heads(call):
    output, lse = good(call)
    return np.roll(output, 1, axis=1), np.roll(lse, 1, axis=1)


def wrong_gate_column(call):
    return good(dataclasses.replace(call, gate=np.roll(call.gate, 1, axis=1)))


def gate_forgotten(call):
    return good(dataclasses.replace(call, gate=None))


def scaled(name, factor):
    def change(call):
        new = getattr(call, name) * factor
        new = new.astype(np.float32) if name != "scale" else float(new)
        return good(dataclasses.replace(call, **{name: new}))

    return change


def scales_exchanged(call):
    return good(dataclasses.replace(call, k_scale=call.v_scale, v_scale=call.k_scale))


def wrong_group(call):
    return good(dataclasses.replace(call, cache=call.cache[:, ::-1]))


def wrong_request(call):
    return good(dataclasses.replace(call, block_table=call.block_table[::-1]))


def half_of_the_slots_twice(call):
    """A program that reads the second half of a row's slots in place of the first."""
    call = dataclasses.replace(call, regions=call.regions.copy())
    for ids in live_slots(call):
        half = len(ids) // 2
        ids[:half] = ids[-half:]
    return good(call)


# fault, case on which it is planted, whether the lse shows it as well
PLANTED = [
    (swapped_heads, "bf16", True),
    (swapped_heads, "fp8_heads4", True),
    (wrong_gate_column, "fp16_heads4_gate", False),
    (wrong_gate_column, "fp8_split2_gate", False),
    (gate_forgotten, "fp8_edges", False),
    (scaled("scale", 1.01), "fp16", True),
    (scaled("scale", 0.99), "fp8_output_fp16", True),
    (scaled("k_scale", 1.01), "fp8_output_fp16", True),
    (scaled("v_scale", 1.01), "fp8_output_fp16", False),
    (scaled("v_scale", 0.99), "fp8", False),
    (scales_exchanged, "fp8_output_fp16", True),
    (wrong_group, "fp16_token_major", True),
    (wrong_request, "fp8_heads4", True),
    (half_of_the_slots_twice, "fp16", True),
]


@pytest.mark.parametrize(
    ("plant", "name", "lse_shows"),
    [pytest.param(*row, id=f"{row[0].__name__}-{row[1]}-{i}") for i, row in enumerate(PLANTED)],
)
def test_planted_fault_is_found(plant, name, lse_shows):
    call = build(CASE[name])
    right, right_lse = good(call)
    assert verdict_on(call, right, right_lse).ok
    output, lse = plant(call)
    assert verdict_on(call, output).fault.startswith("output: ")
    lse_verdict = verdict_on(call, right, lse)
    assert lse_verdict.ok != lse_shows
    if lse_shows:
        assert lse_verdict.fault.startswith("lse: ")


# 1 % of the scale of bf16 output drowns in its rounding, but not in the lse.
def test_wrong_scale_with_bf16_shows_in_the_lse():
    call = build(CASE["bf16"])
    output, lse = scaled("scale", 1.01)(call)
    assert verdict_on(call, output, lse).fault.startswith(("output: ", "lse: "))
    assert verdict_on(call, good(call)[0], lse).fault.startswith("lse: ")


@pytest.mark.parametrize("left", [1e-6, -1e-6, math.nan, math.inf])
@pytest.mark.parametrize("name", ["fp8_inactive", "fp8_inactive_split1", "bf16_inactive"])
def test_an_inactive_row_that_is_not_cleared_is_found(name, left):
    call = build(CASE[name])
    output, lse = good(call)
    assert verdict_on(call, output, lse, call.output).ok
    output[~call.active, 3, 100] = left
    assert "output: " in verdict_on(call, output, lse, call.output).fault


def test_an_inactive_row_left_as_it_was_is_found():
    call = build(CASE["fp8_inactive"])
    output, _ = good(call)
    output[~call.active] = call.output[~call.active]
    assert "nan where 0 is expected" in verdict_on(call, output, None, call.output).fault


@pytest.mark.parametrize("name", ["fp8_inactive_kept", "fp8_inactive_kept_split1"])
def test_an_inactive_row_that_should_be_kept(name):
    call = build(CASE[name])
    output, lse = good(call)
    written = verdict_on(call, output, lse, call.output)
    assert written.fault == "an inactive row of output was written"
    output[~call.active] = call.output[~call.active]
    assert verdict_on(call, output, lse, call.output).ok
    bits_of_nan = output[~call.active].view(np.uint16) ^ 1  # another NaN
    output[~call.active] = bits_of_nan.view(output.dtype)
    assert verdict_on(call, output, lse, call.output).fault == written.fault
    new = verdict_on(dataclasses.replace(call, output=None), good(call)[0], lse)
    assert new.ok, "a new array holds zeros there"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fp8", "bf16", "fp16"])
def test_one_bad_element_is_found(name, bad):
    call = build(CASE[name])
    output, lse = good(call)
    output[1, 2, 191] = bad
    verdict = verdict_on(call, output, lse)
    assert f"output: {bad}" in verdict.fault
    assert "at (1, 2, 191)" in verdict.fault
    lse[2, 7] = bad
    assert "lse: " in verdict_on(call, good(call)[0], lse).fault


def test_negative_zero_is_zero():
    call = build(CASE["fp8_inactive"])
    output, lse = good(call)
    output[~call.active] = -0.0
    assert np.signbit(output[~call.active].astype(np.float32)).all()
    assert verdict_on(call, output, lse).ok


def test_an_exact_nan_must_be_a_nan():
    """A NaN that is attended reaches the output, and a result that hides it is wrong."""
    call = build(CASE["fp16"])
    (page, *_), (offset, *_) = attended(call, 0)
    cache = call.cache.copy()
    cache[page, 0, offset, 192 + 5] = math.nan
    spoiled = dataclasses.replace(call, cache=cache)
    output, lse = good(spoiled)
    assert np.isnan(output[0, :, 5]).all()
    assert verdict_on(spoiled, output, lse).ok
    hidden = good(call)[0]
    assert "where nan is expected, at (0, 0, 5)" in verdict_on(spoiled, hidden, lse).fault


def with_lines(call, row, change):
    """The call with changed lines, `[tokens, 384]`, where a row attends; for one group."""
    pages, offsets = attended(call, row)
    cache = call.cache.copy()
    lines = cache[pages, 0, offsets]
    change(lines)
    cache[pages, 0, offsets] = lines
    return dataclasses.replace(call, cache=cache)


def is_found(call, place, off):
    """Whether an error at one place of an otherwise right result is a fault there."""
    output, lse = good(call)
    assert verdict_on(call, output, lse).ok
    output[place] += off
    verdict = verdict_on(call, output, lse)
    return not verdict.ok and f"at {place}" in verdict.fault and verdict.share > 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["fp16", "fp16_heads4_gate"])
def test_one_value_that_is_not_finite_loosens_no_limit(name, value):
    def spoil(lines):
        lines[0, 192 + 5] = value

    call = build(CASE[name])
    spoiled = with_lines(call, 0, spoil)
    assert not np.isfinite(evaluate(spoiled).output[0, :, 5]).any()
    assert (limits(spoiled).output <= limits(call).output).all()
    assert is_found(spoiled, (0, 0, 100), 0.1)
    assert is_found(spoiled, (1, 0, 100), 100)


def test_a_nan_in_a_query_loosens_no_limit_of_other_heads():
    call = build(CASE["fp16"])
    spoiled = dataclasses.replace(call, query=call.query.copy())
    spoiled.query[0, 1, 5] = math.nan
    others = np.ones(call.query.shape[:2], bool)
    others[0, 1] = False
    for name in ("output", "lse"):
        before, after = (getattr(limits(each), name)[others] for each in (call, spoiled))
        np.testing.assert_array_equal(after, before)
    assert is_found(spoiled, (0, 0, 100), 0.1)
    assert is_found(spoiled, (1, 0, 100), 100)


def test_a_token_that_an_infinite_key_shuts_out_loosens_no_limit():
    call = build(CASE["bf16_head1_page8"])

    def spoil(lines):
        lines[0, 9] = -math.copysign(math.inf, call.query[0, 0, 9] * call.scale)

    spoiled = with_lines(call, 0, spoil)
    assert np.isfinite(evaluate(spoiled).exact).all()
    assert (limits(spoiled).lse <= 1e-5).all()
    assert is_found(spoiled, (0, 0, 100), 1)


@pytest.mark.parametrize("limit", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["output", "lse"])
def test_a_number_without_a_limit_is_a_fault(name, limit):
    call = build(CASE["fp16"])
    allowed = limits(call)
    assert judge(allowed, *good(call), None).ok
    getattr(allowed, name)[1, 2] = limit
    verdict = judge(allowed, *good(call), None)
    assert f"{name}: off by " in verdict.fault
    assert f"where {limit} is allowed, at (1, 2" in verdict.fault


def overflowing(gate=None):
    """Values far beyond the output dtype, close to its end on either side, and far inside."""

    def spoil(lines):
        lines[:, 192:196] = [1e6, -65536, 65280, 3e4]

    call = build(CASE["bf16"])
    call = dataclasses.replace(call, output=np.zeros(call.query.shape, np.float16), gate=gate)
    for row in range(len(call.query)):
        call = with_lines(call, row, spoil)
    return call


GATES = {"no gate": None, "gate 0": 0, "gate -9": -9}


@pytest.fixture(params=GATES.values(), ids=GATES.keys())
def overflow(request):
    """A call that overflows, what its gate leaves of 1, and a right result."""
    call = build(CASE["bf16"])
    gate = request.param
    if gate is None:
        return overflowing(), 1, *good(overflowing())
    tokens, heads = len(call.query), call.query.shape[1]
    call = overflowing(np.full((tokens, heads), gate, np.float32))
    return call, 1 / (1 + math.exp(-gate)), *good(call)


def test_what_overflows_is_infinite(overflow):
    call, gate, output, lse = overflow
    np.testing.assert_array_equal(output[1, :, 0], math.inf)
    assert verdict_on(call, output, lse).ok
    for wrong in (-math.inf, math.nan, 65504, 1e6 * gate):
        output[1, 2, 0] = np.float16(min(wrong, 65504))
        fault = verdict_on(call, output, lse).fault
        assert "where inf is expected, at (1, 2, 0)" in fault


def test_at_the_end_of_the_dtype_either_is_right(overflow):
    call, gate, output, lse = overflow
    for dim, sign in ((1, -1), (2, 1)):
        for right in (math.inf, 65504 * gate):
            output[1, 2, dim] = sign * right
            assert verdict_on(call, output, lse).ok
        for wrong in (-math.inf, math.nan, -65504 * gate, 60000 * gate):
            output[1, 2, dim] = sign * wrong
            assert f"at (1, 2, {dim})" in verdict_on(call, output, lse).fault
        output[1, 2, dim] = sign * 65504 * gate


def test_what_does_not_overflow_is_finite(overflow):
    call, _, output, lse = overflow
    output[1, 2, 3] = math.inf
    assert "inf where " in verdict_on(call, output, lse).fault
    assert (limits(call).output <= 0.02 * 65536).all()


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        pytest.param(lambda lse: lse / math.log(2), "fp8", id="base 2"),
        pytest.param(lambda lse: lse + 1e-3, "fp8", id="off by a thousandth"),
        pytest.param(lambda lse: lse - math.log(192) / 2, "bf16", id="logits of another scale"),
        pytest.param(lambda lse: np.where(np.isinf(lse), 0, lse), "fp8_blank_rows", id="no -inf"),
        pytest.param(lambda lse: np.where(np.isinf(lse), -1e30, lse), "fp8_edges", id="finite"),
        pytest.param(lambda lse: -lse, "fp8_edges", id="sign"),
    ],
)
def test_wrong_lse_is_found(spoil, name):
    call = build(CASE[name])
    output, lse = good(call)
    verdict = verdict_on(call, output, spoil(lse).astype(np.float32))
    assert verdict.fault.startswith("lse: ")


def test_repeated_region_counted_once_shows_in_the_lse_alone():
    call = build(CASE["fp8_holes_repeated"])
    once = np.full_like(call.regions, -1)
    once[:, -1] = call.positions // 8
    output, lse = good(dataclasses.replace(call, regions=once))
    assert verdict_on(call, output).ok
    assert verdict_on(call, output, lse).fault.startswith("lse: ")


def test_wrong_shape_is_a_fault():
    call = build(CASE["fp8"])
    output, lse = good(call)
    assert "shape" in verdict_on(call, output[..., :64]).fault
    assert "shape" in verdict_on(call, output, lse.T).fault
