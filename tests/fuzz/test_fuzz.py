"""What `make fuzz` runs for hours, here for seconds and without atheris: seeds, kept cases, bytes and changed seeds."""
from __future__ import annotations

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import CASES, TARGETS, Target

SLOW = {"drafter", "gguf", "trainer_says", "producer_says", "state"}
every = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


@functools.cache
def seeds(target: Target) -> list[bytes]:
    return target.seeds()


@every
def test_seeds_are_valid_and_are_taken(target):
    assert seeds(target) and all([target.read(seed) for seed in seeds(target)])
    assert max(map(len, seeds(target))) <= target.longest


@pytest.mark.parametrize("name, path", [(name, path) for name, target in TARGETS.items() for path in target.cases()],
                         ids=lambda value: getattr(value, "name", value))
def test_what_was_found_once_stays_mended(name, path):
    TARGETS[name].read(path.read_bytes())


def test_every_case_is_of_a_target():
    assert {path.name for path in CASES.iterdir()} <= set(TARGETS)


@every
def test_any_bytes_are_a_value_or_the_readers_own_error(target):
    @settings(max_examples=40)
    @given(st.binary(max_size=300))
    def holds(data):
        target.read(data)
    holds()


@every
def test_a_changed_valid_input_is_a_value_or_the_readers_own_error(target):
    @settings(max_examples=40 if target.name in SLOW else 120)
    @given(st.integers(0, 2**63), st.integers(1, 4))
    def holds(number, times):
        rng = random.Random(number)
        data = rng.choice(seeds(target))
        for _ in range(times):
            data = target.change(data, rng)
        target.read(data)
    holds()
