"""What shared libraries of Linux, macOS and Windows say about themselves, read by hand.

Sources: the System V ABI's ELF-64, Apple's mach-o/loader.h, Microsoft's PE format.
"""

import re
import struct
from dataclasses import dataclass
from typing import Any


@dataclass
class Library:
    """A machine, the libraries it needs, the names it exports, and the oldest system it runs on, as far as it says."""

    machine: str
    needed: set[str]
    exported: set[str]
    oldest: str = ""
    signed: bool = False


def read(content: bytes) -> Library:
    """Read a library of any of the three formats."""
    if content[:4] == b"\x7fELF":
        return _elf(content)
    return _pe(content) if content[:2] == b"MZ" else _mach_o(content)


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(0, at)].decode()


def _records(form: str, content: bytes, first: int, size: int) -> list[Any]:
    return list(struct.iter_unpack(form, content[first : first + size]))


def _elf(content: bytes) -> Library:
    machine = {62: "x86_64", 183: "aarch64"}[struct.unpack_from("<H", content, 18)[0]]
    sections, size, count = (*struct.unpack_from("<Q", content, 40), *struct.unpack_from("<HH", content, 58))
    headers = _records("<IIQQQQIIQQ", content, sections, size * count)
    needed, exported = set(), set()
    for _, kind, _, _, offset, length, link, *_ in headers:
        strings = headers[link][4]
        if kind == 6:  # DYNAMIC
            needed |= {
                _text(content, strings + value) for tag, value in _records("<QQ", content, offset, length) if tag == 1
            }
        if kind == 11:  # DYNSYM
            symbols = _records("<IBBHQQ", content, offset, length)
            exported |= {_text(content, strings + name) for name, _, _, section, *_ in symbols if name and section}
    versions = {tuple(map(int, found)) for found in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)}
    return Library(machine, needed, exported, ".".join(map(str, max(versions))) if versions else "")


def _mach_o(content: bytes) -> Library:
    magic, processor, _, _, count = struct.unpack_from("<IIIII", content)
    assert magic == 0xFEEDFACF
    library = Library({0x01000007: "x86_64", 0x0100000C: "aarch64"}[processor], set(), set())
    at = 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", content, at)
        if command == 0xC:  # LOAD_DYLIB
            library.needed.add(_text(content, at + struct.unpack_from("<I", content, at + 8)[0]))
        if command == 0x1D:  # CODE_SIGNATURE
            library.signed = True
        if command == 0x32:  # BUILD_VERSION
            version = struct.unpack_from("<I", content, at + 12)[0]
            library.oldest = f"{version >> 16}.{version >> 8 & 255}"
        if command == 0x2:  # SYMTAB
            symbols, number, strings = struct.unpack_from("<III", content, at + 8)
            for name, kind, *_ in _records("<IBBHQ", content, symbols, 16 * number):
                if kind & 0x0F == 0x0F:  # external, and defined in a section
                    library.exported.add(_text(content, strings + name).removeprefix("_"))
        at += size
    return library


def _pe(content: bytes) -> Library:
    head = struct.unpack_from("<I", content, 0x3C)[0]
    machine, count = struct.unpack_from("<HH", content, head + 4)
    optional = head + 24
    sections = optional + struct.unpack_from("<H", content, head + 20)[0]

    def place(address: int) -> int:
        for i in range(count):
            size, first, _, offset = struct.unpack_from("<IIII", content, sections + 40 * i + 8)
            if first <= address < first + size:
                return int(address - first + offset)
        raise AssertionError(f"no section has {address:#x}")

    export_table, _, import_table = struct.unpack_from("<III", content, optional + 112)
    library = Library({0x8664: "x86_64"}[machine], set(), set())
    number, _, names = struct.unpack_from("<III", content, place(export_table) + 24)
    for (name,) in _records("<I", content, place(names), 4 * number):
        library.exported.add(_text(content, place(name)))
    at = place(import_table)
    while name := struct.unpack_from("<I", content, at + 12)[0]:
        library.needed.add(_text(content, place(name)).lower())
        at += 20
    return library
