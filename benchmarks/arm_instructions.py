"""How many instructions does a product take on ARM, beside llama.cpp's? Counted by an emulator: no time is measured.

    python benchmarks/arm_instructions.py --llama llama.cpp/ggml

Both engines are compiled for two processors by the Python package ziglang and multiply one weight on one thread under
QEMU (`apt install qemu-user-static libc6-arm64-cross`), which logs each instruction between given addresses. Ours are
those of all functions of linear*.c but the rounding of activations; llama.cpp's those of its functions for products,
MULTIPLIES, whichever its `ggml_mul_mat` calls for a weight that it repacks if it does so at load time. Neither its
rounding of activations, nor its loops around products of single rows, nor the repacking is counted.
"""

import argparse
import functools
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import harness
from harness import BenchmarkError, positive, say

PROCESSORS = {"dotprod": "generic+dotprod+fullfp16", "i8mm": "generic+dotprod+fullfp16+i8mm+bf16"}
"""Name -> in zig's words: with products of integers and arithmetic in float16, and with those of matrices too"""
PLAIN = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0", "int4": "q4_0"}
FORMATS = PLAIN | {name: name.lower() for name in ("Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q5_0", "IQ4_XS", "MXFP4")}
"""Ours -> llama.cpp's"""
HEADER = ("processor", "format", "rows", "instructions", "llama_instructions", "multiply_adds")
MULTIPLIES = re.compile("ggml_gem[mv]_|ggml_vec_dot_|sgemm|tinyBLAS|tiled")
ROUNDING = {"round_rows", "round_parts"}
QEMU = "qemu-aarch64-static"
LLAMA_DEFINED = ("_GNU_SOURCE", "NDEBUG", "GGML_USE_LLAMAFILE", "GGML_USE_CPU_REPACK", "GGML_USE_CPU")
"""As its own build does by default"""
LLAMA_SOURCES = (
    "ggml.c", "ggml.cpp", "ggml-alloc.c", "ggml-backend.cpp", "ggml-backend-meta.cpp", "ggml-quants.c",
    "ggml-threading.cpp", "ggml-cpu/*.c", "ggml-cpu/*.cpp", "ggml-cpu/amx/*.cpp", "ggml-cpu/llamafile/*.cpp",
    "ggml-cpu/tiled/*.cpp", "ggml-cpu/arch/arm/quants.c", "ggml-cpu/arch/arm/repack.cpp",
)  # fmt: skip
UNCOUNTED = ("ops.cpp", "unary-ops.cpp", "binary-ops.cpp")  # take long to compile, and multiply nothing

