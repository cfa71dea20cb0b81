"""What "held out" promises, and that the shipped folder speaks the text it was trained on. No model is run."""
import json, pathlib, random, re, sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "targets/embedded"))
import corpus

SHIPPED = [json.loads(line) for line in (ROOT / "producer/data/prompts.jsonl").read_text().splitlines()]
HELD = {form for name in corpus.WORDS for word in corpus.held_words(name) for form in (word.lower(), word.lower() + "s", word.lower() + "ed")}


def words_in(draw: corpus.Draw) -> set[str]:
    """Lower-case words; ThisName and this_name are several."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", draw.prompt + " " + draw.answer)
    return set(re.findall(r"[a-z]+", spaced.lower()))


@pytest.fixture(scope="module")
def training() -> list[corpus.Draw]:
    rng = random.Random(3)
    return [corpus.training_draw(rng) for _ in range(1000)]


@pytest.fixture(scope="module")
def made() -> list[corpus.Draw]:
    return corpus.shipped(random.Random(2024))


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(ROOT / "producer/data/embedded", local_files_only=True)


def test_same_seed_same_text():
    first, second = ([corpus.training_draw(rng) for _ in range(50)] for rng in (random.Random(5), random.Random(5)))
    assert first == second


def test_the_shipped_prompts_are_the_ones_the_corpus_makes(made):
    assert [{"prompt": d.prompt, "kind": d.kind} for d in made] == SHIPPED


def test_the_demos_prompts_are_the_ones_the_corpus_makes_and_never_trained_on(training):
    made = corpus.demo(random.Random(2024))
    lines = (ROOT / "producer" / "data" / "demo-prompts.jsonl").read_text().splitlines()
    assert [{"prompt": d.prompt, "kind": d.kind} for d in made] == [json.loads(line) for line in lines]
    assert all(d.held for d in made) and len({d.prompt for d in made}) == len(made)
    assert {d.prompt for d in made}.isdisjoint(d.prompt for d in training)


def test_shipped_prompts_are_distinct_and_never_trained_on(training, made):
    assert len({d.prompt for d in made}) == len(made) == 640
    assert all(d.held or d.held_words for d in made)       # a training draw is neither
    assert {d.prompt for d in made}.isdisjoint(d.prompt for d in training)
    assert {d.kind for d in made} == set(corpus.KINDS)


def test_training_sees_no_held_out_draw_word_or_shape(training):
    for draw in training:
        assert not draw.held and not draw.held_words
        assert not words_in(draw) & HELD, draw
        assert draw.shape not in corpus.HELD_SHAPES


def test_every_rare_draw_shows_its_held_out_word():
    rng = random.Random(4)
    for draw in (corpus.rare_draw(rng) for _ in range(100)):
        assert words_in(draw) & HELD


@pytest.mark.parametrize("task", corpus.TASKS, ids=lambda task: f"{task.kind}-{task.shape}")
def test_an_answer_follows_from_its_prompt(task):
    """Every phrasing names the same words, and the answer brings no word of its own."""
    asked = {frozenset(corpus.slots(ask)) for ask in task.asks}
    assert len(asked) == 1 and len(task.asks) >= 5
    assert set(corpus.slots(task.answer)) <= asked.pop()


def test_no_special_token_is_ever_part_of_the_text(training):
    assert not any("<|" in d.prompt + d.answer for d in training)
    assert not any("<|" in line["prompt"] for line in SHIPPED)


def test_the_tokenizer_returns_every_shipped_prompt(tokenizer):
    for line in SHIPPED:
        ids = tokenizer(line["prompt"]).input_ids
        assert tokenizer.decode(ids) == line["prompt"]
        assert min(ids) > 6                                  # no special token
    odd = "def f(x):\n\treturn  x  # 12345 é 中\n\n"
    assert tokenizer.decode(tokenizer(odd).input_ids) == odd


def test_special_tokens_have_the_ids_the_target_knows(tokenizer):
    names = ["<|endoftext|>", "<|pad|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    assert tokenizer.convert_tokens_to_ids(names) == list(range(7))
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.mask_token) == ("<|end|>", "<|pad|>", "<|mask|>")


def test_the_chat_template_renders_as_trained(tokenizer):
    turn = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False) == "<|user|>\nHello<|end|>\n<|assistant|>\n"
    whole = tokenizer.apply_chat_template([*turn, {"role": "assistant", "content": "Hi"}], tokenize=False)
    assert whole == "<|user|>\nHello<|end|>\n<|assistant|>\nHi<|end|>\n"
