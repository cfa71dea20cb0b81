"""`hsprod generate`: whole characters only, the same text either way, and a drafter of something else refused by name."""
from __future__ import annotations

import dataclasses
import json
import re

import pytest
import tiny
import torch
from drafters import TAPS, prompts, trained
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner

from common.drafter import checkpoint
from common.drafter.config import shape_for
from common.drafter.model import Drafter
from common.errors import UserError
from producer import cli, fitting, identity, writing
from producer.config import Generate
from producer.prompts import Prompt, render
from producer.sampling import Sampling
from producer.speculate import Decoded, Limit, plain
from producer.writing import TextStream, UNFINISHED

TOK = tiny.tokenizer()


def decode(ids: list[int]) -> str:
    return TOK.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(st.text(max_size=12), st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=200)
def test_pieces_join_to_the_text_and_hold_no_half_characters(text, sizes):
    text = text.replace(UNFINISHED, "")
    ids, stream, pieces, at = TOK(text, add_special_tokens=False).input_ids, TextStream(decode), [], 0
    while at < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream.feed(ids[at:at + size]))
        at += size
        whole = decode(ids[:at]).rstrip(UNFINISHED)
        assert "".join(pieces) == whole                              # nothing that is whole is kept back
    assert not any(UNFINISHED in piece for piece in pieces)
    assert "".join(pieces) + stream.flush() == text


@given(st.lists(st.integers(0, len(TOK) - 1), max_size=30), st.integers(1, 4))
@settings(max_examples=200)
def test_any_tokens_at_all(ids, size):
    """Bytes that are no text, special tokens: what was given out stays true, and in the end all of it is."""
    stream, given_out = TextStream(decode), ""
    for at in range(0, len(ids), size):
        given_out += stream.feed(ids[at:at + size])
        assert decode(ids[:at + size]).startswith(given_out)
    assert given_out + stream.flush() == decode(ids)


def test_a_long_text_is_not_decoded_over_and_over():
    seen = []
    stream = TextStream(lambda ids: seen.append(len(ids)) or decode(ids))
    ids = TOK("the user asks 🙂, the assistant answers. " * 40, add_special_tokens=False).input_ids
    assert "".join(stream.feed([token]) for token in ids) == decode(ids) and max(seen) < 12


@pytest.fixture(scope="module")
def target():
    return tiny.dense(layers=8, template=tiny.CHATML)


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A drafter that is right now and then, saved with this target's contract."""
    asked = [render(target.tokenizer, Prompt(({"role": "user", "content": "hello"},)), None)] + prompts((20,), seed=5)
    path = tmp_path_factory.mktemp("d") / "step-1"
    record = {"contract": target.contract(TAPS, None).hash, "target": target.name}
    checkpoint.save(path, trained(target, asked, 40, steps=40), record, torch.float32)
    return path


@pytest.fixture
def hsprod(target, monkeypatch):
    monkeypatch.setattr(writing, "load", lambda *_args, **_kwargs: target)
    monkeypatch.setattr(fitting, "sizes", lambda _name: target)
    return lambda *args, **kwargs: CliRunner().invoke(cli.app, ["generate", *map(str, args)], **kwargs)


def said(target, text: str, new: int) -> str:
    ids = render(target.tokenizer, Prompt(({"role": "user", "content": text},)), None)
    return target.tokenizer.decode(plain(target, ids, Limit(new, target.eos_ids)).tokens, skip_special_tokens=True)


def test_the_command_prints_the_targets_text_with_a_drafter_and_without(hsprod, target, folder):
    bare = hsprod("hello", "--max-new-tokens", 40)
    spec = hsprod("hello", "--max-new-tokens", 40, "--drafter", folder, "--compare", "--prefill-chunk", 3)
    assert bare.exit_code == spec.exit_code == 0, (bare.output, spec.output)
    assert bare.stdout == spec.stdout == said(target, "hello", 40) + "\n"
    assert "tokens/s" in bare.stderr and "tau" not in bare.stderr
    assert "texts identical" in spec.stderr and "tau" in spec.stderr and "drafts accepted" in spec.stderr
    assert hsprod("hello", "--max-new-tokens", 9, "--no-stats").stderr == ""