FILLED = """
#include <stdint.h>
#include <stdlib.h>
#include <strings.h>
static void fill(void *to, int64_t size) { /* numbers of any format with such bytes are finite */
    for (uint32_t i = 0, state = 1; i < size; i++) ((char *)to)[i] = (state = state * 1664525 + 1013904223) >> 24 & 63;
}
"""
OURS = """
#include "linear.h"
kernel linear_few, linear_many;
int64_t linear_scratch(void);
static void *filled(int64_t size) {
    void *memory = aligned_alloc(64, (size + 127) / 64 * 64);
    return fill(memory, size), memory;
}
int main(int count, char **arguments) {
    const int64_t inputs = atoi(arguments[2]), outputs = atoi(arguments[3]), rows = atoi(arguments[4]);
    const int64_t weights = inputs * outputs, stride = (inputs / 32 + 15) / 16 * 16;
    linear a = {.weight = filled(4 * weights), .scales = filled(2 * weights / 32), .x = filled(4 * rows * inputs)};
    a.out = filled(4 * rows * outputs), a.x_rounded = filled(rows * inputs + 32);
    a.x_scales = filled(4 * rows * stride), a.x_sums = filled(8 * rows * stride);
    a.scratch = filled(linear_scratch()), a.group = 32;
    a.rows = rows, a.inputs = inputs, a.outputs = a.stride = outputs, a.format = atoi(arguments[1]);
    (rows > 16 ? linear_many : linear_few)(&a, 0, 1, 0);
    return 0;
}
"""
THEIRS = """
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml-cpu/repack.h"
static void place(ggml_tensor *tensor, ggml_backend_buffer_type_t type) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, ggml_nbytes(tensor) + 4096);
    ggml_backend_tensor_alloc(buffer, tensor, ggml_backend_buffer_get_base(buffer));
}
int main(int count, char **arguments) {
    int type = 0, inputs = atoi(arguments[2]), outputs = atoi(arguments[3]), rows = atoi(arguments[4]);
    while (!ggml_type_name((ggml_type)type) || strcasecmp(ggml_type_name((ggml_type)type), arguments[1])) type++;
    ggml_context *context = ggml_init({1 << 20, nullptr, true});
    ggml_tensor *w = ggml_new_tensor_2d(context, (ggml_type)type, inputs, outputs), *tensors[2] = {w};
    ggml_tensor *x = tensors[1] = ggml_new_tensor_2d(context, GGML_TYPE_F32, inputs, rows);
    ggml_tensor *out = ggml_mul_mat(context, w, x);
    place(w, ggml_backend_cpu_repack_buffer_type());
    if (!w->extra) { /* is not repacked */
        w = tensors[0] = out->src[0] = ggml_new_tensor_2d(context, (ggml_type)type, inputs, outputs);
        place(w, ggml_backend_cpu_buffer_type());
    }
    place(x, ggml_backend_cpu_buffer_type()), place(out, ggml_backend_cpu_buffer_type());
    for (ggml_tensor *tensor : tensors) {
        void *memory = malloc(ggml_nbytes(tensor));
        fill(memory, ggml_nbytes(tensor)), ggml_backend_tensor_set(tensor, memory, 0, ggml_nbytes(tensor));
    }
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, 1);
    ggml_cgraph *graph = ggml_new_graph(context);
    return ggml_build_forward_expand(graph, out), ggml_backend_graph_compute(backend, graph);
}
"""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = harness.new_parser("Count the instructions of products on ARM.", "CSV and the table")
    parser.add_argument("--llama", type=Path, metavar="DIR", help="llama.cpp's folder ggml; else ours alone")
    parser.add_argument("--inputs", type=positive, default=1024, metavar="N", help="columns, which divide by 256")
    parser.add_argument("--outputs", type=positive, default=32, metavar="N", help="rows of the weight, by 8")
    parser.add_argument("--rows", type=harness.positives, default=(1, 8, 64), metavar="N,N,...", help="of activations")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    parser.add_argument("--processors", nargs="+", choices=PROCESSORS, default=list(PROCESSORS), help="default: both")
    return parser.parse_args(arguments)


def zig(arguments: Sequence[str | Path], folder: Path) -> None:
    """Run zig's compiler for aarch64."""
    names = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(folder / "cache"))
    compiler = "c++" if any(str(argument).endswith(".cpp") for argument in arguments) else "cc"
    command = [sys.executable, "-m", "ziglang", compiler, "-target", "aarch64-linux-gnu", *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | names, capture_output=True, text=True)
    if done.returncode:
        raise BenchmarkError(f"{' '.join(command[3:])}: {done.stderr.strip()[:500]}")


def build(
    driver: str, suffix: str, sources: Sequence[Path], flags: Callable[[Path], list[str]], folder: Path, jobs: int
) -> tuple[Path, list[Path]]:
    """Compile sources, and a program of them and of a driver, at fixed addresses. -> it and the objects"""
    folder.mkdir()
    objects = [folder / f"{i}-{path.name}.o" for i, path in enumerate(sources)]
    with ThreadPoolExecutor(jobs) as pool:
        calls = [[*flags(path), "-c", path, "-o", to] for path, to in zip(sources, objects, strict=True)]
        list(pool.map(lambda call: zig(call, folder.parent), calls))
    program, main = folder / "program", folder / f"driver{suffix}"
    main.write_text(FILLED + driver)
    zig([*flags(main), main, *objects, "-no-pie", "-pthread", "-o", program, "-lm"], folder.parent)
    return program, objects


