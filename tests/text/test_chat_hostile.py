"""Chat templates that would never end, fill the memory or crash the interpreter: each ends in one line."""

from typing import Any

import pytest

from minillm.errors import CheckpointError, PromptError
from minillm.text.chat import ChatTemplate, renderer

from ..conversations import user

resource = pytest.importorskip("resource", reason="the system limits no memory")

NS = "{% set ns = namespace(x='a', t=(), n=2) %}"


def nested(body: str = "", depth: int = 3) -> str:
    for i in range(depth):
        body = f"{{% for i{i} in range(99999) %}}{body}{{% endfor %}}"
    return body


def repeated(assignment: str, times: int = 99999) -> str:
    return f"{NS}{{% for i in range({times}) %}}{{% set {assignment} %}}{{% endfor %}}"


HOSTILE: dict[str, list[str]] = {
    "loops": [
        nested(),
        nested("a"),
        nested("{{ i0 }}"),
        nested("{% if i0 %}{% endif %}"),
        "{% for a in range(99999) if range(99999)|list %}{% endfor %}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% for a in range(99999)|map('string')|select %}" + nested() + "{% endfor %}",
        "{% macro f() %}" + nested("x", 2) + "{% endmacro %}{{ f() }}",
        "{% set z %}" + nested("x" * 9999, 2) + "{% endset %}",
        "{% filter upper %}" + nested("x" * 9999, 2) + "{% endfilter %}",
    ],
    "repetition": [
        "{{ 'x' * 10**9 }}",
        "{{ 10**9 * 'x' }}",
        "{{ ('x'|safe) * 10**9 }}",
        "{{ [1] * 10**9 }}",
        "{{ (1,) * 10**9 }}",
        "{{ messages * 10**8 }}",
    ],
    "padding": [
        *(f"{{{{ 'x'.{name}(10**9) }}}}" for name in ("center", "ljust", "rjust", "zfill")),
        "{{ 'x'|center(10**9) }}",
        "{{ ['x']|map('center', 10**9)|list }}",
        "{{ ('x'|attr('center'))(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ 'a\nb'|indent(10**9) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{% filter center(10**9) %}a{% endfilter %}",
        "{% set x | center(10**9) %}a{% endset %}",
    ],
    "refunds": [
        call + nested()
        for call in (
            *(f"{{{{ 'x'.{name}(-10**15) }}}}" for name in ("center", "ljust", "rjust", "zfill")),
            "{{ 'x'|center(-10**15) }}",
            "{{ 'x'|indent(-10**15) }}",
            "{{ [1]|batch(-10**15)|list }}",
        )
    ],
    "formats": [
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%.1000000000f' % 1.0 }}",
        "{{ '%(a(b)c)1000000000d' % {'a(b)c': 1} }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10**9) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ (['{:1000000000}']|map(attribute='format')|first)(1) }}",
        "{{ ('{0}' * 99999).format('x' * 99999) }}",
        "{{ '%(a)s' * 99999 % {'a': 'x' * 999999} }}",
        "{{ strftime_now('%1000000000d') }}",
        "{{ messages|tojson(indent=10**9) }}",
        "{{ messages|tojson(separators=('x' * 9999999, 'y')) }}",
    ],
    "doubling": [
        *(
            repeated(f"ns.x = {how}", 100) + "{{ ns.x }}"
            for how in (
                "ns.x ~ ns.x",
                "ns.x + ns.x",
                "[ns.x, ns.x]",
                "(ns.x, ns.x)",
                "{'a': ns.x, 'b': ns.x}",
                "dict(a=ns.x, b=ns.x)",
                "namespace(a=ns.x, b=ns.x)",
                "ns.x|replace('a', 'aa')",
                "ns.x.replace('', 'a')",
                "[ns.x, ns.x]|join(ns.x)",
                "'%s%s' % (ns.x, ns.x)",
                "'{0}{0}'.format(ns.x)",
                "ns.x|tojson|tojson",
                "[[ns.x], [ns.x]]|sum(start=[])|list",
            )
        ),
        repeated("ns.t = (ns.t, ns.t)", 60) + "{{ {ns.t: 1} }}",
    ],
    "nesting": [
        *(
            repeated(f"ns.x = {how}") + end
            for how in ("[ns.x]", "(ns.x,)", "{'a': ns.x}", "ns.x|batch(1)", "namespace(a=ns.x)", "[ns.x]|groupby(0)")
            for end in ("", "{{ ns.x }}", "{{ ns.x|tojson }}", "{{ {(ns.x,): 1} }}")
        ),
        NS + "{% macro f(n) %}{% set n.t = varargs %}{% endmacro %}" + repeated("z = f(ns, ns.t)") + "{{ {ns.t: 1} }}",
        NS + "{% set ns.x = [ns] %}{{ ns.x }}",
    ],
    "recursion": [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% for m in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    ],
    "numbers": ["{{ 10**(10**9) }}", "{{ 5|round(-10**9) }}", repeated("ns.n = ns.n * ns.n", 100)],
    "slow methods": [
        "{{ ('a' * 9999999).rfind('b' + 'a' * 4999999) }}",
        "{{ ('a' * 9999999).rsplit('b' + 'a' * 4999999) }}",
        "{{ ('a ' * 9999999).split() }}",
        "{{ ('<!---->' * 9999999)|striptags }}",
        "{{ 'a'.translate({97: 'b' * 9999999}) }}",
        "{{ (5).to_bytes(10**9, 'little') }}",
        "{{ 'a'.encode() * 10**9 }}",
        "{{ lipsum(10**6) }}",
        "{% set a = range(99999)|list %}" + repeated("z = a == range(99999)|list"),
    ],
    "sources": ["x" * 2**17, "{{ " + "[" * 5000 + "]" * 5000 + " }}", "{{ " + "not " * 5000 + "1 }}"],
}

