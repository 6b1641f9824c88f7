"""From an instruction in a compiled kernel to the lines of source that it comes from."""

import re
import shutil
import subprocess

INSTRUCTION = re.compile(r"(\S+\.so)\+0x([0-9a-f]+)")


def with_lines(message: str) -> str:
    """`message` with each `file.so+0xoffset` replaced by its line, and the lines from which that was called inline."""
    return INSTRUCTION.sub(lambda match: _lines(match[1], match[2]), message)


def _lines(library: str, offset: str) -> str:
    if not shutil.which("addr2line"):
        return f"{library}+0x{offset}"
    command = ["addr2line", "--inlines", "--exe", library, f"0x{offset}"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    # Innermost first. Frames of the emulator's own headers say nothing about the kernel.
    places = [re.sub(r"^.*/| \(discriminator \d+\)", "", line) for line in lines if ".cu" in line]
    return ", called at ".join(dict.fromkeys(places)) or f"{library}+0x{offset}"
