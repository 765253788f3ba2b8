"""What is read is what was written, or damage is found: every byte of a file counts."""

import io
import json
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from looseleaf.kv.layout import KVLayout, KVRows, LayerLayout, Plane
from looseleaf.kv.records import ChunkKV, Factors, Features, Patch, Pointer, Record, SequenceKV, States
from looseleaf.store.format import DamagedError, read, read_manifest, write
from looseleaf.store.protocol import Key

KEY = Key("ab" * 32, "kv")


def rows(dtype: torch.dtype = torch.bfloat16, tokens: int = 5) -> KVRows:
    plain = LayerLayout(keys=Plane(heads=2, dim=8), values=Plane(heads=2, dim=8))
    latent = LayerLayout(keys=Plane(heads=1, dim=4), values=Plane(heads=1, dim=16), latent=True)
    made = KVRows(KVLayout(layers=(plain, latent, plain), dtype=dtype), tokens)
    chance = torch.Generator().manual_seed(3)
    for plane in (*made.keys, *made.values):
        plane.copy_(torch.randn(plane.shape, generator=chance))
    return made


def factors(rank: int) -> Factors:
    return Factors(left=torch.rand(5, rank, dtype=torch.float16), right=torch.rand(16, rank, dtype=torch.float16))


RECORDS: dict[str, Record] = {
    "chunk": ChunkKV(rows=rows()),
    "part of a table": ChunkKV(rows=rows(torch.float32, 9).part(2, 7)),
    "sequence": SequenceKV(rows=rows(torch.float16)),
    "features": Features(embeddings=torch.rand(3, 4)),
    "deepstack": Features(embeddings=torch.rand(3, 4).bfloat16(), deep=tuple(torch.rand(3, 4) for _ in range(3))),
    "states": States(layer=7, hidden=torch.rand(3, 4)),
    "patch": Patch(keys=(None, factors(2), factors(3)), values=(None, None, factors(1))),
    "a patch cut short": Patch(
        keys=(Factors(left=torch.rand(5, 4)[:, :2], right=torch.rand(16, 4)[:, :2]),), values=(None,)
    ),
    "pointer": Pointer(identity="cd" * 32),
    "nothing in it": Features(embeddings=torch.empty(0, 4)),
}


def written(record: Record, key: Key = KEY) -> bytes:
    file = io.BytesIO()
    count = write(file, key, record, created_s=12.5, expires_s=99.0)
    assert count == len(file.getvalue())
    return file.getvalue()


