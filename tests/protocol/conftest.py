import pytest

from protocol import keys as key_files
from protocol.producer_link import ProducerLink
from tests.protocol.ends import CONTRACT
from tests.protocol.links import TIMING, Raw, free_address


@pytest.fixture
def address() -> str:
    return free_address()


@pytest.fixture
def serve(address, tmp_path):
    """serve(store) -> a listening ProducerLink; closed after the test."""
    opened = []
    def start(store, **options) -> ProducerLink:
        link = ProducerLink(options.pop("at", address), store, options.pop("contract", CONTRACT).to_dict(), options.pop("assets", {}),
                            cursors=tmp_path / "subscribers.json", inbox_dir=tmp_path / "inbox", timing=TIMING, **options)
        opened.append(link)
        link.start()
        return link
    yield start
    for link in opened:
        link.close()
        link.raise_if_failed()


@pytest.fixture
def raw(address):
    one = Raw(address)
    yield one
    one.close()


@pytest.fixture
def keys(tmp_path):
    """keys(name): a trainer's keys, which trust the producer's; keys.producer, and keys.public[name]."""
    mine = key_files.generate(tmp_path / "producer-keys")

    def made(name: str, *, allow: bool = True) -> key_files.TrainerKeys:
        folder = tmp_path / f"{name}-keys"
        made.public[name] = key_files.generate(folder)
        key_files.set_producer(folder, mine)
        if allow:
            key_files.allow(made.folder, made.public[name], name)
        return key_files.TrainerKeys(folder)
    made.public, made.folder = {}, tmp_path / "producer-keys"
    made.producer = key_files.ProducerKeys(made.folder)
    return made