def test_prompts_from_a_file_in_its_order(hsprod, target, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "hello"}\n{"prompt": "f2(x)"}\n')
    got = hsprod("--prompts", file, "--max-new-tokens", 12)
    assert got.stdout == said(target, "hello", 12) + "\n" + said(target, "f2(x)", 12) + "\n"
    assert got.stderr.startswith(f'{file}: 2 prompts (2 with "prompt")\n[1/2] ') and "\n[2/2] " in got.stderr


def test_a_seed_is_a_text(hsprod, folder):
    def text(seed, *more):
        return hsprod("hello", "--temperature", 1.5, "--seed", seed, "--max-new-tokens", 30, *more).stdout
    assert text(1) == text(1) != text(2)
    assert text(1, "--drafter", folder) == text(1, "--drafter", folder) != text(2, "--drafter", folder)


def test_compare_names_the_place_and_the_margin(target):
    writer = writing.Writer(target, None, Limit(10), Sampling(), None, None)
    ids = prompts((9,))[0]
    decoded = writer.decode(ids, "")
    same, words = writer.compare(ids, decoded)
    assert same and "texts identical, " in words
    other = dataclasses.replace(decoded, tokens=[*decoded.tokens[:4], decoded.tokens[4] + 1, *decoded.tokens[5:]])
    same, words = writer.compare(ids, other)
    assert not same and "texts other from new token 4 on, where the target's first choice led by " in words


@pytest.mark.parametrize("dtype, code", [(torch.float32, 1), (torch.bfloat16, 0)])
def test_a_text_that_differs_is_an_error_in_fp32_alone(hsprod, monkeypatch, target, folder, dtype, code):
    """Rounding may change a text in bf16.  The plain text is falsified: to --compare that is a text that speculation changed."""
    def false(*args, **how):
        decoded = plain(*args, **how)
        return dataclasses.replace(decoded, tokens=[*decoded.tokens[:-1], 7])
    monkeypatch.setattr(writing, "plain", false)
    monkeypatch.setattr(target, "dtype", dtype)
    monkeypatch.setattr(writing, "fit_drafter", lambda _settings, found, *_: found[0])
    monkeypatch.setattr(writing, "speculate", lambda _target, _drafter, ids, limit, **_how: plain(target, ids, limit))
    got = hsprod("hello", "--max-new-tokens", 9, "--drafter", folder, "--compare")
    assert got.exit_code == code and "texts other from new token 8 on" in got.stderr, got.output
    assert ("1 of 1 texts are not plain decoding's" in got.stderr) == bool(code)


def test_an_output_that_cannot_hold_the_text_is_said_and_gets_the_rest(hsprod, target, monkeypatch):
    monkeypatch.setattr(writing, "plain", lambda *_args, on_tokens, **_how: on_tokens(ids) or Decoded(ids, seconds={"prefill": 1.0, "step": 1.0}))
    ids = target.tokenizer("naïve ☃!", add_special_tokens=False).input_ids
    got = CliRunner(charset="ascii").invoke(cli.app, ["generate", "hello"])
    assert got.exit_code == 0 and got.stdout == "na?ve ?!\n" and "note: standard output is ascii" in got.stderr


@pytest.mark.parametrize("config, says", [({"speculators_model_type": "dflash"}, "is in speculators' format; .*hstrain import .* --out DIR"),
                                          (None, "is a file; .*hstrain import .* --out DIR")])
def test_another_format_is_recognised_and_the_command_named(hsprod, monkeypatch, tmp_path, config, says):
    monkeypatch.setattr(writing, "load", None)
    path = tmp_path / "d.gguf"
    if config is None:
        path.write_bytes(b"GGUF")
    else:
        path.mkdir()
        (path / checkpoint.CONFIG).write_text(json.dumps(config))
    got = hsprod("a", "--drafter", path)
    assert isinstance(got.exception, UserError) and re.search(says, str(got.exception)) and str(path) in str(got.exception)