def tensors(record: Record) -> list[torch.Tensor]:
    match record:
        case ChunkKV() | SequenceKV():
            return [*record.rows.keys, *record.rows.values]
        case Features():
            return [record.embeddings, *record.deep]
        case States():
            return [record.hidden]
        case Patch():
            return [side for one in (*record.keys, *record.values) if one for side in (one.left, one.right)]
        case _:
            return []


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_comes_back_to_the_last_bit(name: str) -> None:
    record = RECORDS[name]
    found, manifest = read(io.BytesIO(written(record)), KEY)
    assert type(found) is type(record)
    assert (manifest.key, manifest.created_s, manifest.expires_s) == (KEY, 12.5, 99.0)
    assert found.nbytes == record.nbytes
    for one, other in zip(tensors(found), tensors(record), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    if isinstance(record, ChunkKV | SequenceKV):
        assert isinstance(found, ChunkKV | SequenceKV)
        assert found.rows.layout == record.rows.layout
        assert found.frame is record.frame
    if isinstance(record, Patch):
        assert isinstance(found, Patch)
        assert [one is None for one in (*found.keys, *found.values)] == [
            one is None for one in (*record.keys, *record.values)
        ]
    if isinstance(record, States | Pointer):
        assert getattr(found, "layer", None) == getattr(record, "layer", None)
        assert getattr(found, "identity", None) == getattr(record, "identity", None)


def test_any_safetensors_reader_reads_it(tmp_path: Path) -> None:
    record = rows(torch.float32)
    (tmp_path / "one.safetensors").write_bytes(written(ChunkKV(rows=record)))
    found = load_file(tmp_path / "one.safetensors")
    assert list(found) == ["000.keys", "000.values", "001.keys", "001.values", "002.keys", "002.values"]
    assert torch.equal(found["001.values"], record.values[1])


def test_a_change_of_any_byte_is_found() -> None:
    good = written(RECORDS["states"])
    for at in range(len(good)):
        for flip in (1, 128):
            bad = bytearray(good)
            bad[at] ^= flip
            with pytest.raises(DamagedError):
                read(io.BytesIO(bytes(bad)), KEY)


def test_a_file_that_ends_early_or_goes_on_is_found() -> None:
    good = written(RECORDS["patch"])
    for length in range(len(good)):
        with pytest.raises(DamagedError):
            read(io.BytesIO(good[:length]), KEY)
    with pytest.raises(DamagedError, match="follows"):
        read(io.BytesIO(good + b"x"), KEY)


def test_another_records_file_is_not_taken_for_this_one() -> None:
    for key in (Key("cd" * 32, "kv"), Key(KEY.identity, "features")):
        with pytest.raises(DamagedError, match="it holds kv of abab"):
            read(io.BytesIO(written(RECORDS["chunk"])), key)


@pytest.mark.parametrize(
    "change",
    [
        {"looseleaf": "2"}, {"kind": "treasure"}, {"kind": "patch"}, {"facts": "{}"}, {"facts": "no JSON"},
        {"facts": json.dumps({"layout": "v1 torch.bfloat16 1x8,1x8", "frame": "unrotated"})},
        {"facts": json.dumps({"layout": "v1 os.system 2x8,2x8", "frame": "unrotated"})},
        {"checksums": "{}"}, {"expires_s": "soon"},
    ],
)  # fmt: skip
def test_a_header_that_says_something_else_is_found_even_when_its_checksum_fits(change: dict[str, str]) -> None:
    with pytest.raises(DamagedError):
        read(io.BytesIO(forged(written(RECORDS["chunk"]), change)), KEY)


def odd(**about: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} | about


@pytest.mark.parametrize(
    "tensor",
    [
        odd(shape=[-4]), odd(shape=[4.0]), odd(shape=[2**66]), odd(shape=[True, 4]), odd(data_offsets=[0, -4]),
        odd(data_offsets=[4, 8]), odd(dtype="U9"), odd(shape="4"), odd(shape=[2**40], data_offsets=[0, 2**40]), [],
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_be_is_damage_and_nobody_makes_room_for_it(tensor: object) -> None:
    data = written(Features(embeddings=torch.zeros(4, dtype=torch.uint8)))
    with pytest.raises(DamagedError):
        read(io.BytesIO(forged(data, {}, {"embeddings": tensor})), KEY)


@pytest.mark.parametrize("facts", ['{"layers": 3, "frame": "placed"}', '{"layers": -1, "frame": "unrotated"}',
                                   '{"layers": 1, "frame": "unrotated"}', "[" * 5000, "[]"])  # fmt: skip
def test_a_patch_that_does_not_fit_its_facts_is_damage(facts: str) -> None:
    with pytest.raises(DamagedError):
        read(io.BytesIO(forged(written(RECORDS["patch"]), {"facts": facts})), KEY)


def test_half_a_patch_is_damage() -> None:
    data = forged(written(RECORDS["patch"]), {}, {}, rename={"001.keys.right": "001.keys.wrong"})
    with pytest.raises(DamagedError, match="half a patch"):
        read(io.BytesIO(data), KEY)


class Slow(io.BytesIO):
    """Gives a few bytes at a time, as files on a network may."""

    def readinto(self, room: object) -> int:
        return super().readinto(memoryview(room)[:7])  # type: ignore[arg-type]


def test_a_medium_may_give_less_at_a_time_than_was_asked_for() -> None:
    record = RECORDS["states"]
    found, _ = read(Slow(written(record)), KEY)
    assert torch.equal(tensors(found)[0], tensors(record)[0])


def forged(
    data: bytes, change: dict[str, str], more: dict[str, object] | None = None, rename: dict[str, str] | None = None
) -> bytes:
    """With another header and the checksum a forger would take of it."""
    length = int.from_bytes(data[:8], "little")
    header = {(rename or {}).get(name, name): one for name, one in json.loads(data[8 : 8 + length]).items()}
    header |= more or {}
    header["__metadata__"] |= change | {"header": "0" * 32}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = text.replace(b'"header":"' + b"0" * 32, b'"header":"' + xxhash.xxh3_128_hexdigest(text).encode())
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def test_a_header_without_end_is_not_waited_for() -> None:
    with pytest.raises(DamagedError, match="a header of"):
        read_manifest(io.BytesIO((2**60).to_bytes(8, "little") + b"{}"))


def test_a_layout_is_read_as_it_was_described() -> None:
    layout = rows().layout
    assert KVLayout.parse(layout.describe()) == layout
    for wrong in ("", "v1 torch.float32", "v2 torch.float32 1x2,3x4", "v1 torch.float32 1x2", "v1 float32 1x2,3x4"):
        with pytest.raises(ValueError):
            KVLayout.parse(wrong)
