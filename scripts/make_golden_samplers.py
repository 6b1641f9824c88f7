"""Makes the golden file of the samplers that llama.cpp has: what its own code does to random logits.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36     # its archive holds llama.cpp
    tar xzf llama_cpp_python-0.3.36.tar.gz
    python scripts/make_golden_samplers.py llama_cpp_python-0.3.36/vendor/llama.cpp

It rewrites tests/golden_samplers/llama_cpp.json.

Only llama.cpp's src/llama-sampler.cpp is compiled, with a C++ compiler; the vocabulary that it asks for texts is the
stand-in below, and the rest of llama.cpp, which no sampler here calls, stays undefined. Each case has its arguments and
the logits that a chain of samplers leaves: null for a token that is dropped.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

RELEASE = "llama-cpp-python 0.3.36"
FILE = Path(__file__).parents[1] / "tests" / "golden_samplers" / "llama_cpp.json"
SEED = 11
V = 12
PIECES = ["a", "b", "\n", "c\n", "ab", "ba", "abc", "\n\n", ":", "d:", "c", "d", "e", "da", "cab", "é", "bé", ". "]
"""A vocabulary; a text is split into its longest pieces from left to right"""
BREAKERS = ["\n", ":", "abc", "bca", "aéd", ". a", "dd"]
ORDERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")

PROGRAM = r"""
#include "llama-sampler.h"
#include "llama-vocab.h"
#include <cmath>
#include <iostream>

// The vocabulary: texts of tokens, and the longest that fits at each place.
static std::vector<std::string> pieces;
struct llama_vocab::impl {};
llama_vocab::llama_vocab() {}
llama_vocab::~llama_vocab() {}
uint32_t llama_vocab::n_tokens() const { return pieces.size(); }
std::string llama_vocab::detokenize(const std::vector<llama_token> & tokens, bool) const { return pieces[tokens[0]]; }
std::vector<llama_token> llama_vocab::tokenize(const std::string & text, bool, bool) const {
    std::vector<llama_token> tokens;
    for (size_t at = 0; at < text.size();) {
        int best = -1;
        for (size_t i = 0; i < pieces.size(); ++i) {
            bool longer = best < 0 || pieces[i].size() > pieces[best].size();
            if (longer && text.compare(at, pieces[i].size(), pieces[i]) == 0) best = i;
        }
        if (best < 0) { ++at; continue; }
        tokens.push_back(best);
        at += pieces[best].size();
    }
    return tokens;
}

template <typename T> static T next() { T value; std::cin >> value; return value; }
static std::string hex() {
    std::string digits = next<std::string>(), text;
    for (size_t i = 0; i + 1 < digits.size(); i += 2) text += (char) std::stoi(digits.substr(i, 2), nullptr, 16);
    return text;
}

