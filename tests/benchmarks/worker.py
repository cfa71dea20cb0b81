"""The other end of a Worker in a test: prints where it should not, answers, fails."""
from __future__ import annotations

from benchmarks import rivals


def twice(value: int) -> dict:
    print("a library says something")
    return {"value": 2 * value}


def fail() -> dict:
    raise ValueError("no such luck")


if __name__ == "__main__":
    rivals.serve({"twice": twice, "fail": fail})
