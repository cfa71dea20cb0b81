"""Prompts are split once by hash, and masked by spans of tokens (T1)."""
from __future__ import annotations

import pytest
import tiny

from common.errors import UserError
from producer import prompt_sets
from producer.prompts import Prompt, judges, prompts_hash, render, render_conversation, split, thinking_mode

EOS = frozenset({tiny.EOS})
QWEN = """{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content = m.content %}{%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
TEMPLATES = {"chatml": tiny.CHATML, "qwen": QWEN}


def parse(row: dict) -> Prompt:
    return prompt_sets.parse(row)[1]


def talk(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def supervised(template: str, messages: list[dict[str, str]], thinking: bool | None = None) -> list[str]:
    """The masked tokens, decoded, a run of them each."""
    tok = tiny.tokenizer(TEMPLATES[template])
    ids, mask = render_conversation(tok, messages, thinking, EOS)
    text = tok.apply_chat_template(messages, tokenize=False)
    assert tok.decode(ids) == text and len(ids) == len(mask)
    runs, run = [], []
    for token, on in [*zip(ids, mask), (0, False)]:
        if on:
            run.append(token)
        elif run:
            runs.append(tok.decode(run))
            run = []
    return runs


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_masked_tokens_are_the_assistants_words(template, turns):
    answers = [f"answer {i}: the assistant says ünï\n  x + {i}" for i in range(turns)]
    messages = talk(*(text for i, answer in enumerate(answers) for text in (f"question {i}", answer)))
    assert supervised(template, messages) == [answer + "<|im_end|>" for answer in answers]


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_that_the_user_said_too(template):
    messages = talk("say: the answer", "the answer", "assistant\nthe answer", "the answer")
    assert supervised(template, messages) == ["the answer<|im_end|>"] * 2
    tok = tiny.tokenizer(TEMPLATES[template])
    ids, mask = render_conversation(tok, messages, None, EOS)
    assert "the answer" in tok.decode([t for t, on in zip(ids, mask) if not on])          # the user's stays unsupervised


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_empty_answer_is_its_end_token(template):
    assert supervised(template, talk("a", "", "b", "c")) == ["<|im_end|>", "c<|im_end|>"]


def test_thinking_is_supervised_where_it_is_kept():
    first, second = "<think>\nold thought\n</think>\n\nfirst", "<think>\nnew thought\n</think>\n\nsecond"
    assert supervised("qwen", talk("a", first, "b", second), True) == ["first<|im_end|>", "new thought\n</think>\n\nsecond<|im_end|>"]
    assert supervised("qwen", talk("a", first, "b", "second"), False) == ["first<|im_end|>", "second<|im_end|>"]
    assert supervised("qwen", talk("a", "<think>\nonly thought\n</think>", "b", "c"), True) == ["<|im_end|>", "c<|im_end|>"]
    assert supervised("chatml", talk("a", first, "b", second)) == [first + "<|im_end|>", second + "<|im_end|>"]


def test_a_system_prompt_and_a_conversation_that_ends_with_the_user():
    messages = [{"role": "system", "content": "be short"}, *talk("a", "yes", "b")]
    assert supervised("chatml", messages) == ["yes<|im_end|>"]


def test_a_template_that_rewrites_the_answer_is_refused():
    for change in ("m.content | upper", "m.content | replace('s', 'S')", "''"):
        tok = tiny.tokenizer(tiny.CHATML.replace("m.content", change))
        with pytest.raises(UserError, match="message 1"):
            render_conversation(tok, talk("a", "yes"), None, EOS)


def test_the_conversation_begins_as_the_prompt_does():
    for template, thinking in (("chatml", None), ("qwen", False)):
        tok = tiny.tokenizer(TEMPLATES[template])
        prompt = render(tok, Prompt(tuple(talk("a question"))), thinking)
        ids, mask = render_conversation(tok, talk("a question", "an answer"), thinking, EOS)
        assert ids[:len(prompt)] == prompt and mask.index(True) == len(prompt)


def test_without_a_template_a_prompt_is_its_text():
    tok = tiny.tokenizer()
    assert tok.decode(render(tok, parse({"prompt": "def f1(x):"}), None)) == "def f1(x):"
    ids, mask = render_conversation(tok, talk("def f1(x):", " return"), None, EOS)
    assert tok.decode(ids) == "def f1(x): return<|im_end|>" and tok.decode([t for t, on in zip(ids, mask) if on]) == " return<|im_end|>"
    with pytest.raises(UserError, match="no chat template"):
        render(tok, Prompt(tuple(talk("a", "b", "c"))), None)


def test_thinking_mode_is_found_by_rendering_both_ways():
    qwen, chatml = tiny.tokenizer(QWEN), tiny.tokenizer(tiny.CHATML)
    assert [thinking_mode(qwen, wanted) for wanted in (None, True, False)] == [True, True, False]
    assert [thinking_mode(tok, wanted) for tok in (chatml, tiny.tokenizer()) for wanted in (None, False)] == [None] * 4
    with pytest.raises(UserError, match="--thinking"):
        thinking_mode(chatml, True)
    prompt = parse({"prompt": "a"})
    assert len({tuple(render(qwen, prompt, choice)) for choice in (True, False)}) == 2


def test_a_prompts_id_is_fixed():
    """Stores on disk hold these ids: a change here would let held-out prompts into training."""
    assert parse({"prompt": "a"}).id == Prompt(({"content": "a", "role": "user"},)).id
    assert parse({"prompt": "a"}).id == "ac8647777f2bc5d64d6fdb528b6a1b8b6e6bfe05adbc1333eaf00781b6fdb993"
    assert prompts_hash([parse({"prompt": "b"}), parse({"prompt": "a"})]) == prompts_hash([parse({"prompt": "a"}), parse({"prompt": "b"})])
    assert prompts_hash([parse({"prompt": "b"})]) != prompts_hash([parse({"prompt": "a"})])


def test_split_is_stable_when_the_list_grows():
    prompts = [parse({"prompt": f"prompt {i}"}) for i in range(400)]
    small, large = split(prompts[:200], 0.25, "s"), split(prompts[::-1] + prompts[:30], 0.25, "s")
    assert (small.duplicates, large.duplicates) == (0, 30) and len(large.train) + len(large.held_out) == 400
    assert {p.id for p in small.held_out} == {p.id for p in large.held_out} & {p.id for p in prompts[:200]}
    assert not {p.id for p in large.held_out} & {p.id for p in large.train}
    assert 60 < len(large.held_out) < 140                                              # 100 expected, 8.7 its deviation
    assert {p.id for p in split(prompts, 0.25, "t").held_out} != {p.id for p in large.held_out}
    assert {p.id for p in split(prompts, 0.1, "s").held_out} < {p.id for p in large.held_out}


def test_an_empty_side_is_refused():
    prompts = [parse({"prompt": f"prompt {i}"}) for i in range(20)]
    with pytest.raises(UserError, match="none to hold out"):
        split(prompts, 0.0, "s")
    with pytest.raises(UserError, match="none to train on"):
        split(prompts, 1.0, "s")


def test_the_judges_are_each_once_and_stay_when_the_list_is_turned():
    prompts = [parse({"prompt": f"prompt {i}"}) for i in range(20)]
    chosen = judges(prompts + prompts[:5], 4)
    assert chosen == judges(prompts[::-1], 4) and [p.id for p in chosen] == sorted(p.id for p in prompts)[:4]
    assert len(judges(prompts * 2, 100)) == 20