int main() {
    llama_vocab vocab;
    for (int n = next<int>(); n > 0; --n) pieces.push_back(hex());
    for (int cases = next<int>(); cases > 0; --cases) {
        std::vector<llama_token> history(next<int>());
        for (auto & token : history) token = next<int>();
        std::vector<llama_token_data> data(next<int>());
        for (size_t i = 0; i < data.size(); ++i) data[i] = {(llama_token) i, next<float>(), 0.0f};
        llama_token_data_array candidates = {data.data(), data.size(), -1, false};
        for (int samplers = next<int>(); samplers > 0; --samplers) {
            std::string name = next<std::string>();
            llama_sampler * sampler = nullptr;
            if (name == "penalties") {
                float repeat = next<float>(), frequency = next<float>(), presence = next<float>();
                sampler = llama_sampler_init_penalties(data.size(), 10000, repeat, frequency, presence);
            } else if (name == "dry") {
                float multiplier = next<float>(), base = next<float>();
                int allowed = next<int>(), last_n = next<int>();
                std::vector<std::string> texts(next<int>());
                for (auto & text : texts) text = hex();
                std::vector<const char *> breakers;
                for (auto & text : texts) breakers.push_back(text.c_str());
                sampler = llama_sampler_init_dry(
                    &vocab, multiplier, base, allowed, last_n, breakers.data(), texts.size());
            }
            else if (name == "top_n_sigma") sampler = llama_sampler_init_top_n_sigma(next<float>());
            else if (name == "top_k") sampler = llama_sampler_init_top_k(next<int>());
            else if (name == "typ_p") sampler = llama_sampler_init_typical(next<float>(), 0);
            else if (name == "top_p") sampler = llama_sampler_init_top_p(next<float>(), 0);
            else if (name == "min_p") sampler = llama_sampler_init_min_p(next<float>(), 0);
            else if (name == "xtc") sampler = llama_sampler_init_xtc(1.0f, next<float>(), 0, 1);
            else if (name == "temperature") sampler = llama_sampler_init_temp(next<float>());
            else return 1;
            if (sampler->iface->accept) for (auto token : history) sampler->iface->accept(sampler, token);
            sampler->iface->apply(sampler, &candidates);
        }
        std::vector<float> left(data.size(), -INFINITY);
        for (size_t i = 0; i < candidates.size; ++i) left[candidates.data[i].id] = candidates.data[i].logit;
        std::cout.precision(7);
        for (auto logit : left) std::cout << logit << " ";
        std::cout << "\n";
    }
}
"""


def main(source: Path) -> None:
    """Draw the cases, let llama.cpp compute them, and write the file."""
    rng = np.random.default_rng(SEED)
    cases = [dry_case(rng) for _ in range(60)] + [xtc_case(rng) for _ in range(20)] + [chain(rng) for _ in range(80)]
    words = [len(PIECES), *(text.encode().hex() for text in PIECES), len(cases)]
    for case in cases:
        words += [len(case["history"]), *case["history"], len(case["logits"]), *case["logits"], len(case["samplers"])]
        for name in case["samplers"]:
            words += [name, *arguments(name, case["fields"])]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "samplers.cpp").write_text(PROGRAM, encoding="utf-8")
        include = [f"-I{source / part}" for part in ("src", "include", "ggml/include")]
        files = [str(Path(folder) / "samplers.cpp"), str(source / "src" / "llama-sampler.cpp")]
        binary = str(Path(folder) / "samplers")
        undefined = ["-static", "-Wl,--unresolved-symbols=ignore-all"]
        subprocess.run(["c++", "-std=c++17", "-O1", *include, *files, *undefined, "-o", binary], check=True)
        done = subprocess.run([binary], input=" ".join(map(str, words)), capture_output=True, text=True, check=True)
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        case["left"] = [None if logit == "-inf" else float(logit) for logit in line.split()]
    golden = {"made_by": {"llama.cpp": f"of {RELEASE}", "seed": SEED}, "pieces": PIECES}
    lines_of = ",\n".join(json.dumps(case) for case in cases)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(f'{json.dumps(golden)[:-1]}, "cases": [\n{lines_of}\n]}}\n', encoding="utf-8")


def logits(rng: np.random.Generator, size: int) -> list[float]:
    """Random logits with few decimals, none twice."""
    numbers = rng.normal(size=size) * 2
    while len({round(x, 3) for x in numbers.tolist()}) < size:
        numbers = rng.normal(size=size) * 2
    return [round(x, 3) for x in numbers.tolist()]


def dry_fields(rng: np.random.Generator) -> dict[str, Any]:
    """Fields of DRY."""
    breakers = [BREAKERS[i] for i in rng.choice(len(BREAKERS), rng.integers(0, 4), replace=False)]
    return {
        "dry_multiplier": float(rng.choice([0.5, 0.8, 2.0])),
        "dry_base": float(rng.choice([1.0, 1.75, 3.0])),
        "dry_allowed_length": int(rng.integers(0, 5)),
        "dry_penalty_last_n": int(rng.choice([0, 5, 20, 1000])),
        "dry_sequence_breakers": breakers,
    }


def repetitive(rng: np.random.Generator, vocab_size: int) -> list[int]:
    """Tokens that were often there before."""
    tokens: list[int] = rng.integers(vocab_size, size=rng.integers(0, 30)).tolist()
    for _ in range(rng.integers(0, 3)):
        start = int(rng.integers(len(tokens) + 1))
        tokens += tokens[start : start + int(rng.integers(1, 90))]
    return tokens[:160]


def dry_case(rng: np.random.Generator) -> dict[str, Any]:
    """DRY alone."""
    few = int(rng.choice([2, 5, len(PIECES)]))
    history = rng.permutation(len(PIECES))[np.asarray(repetitive(rng, few), np.int64)].tolist()
    return {"history": history, "logits": logits(rng, len(PIECES)), "samplers": ["dry"], "fields": dry_fields(rng)}


def xtc_case(rng: np.random.Generator) -> dict[str, Any]:
    """XTC alone, whose draw always says yes."""
    fields = {"xtc_probability": 1.0, "xtc_threshold": float(rng.choice([0.0, 0.02, 0.1, 0.2, 0.5]))}
    return {"history": [], "logits": logits(rng, V), "samplers": ["xtc"], "fields": fields}


def chain(rng: np.random.Generator) -> dict[str, Any]:
    """Several samplers in any order, but typ_p before top_n_sigma.

    llama.cpp's top_n_sigma leaves tokens of probability 0 among the candidates, and its typ_p then computes NaN.
    """
    names = [name for name in rng.permutation(ORDERS).tolist() if rng.random() < 0.6]
    if {"typ_p", "top_n_sigma"} <= {*names} and names.index("typ_p") > names.index("top_n_sigma"):
        names.reverse()
    fields: dict[str, Any] = {
        "penalties": {
            "repetition_penalty": float(rng.uniform(0.8, 2)),
            "frequency_penalty": float(rng.uniform(-1, 1)),
            "presence_penalty": float(rng.uniform(-1, 1)),
        },
        "dry": dry_fields(rng) | {"dry_sequence_breakers": []},
        "top_n_sigma": {"top_n_sigma": float(rng.uniform(0.5, 2.5))},
        "top_k": {"top_k": int(rng.integers(2, 12))},
        "typ_p": {"typical_p": float(rng.uniform(0.3, 0.97))},
        "top_p": {"top_p": float(rng.uniform(0.3, 0.97))},
        "min_p": {"min_p": float(rng.uniform(0.01, 0.2))},
        "xtc": {"xtc_probability": 1.0, "xtc_threshold": float(rng.uniform(0.05, 0.3))},
        "temperature": {"temperature": float(rng.uniform(0.5, 2))},
    }
    asked = {field: value for name in names for field, value in fields[name].items()}
    return {"history": repetitive(rng, V)[:60], "logits": logits(rng, len(PIECES)), "samplers": names, "fields": asked}


def arguments(name: str, fields: dict[str, Any]) -> list[Any]:
    """The words that the program reads after a sampler's name."""
    if name == "dry":
        breakers = [text.encode().hex() for text in fields["dry_sequence_breakers"]]
        numbers = ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n")
        return [*(fields[number] for number in numbers), len(breakers), *breakers]
    names = {
        "penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
        "typ_p": ("typical_p",),
        "xtc": ("xtc_threshold",),
    }
    return [fields[field] for field in names.get(name, (name,))]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
