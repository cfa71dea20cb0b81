"""Keys on disk are private, lists of allowed keys are re-read, and libzmq's question gets the right answer."""
import os

import pytest
import zmq
from zmq.utils import z85

from common.errors import UserError
from protocol import keys


def test_a_generated_key_is_private_and_never_overwritten(tmp_path):
    public = keys.generate(tmp_path / "k")
    secret = tmp_path / "k" / keys.SECRET
    assert secret.stat().st_mode & 0o777 == 0o600
    before = os.umask(0)
    try:
        keys.generate(tmp_path / "open")
    finally:
        os.umask(before)
    assert (tmp_path / "open" / keys.SECRET).stat().st_mode & 0o777 == 0o600, "whatever the umask"
    assert keys.public_key(tmp_path / "k") == public == zmq.curve_public(secret.read_text().strip().encode()).decode()
    with pytest.raises(UserError, match="exists"):
        keys.generate(tmp_path / "k")
    assert keys.public_key(tmp_path / "k") == public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path, mode):
    keys.generate(tmp_path)
    os.chmod(tmp_path / keys.SECRET, mode)
    for read in (keys.ProducerKeys, keys.TrainerKeys, keys.public_key):
        with pytest.raises(UserError, match=f"mode {mode:o}.: chmod 600 {tmp_path / keys.SECRET}, or"):
            read(tmp_path)


def test_missing_and_damaged_keys_say_what_to_do(tmp_path):
    with pytest.raises(UserError, match="keygen"):
        keys.ProducerKeys(tmp_path)
    keys.generate(tmp_path)
    with pytest.raises(UserError, match="producer's public key"):
        keys.TrainerKeys(tmp_path)
    for bad in ("", "short", "x" * 39 + "~", "%%%%%" * 8, "#" * 40):
        with pytest.raises(UserError, match="not a public key"):
            keys.set_producer(tmp_path, bad)
        with pytest.raises(UserError, match="not a public key"):
            keys.allow(tmp_path, bad)
    (tmp_path / keys.SECRET).write_text("half a secret")
    with pytest.raises(UserError, match="secret.key holds no secret key") as caught:
        keys.ProducerKeys(tmp_path)
    assert "half a secret" not in str(caught.value), "what is in that file is nobody's to see"


def test_the_list_of_allowed_keys_is_read_again_when_it_changes(tmp_path):
    keys.generate(tmp_path)
    mine = keys.ProducerKeys(tmp_path)
    assert mine.allowed() == frozenset()
    a, b = (zmq.curve_keypair()[0].decode() for _ in range(2))
    assert keys.allow(tmp_path, a, "the trainer\nbox") and mine.allowed() == {a}
    assert not keys.allow(tmp_path, a) and keys.allow(tmp_path, b) and mine.allowed() == {a, b}
    (tmp_path / keys.ALLOWED).write_text(f"# comment\n\n{b} kept\n")
    assert mine.allowed() == {b}
    (tmp_path / keys.ALLOWED).unlink()
    assert mine.allowed() == frozenset()


def test_libzmq_gets_yes_for_an_allowed_key_alone():
    public = zmq.curve_keypair()[0]
    ask = [b"1.0", b"7", b"hsdraft", b"10.0.0.2", b"", b"CURVE", z85.decode(public)]
    assert keys.zap_reply(ask, frozenset({public.decode()})) == ([b"1.0", b"7", b"200", b"", public, b""], None)
    reply, refused = keys.zap_reply(ask, frozenset())
    assert reply[:3] == [b"1.0", b"7", b"400"] and refused == public.decode()
    for bad in ([], [b"1.0"], ask[:6], [*ask[:5], b"PLAIN", b"u", b"p"], [*ask[:5], b"NULL"], [*ask[:6], b"short"], [b"2.0", *ask[1:]]):
        reply, refused = keys.zap_reply(bad, frozenset({public.decode()}))
        assert reply[2] == b"400" and refused == "(none)"
