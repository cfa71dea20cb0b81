import dataclasses
import json

import pytest

from common.contract import ExtractionContract, differences
from common.errors import CorruptError

BASE = ExtractionContract(target="embedded", weights="a" * 64, tokenizer="b" * 64, chat_template="", thinking=None, taps=(1, 2), n_layers=8,
                          hidden_size=128, vocab_size=1024, mask_token_id=2, dtype="float32", delta_rule="torch", versions={"torch": "2.13"})


def test_it_survives_json_and_keeps_its_hash():
    again = ExtractionContract.from_dict(json.loads(json.dumps(BASE.to_dict())))
    assert again == BASE and again.hash == BASE.hash


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ExtractionContract)])
def test_every_field_moves_the_hash_and_is_named_when_it_differs(field):
    value = getattr(BASE, field)
    other = {"taps": (1, 3), "versions": {"torch": "2.14"}, "thinking": True}.get(field, value + "x" if isinstance(value, str) else None)
    changed = dataclasses.replace(BASE, **{field: other if other is not None else value + 1})
    assert changed.hash != BASE.hash
    [line] = differences(BASE, changed)
    assert line.startswith("versions.torch: " if field == "versions" else field + ":")


def test_of_many_versions_the_one_that_differs_is_named():
    """The whole table would be cut before the difference came."""
    many = {"attention": "sdpa", "experts": "grouped_mm", "tokenizers": "0.23.1", "torch": "2.13.0+cpu", "transformers": "5.24.0"}
    ours, theirs = (dataclasses.replace(BASE, versions=many | more) for more in ({}, {"experts": "triton", "kernels": "1"}))
    assert differences(ours, theirs) == ['versions.experts: "grouped_mm" -> "triton"', 'versions.kernels: null -> "1"']


@pytest.mark.parametrize("spoil, says", [
    (lambda d: d.pop("taps"), "missing ..taps"), (lambda d: d.update(extra=1), "unknown ..extra"), (lambda d: d.update(taps=[1, "2"]), "taps"),
    (lambda d: d.update(taps=[True]), "taps"), (lambda d: d.update(n_layers="8"), "n_layers"), (lambda d: d.update(thinking="yes"), "thinking"),
    (lambda d: d.update(target=None), "target"),
])
def test_a_contract_off_the_wire_is_checked_field_by_field(spoil, says):
    data = BASE.to_dict()
    spoil(data)
    with pytest.raises(CorruptError, match=says):
        ExtractionContract.from_dict(data)
