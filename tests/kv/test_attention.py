"""Attention over packed rows: against plain softmax attention, whatever lies in memory around them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from looseleaf.kv.attention import Packing, SeatBatch, Share, attend
from looseleaf.kv.layout import KVLayout, LayerLayout, Plane
from looseleaf.kv.pool import SlabPool
from looseleaf.kv.table import SlotTable

KV_HEADS, GROUPS, DIM = 2, 3, 8
LAYOUT = KVLayout(
    layers=(LayerLayout(keys=Plane(heads=KV_HEADS, dim=DIM), values=Plane(heads=KV_HEADS, dim=DIM)),),
    dtype=torch.float32,
)


class Module(nn.Module):
    layer_idx = 0


def table_in(pool: SlabPool, tokens: int) -> SlotTable:
    seat = pool.take(tokens)
    for plane in (*seat.slab.keys, *seat.slab.values):
        plane[seat.number].fill_(math.nan)  # memory as it may come
    return SlotTable(seat.slab.rows(seat.number), seat)


def expected(query: torch.Tensor, table: SlotTable, slots: list[int]) -> torch.Tensor:
    """Plain attention in fp64. query [head, row, dim] → [row, head, dim]."""
    out = []
    for row, slot in enumerate(slots):
        keys = table.rows.keys[0][:, : slot + 1].double().repeat_interleave(GROUPS, 0)
        values = table.rows.values[0][:, : slot + 1].double().repeat_interleave(GROUPS, 0)
        weights = torch.softmax((query[:, row, None].double() * keys).sum(-1) * 0.3, dim=-1)
        out.append((weights[..., None] * values).sum(1))
    return torch.stack(out)


lanes = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from(["decode", "all", "tail", "scattered"])), min_size=1, max_size=9
)


@settings(max_examples=60, deadline=None)
@given(lanes=lanes, seed=st.integers(0, 2**16))
def test_packed_attention_equals_plain_attention(lanes: list[tuple[int, str]], seed: int) -> None:
    torch.manual_seed(seed)
    pool = SlabPool(LAYOUT, torch.device("cpu"), idle_bytes=0)
    shares, start = [], 0
    for tokens, kind in lanes:
        table = table_in(pool, tokens)
        for plane in (table.rows.keys[0], table.rows.values[0]):
            plane[:, :tokens] = torch.randn(KV_HEADS, tokens, DIM)
        slots = {
            "decode": [tokens - 1],
            "all": list(range(tokens)),
            "tail": list(range(tokens // 2, tokens)),
            "scattered": sorted({*torch.randint(0, tokens, (5,)).tolist(), tokens - 1}),
        }[kind]
        shares.append(Share(table=table, start=start, stop=start + len(slots), slots=slots, decodes=kind == "decode"))
        start += len(slots)
    packing = Packing(shares, LAYOUT)
    query = torch.randn(1, KV_HEADS * GROUPS, start, DIM)
    keys, values = torch.randn(1, KV_HEADS, start, DIM), torch.randn(1, KV_HEADS, start, DIM)
    packing.update(keys, values, 0)
    out, _ = attend(Module(), query, keys, values, None, scaling=0.3, looseleaf=packing)
    assert out.shape == (1, start, KV_HEADS * GROUPS, DIM)
    for share in shares:
        torch.testing.assert_close(share.table.rows.keys[0][:, share.slots], keys[0, :, share.start : share.stop])
        want = expected(query[0, :, share.start : share.stop], share.table, share.slots)
        torch.testing.assert_close(out[0, share.start : share.stop].double(), want, atol=1e-5, rtol=1e-5)


def test_sequences_of_one_slab_decode_together_and_garbage_behind_the_short_ones_does_no_harm() -> None:
    pool = SlabPool(LAYOUT, torch.device("cpu"), idle_bytes=0)
    shares = []
    for number, tokens in enumerate((9, 6, 7)):
        table = table_in(pool, tokens)
        table.rows.keys[0][:, :tokens] = torch.randn(KV_HEADS, tokens, DIM)
        table.rows.values[0][:, :tokens] = torch.randn(KV_HEADS, tokens, DIM)
        shares.append(Share(table=table, start=number, stop=number + 1, slots=[tokens - 1], decodes=True))
    packing = Packing(shares, LAYOUT)
    assert len(packing.batches) == 1
    assert not packing.singles
    row = torch.randn(1, KV_HEADS, 3, DIM)
    packing.update(row, row, 0)
    out, _ = attend(Module(), torch.randn(1, KV_HEADS * GROUPS, 3, DIM), row, row, None, scaling=1.0, looseleaf=packing)
    assert out.isfinite().all()


def test_a_single_row_in_the_middle_of_a_sequence_is_no_decoding_row() -> None:
    """A policy may leave one row of a prompt: what is stored behind it must not be taken for free memory."""
    pool = SlabPool(LAYOUT, torch.device("cpu"), idle_bytes=0)
    tables = [table_in(pool, 20) for _ in range(2)]
    for table in tables:
        for plane in (table.rows.keys[0], table.rows.values[0]):
            plane.normal_()
    before = tables[0].rows.keys[0][:, 6:].clone()
    shares = [
        Share(table=tables[0], start=0, stop=1, slots=[5]),
        Share(table=tables[1], start=1, stop=2, slots=[19], decodes=True),
    ]
    packing = Packing(shares, LAYOUT)
    row = torch.randn(1, KV_HEADS, 2, DIM)
    packing.update(row, row, 0)
    assert not packing.batches
    assert torch.equal(tables[0].rows.keys[0][:, 6:], before)


@pytest.mark.parametrize(("lengths", "together"), [((50, 48), True), ((50, 1, 1, 1), False), ((50,), False)])
def test_decoding_together_pays_only_while_padding_stays_small(lengths: tuple[int, ...], together: bool) -> None:
    pool = SlabPool(LAYOUT, torch.device("cpu"), idle_bytes=0)
    shares = [Share(table=table_in(pool, 64), start=0, stop=1, slots=[tokens - 1]) for tokens in lengths]
    assert SeatBatch.pays(shares) is together