@pytest.mark.parametrize("args, says", [
    ((), "either a prompt or --prompts"), (("a", "--prompts", "x"), "either a prompt or --prompts"),
    (("a", "--compare"), "give --drafter"), (("a", "--block-size", 4), "give --drafter"),
    (("a", "--drafter", "x", "--compare", "--temperature", 1), "--temperature 0"),
    (("a", "--drafter", "/nowhere"), "/nowhere"), (("--prompts", "/nowhere"), "/nowhere")])
def test_mistakes_are_one_line(hsprod, args, says):
    got = hsprod(*args)
    assert isinstance(got.exception, UserError) and says in str(got.exception) and "\n" not in str(got.exception)
    assert got.stdout == ""


@pytest.mark.parametrize("option, value, says", [("--verify-len", "xyz", "full, auto, or a number of slots, 1 to 6"), ("--verify-len", 99, "1 to 6"),
                                                 ("--block-size", 99, "6 slots at most")])
def test_what_is_wrong_with_a_drafter_is_said_before_the_target_is_read(hsprod, monkeypatch, folder, option, value, says):
    monkeypatch.setattr(writing, "load", None)
    got = hsprod("a", "--drafter", folder, option, value)
    assert isinstance(got.exception, UserError) and says in str(got.exception)


def settings_for(folder, **more) -> Generate:
    return Generate(prompt="a", drafter=folder, **more)


def load_drafter(settings: Generate, target, thinking):
    return fitting.fit_drafter(settings, fitting.read_drafter(settings), target, thinking)


def test_another_contract_is_refused_and_can_be_forced(target, folder, tmp_path, capsys):
    path = tmp_path / "other"
    drafter, _, record = checkpoint.load(folder, "cpu", torch.float32)
    checkpoint.save(path, drafter, record | {"contract": "f" * 64, "target": "somebody's"}, torch.float32)
    with pytest.raises(UserError, match="target somebody's, here tiny-dense; contract ffffffffffff, here .*--force"):
        load_drafter(settings_for(path), target, None)
    load_drafter(settings_for(path, force=True), target, None)
    assert "contract ffffffffffff" in capsys.readouterr().err
    with pytest.raises(UserError, match="contract"):
        load_drafter(settings_for(folder), target, True)      # another thinking mode is another contract
    load_drafter(settings_for(folder), target, None)
    assert capsys.readouterr().err == ""


def with_contract(folder, path, target, /, **change):
    """The same drafter, its record holding the whole contract, changed as told."""
    drafter, _, record = checkpoint.load(folder, "cpu", torch.float32)
    contract = dataclasses.replace(target.contract(TAPS, None), **change)
    checkpoint.save(path, drafter, record | {"contract": contract.hash, "extraction": contract.to_dict()}, torch.float32)
    return path


@pytest.mark.parametrize("change", [dict(weights="f" * 64), dict(tokenizer="f" * 64), dict(chat_template=""), dict(thinking=True),
                                    dict(mask_token_id=7), dict(taps=(1, 2)), dict(n_layers=9), dict(final_rule="raw")])
def test_a_drafter_of_other_data_is_refused_naming_the_field(target, folder, tmp_path, capsys, change):
    path, [name] = with_contract(folder, tmp_path / "d", target, **change), change
    with pytest.raises(UserError, match=f"other data than this target's: {name}: [^;]* -> [^;]*; --force"):
        load_drafter(settings_for(path), target, None)
    load_drafter(settings_for(path, force=True), target, None)
    assert capsys.readouterr().err.startswith("note: ")


@pytest.mark.parametrize("change, says", [
    (lambda v: dict(versions=v | {"experts": "triton"}), 'versions.experts: "triton" -> "'),
    (lambda v: dict(versions=v | {"torch": "2.12.1"}), 'versions.torch: "2.12.1" -> '), (lambda v: dict(delta_rule="fla:x"), 'delta_rule: "fla:x" -> ""'),
    (lambda v: dict(target="elsewhere"), 'target: "elsewhere" -> "tiny-dense"')])
