"""A decode loop as an inference stack runs it: continuous batching, one jitted step.

A small model with random weights decodes requests that enter and leave a padded batch. All layers
share pages of one FP8 cache; each step writes the new keys and values into it in place, scores the
regions of each request by their mean key, and attends to the best ones and the current one. Tokens,
positions and tables stay on the device: the host only says which request sits where. Prompts go
through the same step, a token at a time.

Where the selection covers a whole context, attention must be dense attention up to the roundings of
its dtypes; some steps are checked for that. The exit status is 1 if one is not.

    python examples/jax_decode_loop.py            # runs anywhere, without a GPU in an interpreter
    python examples/jax_decode_loop.py --large    # sizes that are worth timing on a GPU
"""

import argparse
import functools
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparse_decode.devices import use_interpreters_without_gpu

use_interpreters_without_gpu()  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from sparse_decode.contract import CACHE_DIM, HEAD_DIM, REGION_TOKENS  # noqa: E402
from sparse_decode.pallas_kernels import (  # noqa: E402
    PackedCache,
    build_block_table,
    select_regions,
    sparse_decode_attention,
    write_kv,
)

Tree = dict[str, Any]


class Request(NamedTuple):
    """Comes in at a step, brings a prompt of some tokens and wants some more."""

    arrival: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Sizes:
    """Of model, batch and cache."""

    layers: int = 3
    hidden: int = 128
    groups: int = 2  # KV heads
    heads: int = 4  # query heads for each
    vocabulary: int = 256
    batch: int = 4
    slots: int = 6  # regions that a token attends to, the current one included
    page_size: int = 16
    pages: int = 14
    max_tokens: int = 80  # of one request
    requests: tuple[Request, ...] = (
        Request(0, 40, 32),  # outgrows its slots
        Request(0, 9, 12),
        Request(4, 24, 10),
        Request(8, 3, 20),
        Request(9, 17, 14),  # waits for a place in the batch
        Request(30, 30, 8),
    )
    check_every: int = 8
    timed_steps: int = 3
    timed_runs: int = 3

    @property
    def max_pages(self) -> int:
        return -(-self.max_tokens // self.page_size)

    @property
    def layer_stride(self) -> int:
        """Elements of one layer in a page."""
        return self.groups * self.page_size * CACHE_DIM


LARGE = Sizes(
    layers=8,
    hidden=2048,
    heads=8,
    vocabulary=32768,
    batch=32,
    slots=129,
    page_size=64,
    pages=1100,
    max_tokens=4096,
    requests=tuple(Request(40 * i, 200 + 613 * i % 1500, 64 + 37 * i % 200) for i in range(40)),
    check_every=256,
    timed_steps=100,
    timed_runs=9,
)
SCALE = HEAD_DIM**-0.5
KV_SCALE = 10 / 448  # keys and values up to 10 fit


# --- the model


def make_weights(sizes: Sizes) -> Tree:
    """Random weights; those of the layers are stacked."""
    heads = sizes.groups * sizes.heads
    shapes = {
        "query": (sizes.hidden, heads * HEAD_DIM),
        "key": (sizes.hidden, sizes.groups * HEAD_DIM),
        "value": (sizes.hidden, sizes.groups * HEAD_DIM),
        "gate": (sizes.hidden, heads),
        "out": (heads * HEAD_DIM, sizes.hidden),
        "up": (sizes.hidden, 2 * sizes.hidden),
        "down": (2 * sizes.hidden, sizes.hidden),
    }
    keys = iter(jax.random.split(jax.random.key(0), len(shapes) + 1))
    layers = {
        name: jax.random.normal(next(keys), (sizes.layers, *shape), jnp.bfloat16) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    embedding = jax.random.normal(next(keys), (sizes.vocabulary, sizes.hidden), jnp.bfloat16)
    return {"layers": layers, "embedding": embedding, "scale": jnp.float32(KV_SCALE)}


def make_memory(sizes: Sizes) -> Tree:
    """What is kept of earlier tokens.

    `kv` is `[pages, page stride]`, FP8 as uint8, each page with all layers. `sums` is
    `[layers, pages, regions a page, groups, 192]`: the keys of each region, summed. Everything
    begins as NaN: what no token has written must not matter.
    """
    regions = sizes.page_size // REGION_TOKENS
    sums = (sizes.layers, sizes.pages, regions, sizes.groups, HEAD_DIM)
    return {
        "kv": jnp.full((sizes.pages, sizes.layers * sizes.layer_stride), 0x7F, jnp.uint8),
        "sums": jnp.full(sums, jnp.nan, jnp.float32),
    }


def normalised(x: jax.Array) -> jax.Array:
    """RMS norm over the last dimension."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def score_regions(
    sums: jax.Array, layer: jax.Array, query: jax.Array, key: jax.Array, state: Tree
) -> tuple[jax.Array, jax.Array]:
    """Adds a key to the sum of its region, and scores all regions of each request.

    Returns:
        `sums` and scores `[batch, groups, max_regions]`.
    """
    batch, (_, pages, regions, _, _) = jnp.arange(len(key)), sums.shape
    page_size = regions * REGION_TOKENS
    at, table = state["position"], state["table"]
    page = jnp.where(state["active"], table[batch, at // page_size], pages)
    region = at % page_size // REGION_TOKENS
    old = jnp.where((at % REGION_TOKENS == 0)[:, None, None], 0, sums[layer, page, region])
    sums = sums.at[layer, page, region].set(old + key.astype(jnp.float32), mode="drop")
    lines = sums[layer, table].reshape(len(key), -1, *sums.shape[3:])
    return sums, jnp.einsum("bghd,brgd->bgr", query.astype(jnp.float32), lines)


def decode(
    sizes: Sizes, attend: Callable[..., Any], weights: Tree, memory: Tree, state: Tree
) -> tuple[Tree, Tree, Any]:
    """One token of every request in the batch.

    Args:
        sizes: Static.
        attend: As `sparse`, with what it is to report.
        weights: From `make_weights`.
        memory: From `make_memory`; donate it.
        state: Of the batch: `tokens` `[batch, max_tokens]`, `prompt` (its length), `position`,
            `active`, each `[batch]`, and `table` `[batch, max_pages]`; donate it.

    Returns:
        memory, state and what `attend` reports, stacked over layers.
    """
    position, active, tokens = state["position"], state["active"], state["tokens"]
    batch = jnp.arange(sizes.batch)
    row_position, row_active = (jnp.repeat(x, sizes.groups) for x in (position, active))
    scales = {"k_scale": weights["scale"], "v_scale": weights["scale"]}
    hidden = weights["embedding"][tokens[batch, position]]

    def layer(carry, xs):
        hidden, kv, sums = carry
        index, w = xs
        x = normalised(hidden)
        query = (x @ w["query"]).reshape(sizes.batch, sizes.groups, sizes.heads, HEAD_DIM)
        key = (x @ w["key"]).reshape(sizes.batch, sizes.groups, HEAD_DIM)
        value = (x @ w["value"]).reshape(sizes.batch, sizes.groups, HEAD_DIM)

        offset = index * sizes.layer_stride
        cache = PackedCache(kv, offset, groups=sizes.groups, page_size=sizes.page_size)
        cache = write_kv(cache, key, value, state["table"], position, active, **scales)
        sums, scores = score_regions(sums, index, query, key, state)
        regions = select_regions(scores.reshape(len(row_position), -1), row_position, sizes.slots)

        attention, report = attend(
            query=query.reshape(len(row_position), sizes.heads, HEAD_DIM),
            cache=cache,
            regions=regions,
            block_table=state["table"],
            positions=row_position,
            active=row_active,
            gate=x @ w["gate"],
            **scales,
        )
        hidden += attention.reshape(sizes.batch, -1) @ w["out"]
        hidden += jax.nn.gelu(normalised(hidden) @ w["up"]) @ w["down"]
        return (hidden, cache.storage, sums), report

    (hidden, kv, sums), reports = jax.lax.scan(
        layer,
        (hidden, memory["kv"], memory["sums"]),
        (jnp.arange(sizes.layers, dtype=jnp.int32), weights["layers"]),
    )
    sampled = jnp.argmax(normalised(hidden) @ weights["embedding"].T, axis=-1).astype(jnp.int32)
    following = jnp.where(active, position + 1, sizes.max_tokens)
    from_prompt = tokens.at[batch, following].get(mode="fill", fill_value=0)
    following_token = jnp.where(following < state["prompt"], from_prompt, sampled)
    state = state | {
        "tokens": tokens.at[batch, following].set(following_token, mode="drop"),
        "position": jnp.where(active, position + 1, position),
    }
    return {"kv": kv, "sums": sums}, state, reports


# --- attention


def sparse(**arrays: Any) -> tuple[jax.Array, None]:
    """Attention of a step."""
    return sparse_decode_attention(**arrays, scale=SCALE), None


def left_out(query: jax.Array, regions: jax.Array, **_: Any) -> tuple[jax.Array, None]:
    """In place of attention, to time the rest: needs the selection, and costs nothing."""
    return jnp.where((regions.max(axis=1) < -1)[:, None, None], 0, query), None


def compared(**arrays: Any) -> tuple[jax.Array, jax.Array]:
    """Attention, and for each row how far it is from dense attention.

    The distance is in units of what roundings may add up to: three to bfloat16 (attention, gate and
    their product), and in proportion to the size of what is summed that of the probabilities to
    float16, with as much again for float32 sums. Up to 1 the two are the same.
    """
    arrays = jax.lax.optimization_barrier(arrays)  # rounded for both, or XLA may leave it out
    output, _ = sparse(**arrays)
    exact, size = dense(**arrays)
    roundings = (1 + 2.0**-8) ** 3 - 1
    allowed = roundings * jnp.abs(exact) + 2.0**-10 * size + 1e-30
    return output, jnp.max(jnp.abs(output.astype(jnp.float32) - exact) / allowed, axis=(1, 2))


def dense(
    query: jax.Array,
    cache: PackedCache,
    block_table: jax.Array,
    positions: jax.Array,
    active: jax.Array,
    gate: jax.Array,
    k_scale: jax.Array,
    v_scale: jax.Array,
    **_: Any,
) -> tuple[jax.Array, jax.Array]:
    """Plain float32 attention to all of each context, and the same of absolute values."""
    rows, heads, _ = query.shape
    requests, width = len(block_table), cache.groups * cache.page_size * CACHE_DIM
    pages = cache.storage[block_table]  # [requests, max_pages, page stride]
    pages = jax.lax.dynamic_slice_in_dim(pages, cache.offset, width, axis=2)
    pages = pages.reshape(requests, -1, cache.groups, cache.page_size, CACHE_DIM)
    lines = pages.swapaxes(1, 2).reshape(rows, -1, CACHE_DIM)
    attended = jnp.arange(lines.shape[1]) <= jnp.where(active, positions, -1)[:, None]
    lines = jax.lax.bitcast_convert_type(lines, jnp.float8_e4m3fn).astype(jnp.float32)
    lines = jnp.where(attended[:, :, None], lines, 0)
    keys, values = lines[..., :HEAD_DIM] * k_scale, lines[..., HEAD_DIM:] * v_scale
    einsum = functools.partial(jnp.einsum, precision="highest")
    logits = einsum("rhd,rtd->rht", query.astype(jnp.float32), keys) * SCALE
    logits = jnp.where(attended[:, None], logits, -jnp.inf)
    weights = jnp.where(active[:, None, None], jax.nn.softmax(logits), 0)
    weights *= jax.nn.sigmoid(gate.astype(jnp.float32)).reshape(rows, heads, 1)
    return einsum("rht,rtd->rhd", weights, values), einsum("rht,rtd->rhd", weights, abs(values))


# --- the host's part


class Batch:
    """Which request sits where, and which pages it holds."""

    def __init__(self, sizes: Sizes):
        self.sizes = sizes
        self.waiting = deque(enumerate(sizes.requests))
        self.free = list(np.random.default_rng(0).permutation(sizes.pages))
        self.seats: list[tuple[int, int, list[int]] | None] = [None] * sizes.batch
        self.done: dict[int, np.ndarray] = {}
        empty = self._line(active=False)
        self.state = {name: jnp.stack([line] * sizes.batch) for name, line in empty.items()}
        self._place = jax.jit(
            lambda state, seat, line: {k: v.at[seat].set(line[k]) for k, v in state.items()},
            donate_argnums=0,
        )

    def _line(self, *, active: bool, prompt=(), pages=()) -> Tree:
        """What the state holds for one request."""
        tokens = np.zeros(self.sizes.max_tokens, np.int32)
        tokens[: len(prompt)] = prompt
        [table] = build_block_table([pages], self.sizes.max_pages)
        return {
            "tokens": tokens,
            "prompt": np.int32(len(prompt)),
            "position": np.int32(0),
            "active": np.bool_(active),
            "table": table,
        }

    def _seat(self, seat: int, **line: Any) -> None:
        self.state = self._place(self.state, np.int32(seat), self._line(**line))

    def turn(self, step: int) -> bool:
        """Lets finished requests leave and waiting ones enter; False when there are none."""
        for seat, taken in enumerate(self.seats):
            if taken and taken[1] == step:
                number, _, pages = taken
                request = self.sizes.requests[number]
                end = request.prompt + request.new
                self.done[number] = np.asarray(self.state["tokens"][seat, request.prompt : end])
                self.free += pages
                self.seats[seat] = None
                self._seat(seat, active=False)
        for seat, taken in enumerate(self.seats):
            if taken or not self.waiting:
                continue
            number, request = self.waiting[0]
            tokens = request.prompt + request.new
            count = -(-tokens // self.sizes.page_size)
            if request.arrival > step or count > len(self.free):
                break
            self.waiting.popleft()
            pages = [self.free.pop() for _ in range(count)]
            rng = np.random.default_rng(number)
            prompt = rng.integers(0, self.sizes.vocabulary, request.prompt)
            self._seat(seat, active=True, prompt=prompt, pages=pages)
            self.seats[seat] = (number, step + tokens - 1, pages)
        return bool(self.waiting) or any(self.seats)


def full_batch(sizes: Sizes, steps: int) -> Tree:
    """A state with a long context in every place, for timing; the requests share pages."""
    table = np.arange(sizes.batch * sizes.max_pages, dtype=np.int32) % sizes.pages
    state = {
        "tokens": np.zeros((sizes.batch, sizes.max_tokens), np.int32),
        "prompt": np.zeros(sizes.batch, np.int32),
        "position": np.full(sizes.batch, sizes.max_tokens - steps - 1, np.int32),
        "active": np.ones(sizes.batch, bool),
        "table": table.reshape(sizes.batch, -1),
    }
    return jax.tree.map(jnp.array, state)


def milliseconds(
    sizes: Sizes, step: Callable[..., Any], weights: Tree, memory: Tree
) -> tuple[float, Tree]:
    """Time of a step with a full batch, the median of several runs; and the memory again."""
    warm, times = 2, []
    for _ in range(sizes.timed_runs):
        state = full_batch(sizes, warm + sizes.timed_steps)
        with jax.transfer_guard("disallow"):  # as in the loop: another guard may compile anew
            for count in range(warm + sizes.timed_steps):
                if count == warm:
                    jax.block_until_ready(memory)
                    begin = time.perf_counter()
                memory, state, _ = step(weights, memory, state)
            jax.block_until_ready(memory)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) / sizes.timed_steps * 1e3, memory


def run(sizes: Sizes) -> int:
    """Serves all requests; returns the number of faults."""
    traces = []

    def traced_step(*arguments):
        traces.append(arguments)
        return decode(sizes, sparse, *arguments)

    step = jax.jit(traced_step, donate_argnums=(1, 2))
    compare = jax.jit(lambda *arguments: decode(sizes, compared, *arguments)[2])
    rest = jax.jit(functools.partial(decode, sizes, left_out), donate_argnums=(1, 2))

    weights, memory, batch = make_weights(sizes), make_memory(sizes), Batch(sizes)
    faults = number = 0
    print("step  requests (tokens)                          all covered        selected")
    while batch.turn(number):
        if number % sizes.check_every == sizes.check_every - 1:
            far = np.asarray(compare(weights, memory, batch.state)).max(axis=0)
            position = np.asarray(batch.state["position"]).repeat(sizes.groups)
            active = np.asarray(batch.state["active"]).repeat(sizes.groups)
            covered = position // REGION_TOKENS < sizes.slots
            same, other = far[active & covered], far[active & ~covered]
            faults += int((~(same <= 1)).sum() + (~np.isfinite(other)).sum())
            seated = [
                f"{taken[0]} ({position[seat * sizes.groups] + 1})" if taken else "-"
                for seat, taken in enumerate(batch.seats)
            ]
            print(
                f"{number:4}  {'  '.join(seated[:6]) + ('  ...' if len(seated) > 6 else ''):41}"
                + "".join(
                    f"  {len(rows):3} rows, {rows.max():7.2g}" if len(rows) else f"{'-':>19}"
                    for rows in (same, other)
                )
            )
        with jax.transfer_guard(
            "disallow"
        ):  # raises if the step moves anything to or from the host
            memory, batch.state, _ = step(weights, memory, batch.state)
        number += 1
    print("(distance from dense attention, in units of the roundings allowed)")
    tokens = sum(map(len, batch.done.values()))
    print(f"{len(batch.done)} requests, {tokens} new tokens, {number} steps")

    on_gpu = jax.default_backend() == "gpu"
    whole, memory = milliseconds(sizes, step, weights, memory)
    without, memory = milliseconds(sizes, rest, weights, memory)
    print(
        f"{whole:.2f} ms a step with a full batch: {whole - without:.2f} ms attention, "
        f"{without:.2f} ms the rest"
        + ("" if on_gpu else " (in the interpreter, which says nothing about a GPU)")
    )
    print(
        f"the step was traced {len(traces)} time, compiled {step._cache_size()} time; "
        "no step moved anything between host and device"
    )
    faults += len(traces) != 1 or step._cache_size() != 1
    faults += len(batch.done) != len(sizes.requests)
    print("Dense attention where all is covered." if not faults else f"{faults} faults.")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--large", action="store_true", help="sizes worth timing on a GPU")
    sizes = LARGE if parser.parse_args().large else Sizes()
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}; {sizes.layers} layers, ", end="")
    print(f"batch {sizes.batch}, {sizes.slots} slots, {sizes.pages} pages of {sizes.page_size}")
    return 1 if run(sizes) else 0


if __name__ == "__main__":
    sys.exit(main())
