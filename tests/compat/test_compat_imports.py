"""Drop-ins load nothing before they are asked to."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import msa_tiles.ops, msa_tiles.nn
print("msa_tiles.compat" in sys.modules)
from msa_tiles.compat import transformers
print("transformers" in sys.modules)
sys.modules["transformers"] = None
try:
    transformers.register()
except ImportError as error:
    print(error)
"""


def test_what_is_loaded_when() -> None:
    """The operators know no drop-in, the one for transformers loads it in `register`, and says so where it is not."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    missing = "register needs transformers, which is not installed: `pip install transformers`"
    assert done.stdout.splitlines() == ["False", "False", missing]