def test_what_moves_bits_only_is_noted(target, folder, tmp_path, capsys, change, says):
    path = with_contract(folder, tmp_path / "d", target, **change(target.contract(TAPS, None).versions))
    load_drafter(settings_for(path), target, None)
    said = capsys.readouterr().err
    assert said.startswith("note: ") and "computed otherwise than here: " + says in said and said.count("\n") == 1


def test_another_dtype_is_not_other_weights_and_hides_none(target, folder, tmp_path, capsys):
    path = with_contract(folder, tmp_path / "d", target, dtype="bfloat16", weights=identity.weights(tiny.dense(layers=8, dtype=torch.bfloat16).model))
    load_drafter(settings_for(path), target, None)
    assert 'dtype: "bfloat16" -> "float32"\n' in capsys.readouterr().err
    other = with_contract(folder, tmp_path / "e", target, dtype="bfloat16",
                          weights=identity.weights(tiny.dense(1, layers=8, dtype=torch.bfloat16).model))
    with pytest.raises(UserError, match="weights: "):
        load_drafter(settings_for(other), target, None)


def test_a_record_with_a_damaged_contract(target, folder, tmp_path):
    path = with_contract(folder, tmp_path / "d", target)
    record = json.loads((path / checkpoint.RECORD).read_text())
    del record["extraction"]["taps"]
    (path / checkpoint.RECORD).write_text(json.dumps(record | {"contract": "f"}))
    with pytest.raises(UserError, match="record.json is damaged.*taps"):
        load_drafter(settings_for(path), target, None)


@pytest.mark.parametrize("change, says", [(dict(n_layers=9), "layers 9, tiny-dense has 8"), (dict(hidden_size=128), "hidden size 128"),
                                          (dict(vocab_size=99), "vocabulary 99")])
def test_a_drafter_of_another_shape_is_refused_even_by_force(hsprod, monkeypatch, target, tmp_path, change, says):
    shape = dict(hidden_size=target.hidden_size, vocab_size=target.vocab_size, n_layers=target.n_layers) | change
    checkpoint.save(tmp_path / "d", Drafter(shape_for(**shape, taps=TAPS, mask_token_id=2, attention="mixed"),
                                            torch.Generator().manual_seed(0)), {"contract": "f"}, torch.float32)
    with pytest.raises(UserError, match=says):
        load_drafter(settings_for(tmp_path / "d", force=True), target, None)
    monkeypatch.setattr(writing, "load", None)                       # and before the target is read, by its config alone
    got = hsprod("a", "--target", "tiny-dense", "--drafter", tmp_path / "d", "--force")
    assert isinstance(got.exception, UserError) and says in str(got.exception)


def test_a_released_folder_has_no_record_and_that_is_said(target, folder, tmp_path, capsys):
    drafter, config, _ = checkpoint.load(folder, "cpu", torch.float32)
    checkpoint.save(tmp_path / "d", drafter, {}, torch.float32)
    (tmp_path / "d" / checkpoint.RECORD).unlink()
    load_drafter(settings_for(tmp_path / "d"), target, None)
    assert "nothing vouches" in capsys.readouterr().err
    with pytest.raises(UserError, match=f"have {config.block_size} slots"):
        load_drafter(settings_for(folder, block_size=config.block_size + 1), target, None)
    (tmp_path / "d" / checkpoint.CONFIG).write_text(json.dumps({}))
    with pytest.raises(UserError, match="drafter config"):
        load_drafter(settings_for(tmp_path / "d"), target, None)


def test_a_text_beyond_the_drafters_positions_is_refused_before_it_begins(target, folder):
    drafter, config, _ = checkpoint.load(folder, "cpu", torch.float32)
    writer = writing.Writer(target, drafter, Limit(config.max_position_embeddings), Sampling(), None, None)
    with pytest.raises(UserError, match="lower --max-new-tokens"):
        writer.decode([5], "")
