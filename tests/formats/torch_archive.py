"""Archives as torch.save writes them, put together by hand: valid ones without torch, and ones torch never wrote."""

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

TRUE, FALSE, NONE = b"\x88", b"\x89", b"N"


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    return (
        b"J" + struct.pack("<i", value)
        if -(2**31) <= value < 2**31
        else b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
    )


def tuple_of(*items: bytes | int) -> bytes:
    return b"(" + b"".join(integer(item) if isinstance(item, int) else item for item in items) + b"t"


def name_of(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


ORDERED_DICT = name_of("collections", "OrderedDict")
REBUILD = name_of("torch._utils", "_rebuild_tensor_v2")
EMPTY = ORDERED_DICT + b")R"


def storage(count: int = 6, key: str = "0", kind: str = "FloatStorage") -> bytes:
    return tuple_of(text("storage"), name_of("torch", kind), text(key), text("cpu"), count) + b"Q"


def tensor(
    shape: bytes = tuple_of(2, 3),
    strides: bytes = tuple_of(3, 1),
    offset: bytes = integer(0),
    store: bytes = storage(),
) -> bytes:
    return REBUILD + tuple_of(store, offset, shape, strides, FALSE, EMPTY) + b"R"


def dictionary(items: Mapping[str, bytes]) -> bytes:
    return EMPTY + b"(" + b"".join(text(name) + value for name, value in items.items()) + b"u"


def write(
    path: Path,
    content: bytes,
    storages: Mapping[str, bytes],
    *,
    byteorder: bytes = b"little",
    compression: int = zipfile.ZIP_STORED,
    zip64: bool = False,
) -> Path:
    """An archive whose pickle is `content`, with PROTO and STOP put around it."""
    entries = {"data.pkl": b"\x80\x02" + content + b".", "byteorder": byteorder, "version": b"3\n"}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**entries, **{f"data/{key}": data for key, data in storages.items()}}.items():
            info = zipfile.ZipInfo(f"archive/{name}")
            start = archive.fp.tell() + len(f"archive/{name}") + (54 if zip64 else 34)
            padding = b"Z" * (-start % 64)  # torch aligns each entry to 64 bytes by such an extra field
            info.extra = struct.pack("<2sH", b"FB", len(padding)) + padding
            info.compress_type = compression if name.startswith("data/") else zipfile.ZIP_STORED
            with archive.open(info, "w", force_zip64=zip64) as entry:
                entry.write(data)
    return path
