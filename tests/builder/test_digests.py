"""Digests against published answers: FIPS 180-4's examples, and XXH3's own test vectors."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from builder import digests
from builder.checkpoint import MAX_JSON_BYTES
from builder.errors import Refused

SHA256 = {
    b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq": (
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    ),
}
"""Source: NIST, FIPS 180-4 example values (one block, two blocks, and the empty message)."""


def vector(length: int) -> bytes:
    """The first bytes of xxHash's test buffer: the top byte of a 64-bit product, multiplied on at every step."""
    data, value = bytearray(), 2654435761
    for _ in range(length):
        data.append(value >> 56)
        value = value * 11400714785074694797 % (1 << 64)
    return bytes(data)


XXH3 = {
    0: (0x6001C324468D497F, 0x99AA06D3014798D8),
    1: (0xC44BDFF4074EECDB, 0xA6CD5E9392000F6A),
    6: (0x3E7039BDDA43CFC6, 0x082AFE0B8162D12A),
    12: (0x061A192713F69AD9, 0x6E3EFD8FC7802B18),
    24: (0x1E7044D28B1B901D, 0x0CE966E4678D3761),
    48: (0xF942219AED80F67B, 0xA002AC4E5478227E),
    81: (0x5E8BAFB9F95FB803, 0x4952F58181AB0042),
    222: (0xF1AEBD597CEC6B3A, 0x337E09641B948717),
    403: (0xCDEB804D65C6DEA4, 0x1B6DE21E332DD73D),
    512: (0x617E49599013CB6B, 0x18D2D110DCC9BCA1),
    2048: (0xDD59E2C3A5F038E0, 0xF736557FD47073A5),
    2240: (0x6E73A90539CF2948, 0xCCB134FBFA7CE49D),
    2367: (0xCB37AEB9E5D361ED, 0xE89C0F6FF369B427),
}
"""Low and high half for the first N bytes, seed 0. Source: xxHash, cli/xsum_sanity_check.c."""


@pytest.mark.parametrize("data", SHA256, ids=len)
def test_sha256_of_published_messages(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "file").write_bytes(data)
    expected = f"sha256:{SHA256[data]}"
    assert digests.of_bytes(data) == expected == digests.of_file(tmp_path / "file", "sha256")


@pytest.mark.parametrize("length", XXH3)
def test_xxh3_of_published_vectors(tmp_path: Path, length: int) -> None:
    """The high half stands first, as in the canonical form of the specification."""
    (tmp_path / "file").write_bytes(vector(length))
    low, high = XXH3[length]
    assert digests.of_file(tmp_path / "file", "xxh3_128") == f"xxh3_128:{high:016x}{low:016x}"


@pytest.mark.parametrize("size", [0, 1, digests.CHUNK_BYTES - 1, digests.CHUNK_BYTES, 2 * digests.CHUNK_BYTES + 3])
def test_a_file_of_any_size_is_read_whole(tmp_path: Path, size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    (tmp_path / "file").write_bytes(data)
    seen: list[tuple[str, int, int]] = []
    expected = f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert digests.of_file(tmp_path / "file", "sha256", lambda *step: seen.append(step)) == expected
    assert digests.of_file(tmp_path / "file", "xxh3_128") == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
    assert not size or seen[-1] == ("reading file", size, size)


def test_a_headers_digest_ends_where_the_data_begins(tmp_path: Path) -> None:
    header = b'{"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}  '
    start = struct.pack("<Q", len(header)) + header
    found = set()
    for name, data in (("a", b"1234"), ("b", b"5678"), ("c", b"")):
        (tmp_path / name).write_bytes(start + data)
        found.add(digests.of_header(tmp_path / name))
    assert found == {f"sha256:{hashlib.sha256(start).hexdigest()}"}


@pytest.mark.parametrize("length", [3, 1 << 32, 1 << 62, (1 << 64) - 1])
def test_a_damaged_length_is_refused_before_anything_is_read(tmp_path: Path, length: int) -> None:
    """One flipped byte of the field asks for more memory than there is."""
    (tmp_path / "shard").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(Refused, match=rf"shard: expected a safetensors header, found a length of {length} in a file"):
        digests.of_header(tmp_path / "shard")


def test_a_header_is_no_longer_than_a_checkpoint_may_have_one(tmp_path: Path) -> None:
    with (tmp_path / "shard").open("wb") as file:
        file.write(struct.pack("<Q", MAX_JSON_BYTES + 1))
        file.truncate(MAX_JSON_BYTES + 100)  # sparse
    with pytest.raises(Refused, match=f"a length of {MAX_JSON_BYTES + 1}"):
        digests.of_header(tmp_path / "shard")


@pytest.mark.parametrize("content", [b"", b"\x01\x00\x00"])
def test_a_file_too_short_for_a_length_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "shard").write_bytes(content)
    with pytest.raises(Refused, match=f"in a file of {len(content)} bytes"):
        digests.of_header(tmp_path / "shard")


@pytest.mark.parametrize(
    ("place", "known"),
    [
        ("blobs/{digest}", True),
        ("elsewhere/{digest}", False),
        ("blobs/{digest}0", False),
        ("blobs/{short}", False),
        ("blobs/{digest}.incomplete", False),
    ],
)
@pytest.mark.parametrize("linked", [True, False])
def test_only_a_caches_name_is_a_digest(tmp_path: Path, place: str, known: bool, linked: bool) -> None:
    """Read from the name, so it costs nothing; and by whatever links one comes to it."""
    digest = hashlib.sha256(b"some weights").hexdigest()
    path = tmp_path / place.format(digest=digest, short=digest[:40])
    path.parent.mkdir()
    path.write_bytes(b"")
    if linked:
        (tmp_path / "one").symlink_to(path)
        (tmp_path / "two").symlink_to("one")
        path = tmp_path / "two"
    assert digests.free_of_charge(path) == (f"sha256:{digest}" if known else None)


def test_a_recorded_digest_names_its_algorithm() -> None:
    assert digests.algorithm("sha256:00ff") == "sha256" and digests.algorithm("xxh3_128:ab") == "xxh3_128"
    for odd in ("", "sha256", "sha256:", "md5:00", "sha256:XY", "sha256:ABCD", ":00", "sha256:00\n"):
        with pytest.raises(ValueError, match="unknown digest"):
            digests.algorithm(odd)