def functions(path: Path) -> dict[str, tuple[int, int]]:
    """The functions that the symbol table of an ELF file names -> address and size."""
    data = path.read_bytes()
    (sections,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<2H", data, 0x3A)
    heads = [struct.unpack_from("<2I4Q2I", data, sections + i * size) for i in range(count)]
    found = {}
    for head in heads:
        if head[1] == 2:  # a table of symbols
            names = heads[head[6]][4]
            for at in range(head[4], head[4] + head[5], 24):
                name, info, _, _, address, length = struct.unpack_from("<I2BH2Q", data, at)
                if info & 15 == 2 and length:
                    found[data[names + name : data.index(0, names + name)].decode()] = address, length
    return found


def count(program: Path, counted: Callable[[str], object], *arguments: object) -> int:
    """The instructions of some functions, those of which `counted` is true, that a program executes."""
    ranges = ",".join(f"{at:#x}+{size:#x}" for name, (at, size) in functions(program).items() if counted(name))
    options = f"-L /usr/aarch64-linux-gnu -singlestep -d exec,nochain -D /dev/stdout -dfilter {ranges}"
    command = [QEMU, *options.split(), str(program), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        log = iter(functools.partial(process.stdout.read, 1 << 20), b"") if process.stdout else ()
        lines = sum(part.count(b"\n") for part in log)
    if process.returncode:
        raise BenchmarkError(f"{' '.join(command)} ended with {process.returncode}")
    return lines


def our_counter(processor: str, folder: Path, jobs: int) -> Callable[..., int]:
    """Compile our kernels. -> a function of a format and of inputs, outputs and rows"""
    from minillm.backends.cpu.compiling import FLAGS, SOURCES
    from minillm.backends.cpu.matrices import BLOCK_CODES

    def flags(path: Path) -> list[str]:
        return [*FLAGS, f"-mcpu={PROCESSORS[processor]}", f"-I{SOURCES}"]

    say(f"compiling our kernels for {processor}")
    program, objects = build(OURS, ".c", sorted(SOURCES.glob("*.c")), flags, folder / f"ours-{processor}", jobs)
    ours = {name for path in objects if "-linear" in path.name for name in functions(path)} - ROUNDING
    codes = {name: code for code, name in enumerate(PLAIN)} | BLOCK_CODES
    return lambda form, *sizes: count(program, ours.__contains__, codes[form], *sizes)


def llama_counter(processor: str, llama: Path, folder: Path, jobs: int) -> Callable[..., int]:
    """Compile llama.cpp's. -> as `our_counter`"""
    include = [f"-I{path}" for path in (folder, llama / "include", llama / "src", llama / "src/ggml-cpu")]

    def flags(path: Path) -> list[str]:
        level = "-O1" if path.name in UNCOUNTED else "-O3"
        return ["-w", level, *(f"-D{name}" for name in LLAMA_DEFINED), f"-mcpu={PROCESSORS[processor]}", *include]

    (folder / "ggml-version.h").write_text('#define GGML_VERSION ""\n#define GGML_COMMIT ""\n')
    sources = sorted(path for pattern in LLAMA_SOURCES for path in (llama / "src").glob(pattern))
    if not sources:
        raise BenchmarkError(f"--llama {llama} has no src/ggml.c: expected the folder ggml of llama.cpp's sources")
    say(f"compiling llama.cpp's for {processor}, some minutes")
    program, _ = build(THEIRS, ".cpp", sources, flags, folder / f"llama-{processor}", jobs)
    return lambda form, *sizes: count(program, MULTIPLIES.search, FORMATS[form], *sizes)


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """A line for each format, with the instructions of 1,000 multiply-adds, ours and llama.cpp's, in each case."""
    cells = [["format", *dict.fromkeys(f"{row[0]}, {row[2]}" for row in rows)]]
    for form in dict.fromkeys(row[1] for row in rows):
        own = [row for row in rows if row[1] == form]
        each = [[1000 * int(str(n)) / int(str(row[5])) for n in row[3:5] if n != ""] for row in own]
        cells.append([str(form), *(" / ".join(f"{n:.0f}" for n in one) for one in each)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def run(args: argparse.Namespace) -> int:
    """Count, and write the results."""
    if shutil.which(QEMU) is None:
        raise BenchmarkError("needs apt install qemu-user-static libc6-arm64-cross")
    harness.make_folder(args.out)
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for processor in args.processors:
            counters = [our_counter(processor, Path(scratch), args.threads)]
            if args.llama:
                counters.append(llama_counter(processor, args.llama.resolve(), Path(scratch), args.threads))
            for form, n in product(args.formats, args.rows):
                found = [counter(form, args.inputs, args.outputs, n) for counter in counters]
                say(f"{processor}, {form}, {n} rows: {found}")
                rows.append([processor, form, n, *found, *[""] * (2 - len(found)), n * args.inputs * args.outputs])
    facts = {"question": f"instructions of a product of {args.inputs} inputs and {args.outputs} outputs on ARM"}
    facts |= {name: harness.describe(1, ("minillm", "ziglang"))[name] for name in ("versions", "commit")}
    facts |= {f"processor {name}": cpu for name, cpu in PROCESSORS.items()}
    lines = ["instructions of 1,000 multiply-adds, ours / llama.cpp's, by processor and rows:", *table(rows)]
    text = "\n".join([*harness.headed(facts), *lines])
    stem = args.out / "arm_instructions"
    harness.write_result(stem.with_suffix(".txt"), text + "\n")
    harness.write_csv(stem.with_suffix(".csv"), facts, HEADER, rows)
    print(f"{text}\nwritten: {stem}.csv, {stem}.txt")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 2 for invalid arguments."""
    return harness.execute("arm_instructions", run, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
