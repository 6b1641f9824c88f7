"""Chat templates, made at random from Jinja's constructs or damaged, hostile ones among them."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from minillm.text.chat import ChatTemplate, renderer

from ..conversations import CONVERSATIONS
from .mutate import mutate_bytes
from .outcome import attempt, expect
from .seeds import TEMPLATES

LONGEST = 10_000_000
"""Characters of a conversation that any of these makes; a template that writes more has to be stopped"""

NUMBERS = (
    "0",
    "1",
    "2",
    "7",
    "loop.index0",
    "messages | length",
    "1000",
    "10**9",
    "10**30",
    "-1",
    "1.5",
    "9**9**9",
    "none",
)
TEXTS = (
    "'a'",
    "''",
    "m.role",
    "m.content",
    "messages[0]['content']",
    "bos_token",
    "('x' * 1000)",
    "'%s' % m",
    "'{}'",
    "'\\n'",
)
FILTERS = ("trim", "upper", "escape", "tojson", "string", "title", "wordcount", "reverse")
METHODS = ("strip()", "upper()", "split()[0]", "startswith(1)", "join(messages)")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TWICE = "{% set ns = namespace(x=[1]) %}{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
"""A list whose text has 2**50 numbers"""
HOSTILE = (
    "{% for a in range(99999999) %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ [0] * 10**10 }}",
    "{{ ('x' * 10**5) | replace('x', 'y' * 10**5) }}",
    "{{ ('x' * 10**5).replace('x', 'y' * 10**5) }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'a' | center(10**10) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ 'a' | indent(10**9) }}",
    "{{ ('a\\n' * 1000) | indent(10**7) }}",
    "{{ 9**9**9 }}",
    "{{ 10**10000 }}",
    "{{ 2 ** (2 ** 40) }}",
    "{{ 10**4000 * 10**4000 }}",
    "{{ 'a' | wordwrap(0) }}",
    "{{ ('a' * 10**6) | wordwrap(1) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ messages | batch(10**10, 'x') | list }}",
    "{{ messages | slice(10**9) | list }}",
    "{{ lipsum(n=10**6) }}",
    "{{ lipsum(n=1, min=10**7, max=10**8) }}",
    "{{ cycler(*range(10**7)) }}",
    "{{ range(10**5) | list | tojson }}",
    "{{ (range(10**5) | list * 1000) | sum }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n > 0 %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% set x = [] %}{{ x.append(x) }}{{ x }}",
    "{% set ns = namespace(a=none) %}{% set ns.a = ns %}{{ ns.a }}{{ ns | tojson }}",
    TWICE + "{{ ns.x | tojson }}",
    TWICE + "{{ ns.x | string }}",
    TWICE + "{{ ns.x == ns.x[0] }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ self.__init__ }}{{ cycler.__init__.__globals__.os }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({}) }}",
    "{% include '/etc/passwd' %}",
    "{% extends messages[0].content %}",
    "{% import 'os' as os %}",
    "{{ raise_exception('two\\nlines \x1b[31m') }}",
    "{{ raise_exception('x' * 10**6) }}",
    "{{ raise_exception(messages) }}",
    "{{ strftime_now('%Y' * 10**5) }}",
    "{{ strftime_now('\ud800') }}",
    "{{ strftime_now('%') }}",
    "{{ dict(a=1, **{'b': 2}) | tojson }}",
    "{{ namespace(**{'_x': 1}) }}",
    "{{ joiner() }}{{ joiner('x' * 10**9) }}",
    "{{ 'x' | filesizeformat }}",
    "{{ 1 / 0 }}{{ 1 % 0 }}",
    "{{ messages | map(attribute='role') | join('x' * 10**9) }}",
    "{{ ('x' * 10**6).split('x') | length }}",
    "{{ ('ab' * 10**5) | urlize }}",
    "{{ ('<' * 10**5) | striptags }}",
    "{{ ('x,' * 10**6).split(',') | sort | unique | list | length }}",
    "{{ '\ud800' }}",
    "{{ caller() }}{{ varargs }}{{ super() }}",
    "{% raw %}{{ x }}{% endraw %}{% generation %}a{% endgeneration %}{% break %}",
    "{" * 5000,
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
    "{{ " + "-" * 5000 + "1 }}",
    "{% if 1 %}" * 200 + "{% endif %}" * 200,
    "{% for a in messages %}" * 30 + "x" + "{% endfor %}" * 30,
    "{{ " + " ~ ".join(["'x'"] * 20_000) + " }}",
    "{{ " + ".a" * 20_000 + " }}",
)


def number(rng: Random, depth: int = 0) -> str:
    """An expression for a number."""
    if depth < 3 and rng.random() < 0.3:
        return f"({number(rng, depth + 1)} {rng.choice('+-*')} {number(rng, depth + 1)})"
    return rng.choice(NUMBERS)


def text(rng: Random, depth: int = 0) -> str:
    """An expression for a text."""
    if depth > 2 or rng.random() < 0.4:
        return rng.choice(TEXTS)
    inner, count = text(rng, depth + 1), number(rng, depth + 1)
    return rng.choice(
        [
            f"({inner} * {count})",
            f"({inner} ~ {text(rng, depth + 1)})",
            f"({inner} + {text(rng, depth + 1)})",
            f"({inner} | {rng.choice(FILTERS)})",
            f"({inner} | center({count}))",
            f"({inner} | indent({count}))",
            f"({inner} | truncate({count}))",
            f"({inner} | replace({text(rng, depth + 1)}, {text(rng, depth + 1)}))",
            f"{inner}.{rng.choice([*METHODS, f'ljust({count})'])}",
            f"({inner})[:{count}]",
            f"'{rng.choice(['%s', '%9999d', '%r', '{}', '{:>99}'])}'.format({inner})",
            f"('%{rng.choice(['', '5', '99999', '*'])}s' % {inner})",
            f"(messages | tojson(indent={count}))",
            f"(messages | batch({count}) | list | string)",
            f"({inner} if {number(rng, depth + 1)} else {text(rng, depth + 1)})",
            f"(messages | map(attribute={inner}) | join({text(rng, depth + 1)}))",
            f"f({inner})",
            "ns.s",
        ]
    )


def block(rng: Random, depth: int = 0) -> str:
    """A piece of a template."""
    if depth > 3 or rng.random() < 0.3:
        return rng.choice(
            [f"{{{{ {text(rng)} }}}}", f"{{{{ {number(rng)} }}}}", "text\n", f"{{% set ns.s = {text(rng)} %}}"]
        )
    inner = block(rng, depth + 1)
    return rng.choice(
        [
            f"{{% for m in messages %}}{inner}{{% endfor %}}",
            f"{{% for i in range({number(rng)}) %}}{inner}{{% endfor %}}",
            f"{{% for m in messages recursive %}}{inner}{{{{ loop(messages[1:]) }}}}{{% endfor %}}",
            f"{{% if {number(rng)} %}}{inner}{{% else %}}{block(rng, depth + 1)}{{% endif %}}",
            f"{{% set m = {text(rng)} %}}{inner}",
            f"{{% macro f(m) %}}{inner}{{% endmacro %}}",
            f"{{% call f({text(rng)}) %}}{inner}{{% endcall %}}",
            f"{{% filter {rng.choice(['upper', 'trim', 'indent(10**5)', 'center(10**8)'])} %}}{inner}{{% endfilter %}}",
            f"{{% set ns.s = ns.s ~ ns.s ~ {text(rng)} %}}{inner}",
            inner + block(rng, depth + 1),
        ]
    )


def template(rng: Random) -> str:
    """A template: hostile, made at random, or a usual one with damage."""
    kind = rng.random()
    if kind < 0.25:
        return "".join(rng.choice(HOSTILE) for _ in range(rng.choice([1, 1, 2])))
    if kind < 0.75:
        return "{% set ns = namespace(s='s') %}{% set m = messages[0] %}" + block(rng)
    source = rng.choice(TEMPLATES).read_bytes()
    return mutate_bytes(rng, source).decode("utf-8", rng.choice(["replace", "surrogateescape"]))


def prepare(folder: Path) -> Callable[[int, Random], None]:
    """What runs an input."""
    renderer.SECONDS = 1.0

    def run(number: int, rng: Random) -> None:
        conversation = rng.choice(list(CONVERSATIONS.values()))
        options: dict[str, Any] = rng.choice(
            [{}, {}, {"continue_final_message": True}, {"add_generation_prompt": False}]
        )
        written = attempt(lambda: ChatTemplate(template(rng), special_tokens=TOKENS).render(conversation, **options))
        if written is not None:
            expect(len(written) <= LONGEST, f"the template wrote {len(written)} characters")

    return run
