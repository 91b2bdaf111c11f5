"""The benchmarks live in the checkout beside the package; a wheel does not carry them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
