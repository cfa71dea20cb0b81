"""Where the shipped target lies: a tiny trained qwen3_5_moe in Hugging Face's own folder layout, so that nothing need be downloaded."""
from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "data" / "embedded"
