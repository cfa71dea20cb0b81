"""A short storm over both daemons; `make chaos` is the long one."""
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from tests.chaos.faults import KINDS, MOST, schedule
from tests.chaos.run import Failed, compare, sides, why_not
from tests.daemons.processes import ROOT


def test_a_seed_is_a_schedule():
    bursts = schedule(3, 45)
    faults = [fault for burst in bursts for fault in burst]
    assert bursts == schedule(3, 45) != schedule(4, 45) and len(faults) == 45 and {len(burst) for burst in bursts} <= set(range(1, MOST + 1))
    assert all(one.at <= other.at for burst in bursts for one, other in zip(burst, burst[1:]))
    assert all(KINDS[f.kind][0] <= f.seconds <= KINDS[f.kind][1] for f in faults)
    counts = Counter(f.kind for f in faults)
    assert set(counts) == set(KINDS) and max(counts.values()) - min(counts.values()) <= 1
    assert any(one.at + one.seconds > other.at for burst in bursts for one, other in zip(burst, burst[1:])), "some last while others begin"
    assert {sides(f) for f in faults} == {"", "p", "t", "pt"}


def test_the_comparison_sees_one_number(tmp_path):
    from tests.trainer.small import captures, stored
    true, same, other = (stored(tmp_path / name, captures(4, seed), stream=name * 32) / "store" for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert compare(true, same) == (4, 0)
    with pytest.raises(Failed, match="sample 0: ids is not"):
        compare(true, other)
    data = (same / f"{1:012d}.hs").read_bytes()
    (same / f"{1:012d}.hs").write_bytes(data[:-1])
    assert compare(true, same, {1, 2}) == (3, 1)
    with pytest.raises(Failed, match="000000000001.hs: "):
        compare(true, same, {2})
    (same / f"{1:012d}.hs").write_bytes(data)
    (same / f"{3:012d}.hs").unlink()
    with pytest.raises(Failed, match="samples 0 to 2, the truth has 0 to 3"):
        compare(true, same)


@pytest.mark.processes
def test_a_short_storm(tmp_path):
    if why := why_not():
        pytest.skip(why)
    words = ["--faults", "12", "--seed", "5", "--prompts", "100", "--folder", str(tmp_path / "storm")]
    done = subprocess.run([sys.executable, "-m", "tests.chaos.run", *words], cwd=ROOT, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"})
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"samples the same as undisturbed, none lost, none doubled +│ +\d{2,}", done.stdout)