GREETING = "{{ messages[0].content }}"


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_ends_soon_and_the_next_one_is_rendered(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, before, ended = renderer.SECONDS, memory_in_use(), seconds_of_children()
    for source in HOSTILE[kind]:
        monkeypatch.setattr(renderer, "SECONDS", 0.25)
        try:
            text = ChatTemplate(source).render([user("Hi")])
        except (CheckpointError, PromptError) as error:  # stopped, or at its end before that, on a fast machine
            assert "\n" not in str(error)
        else:
            assert len(text) < 100, f"{source:.200}: {text:.200}"
        monkeypatch.setattr(renderer, "SECONDS", limit)
        assert ChatTemplate(GREETING).render([user("Hi")]) == "Hi"
    assert memory_in_use() - before < 2**28
    assert seconds_of_children() - ended < 5 * len(HOSTILE[kind])


def seconds_of_children() -> float:
    """Processor time of this process's children that have ended, as those that are stopped have."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def memory_in_use() -> int:
    """Bytes of the largest memory that this process has ever used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_a_template_may_look_back_on_all_messages_at_each_one() -> None:
    source = (
        "{% for m in messages %}{% for n in messages %}{% if n is none %}{% endif %}{% endfor %}"
        "{{ m.content }}{% endfor %}"
    )
    conversation: list[dict[str, Any]] = [user("Hello there. " * 10)] * 300
    assert len(ChatTemplate(source).render(conversation)) == 300 * 130


def test_an_output_far_longer_than_the_conversation_is_refused() -> None:
    with pytest.raises(CheckpointError, match="was stopped: its output is far longer than the conversation"):
        ChatTemplate("{{ 'x' * 10**7 }}").render([user("Hi")])
    assert len(ChatTemplate("{{ 'x' * 10**6 }}").render([user("Hi")])) == 10**6


def test_a_template_cannot_change_the_callers_messages() -> None:
    messages = [user("Hi")]
    assert ChatTemplate("{{ dict.update(messages[0], content='x') }}{{ messages[0].content }}").render(messages)
    assert messages == [user("Hi")]


def test_long_messages_are_cut_joined_and_searched() -> None:
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}"
        "{% set c = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{% if '<x>' not in c %}{% set ns.t = ns.t ~ c[1:] ~ (c|trim|replace('a', 'b')) %}{% endif %}"
        "{% endfor %}{{ ns.t }}"
    )
    assert len(ChatTemplate(source).render([user("a" * 1_000_000)] * 2)) == 4 * 1_000_000 - 2
