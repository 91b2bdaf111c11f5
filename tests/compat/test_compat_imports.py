"""Drop-ins load nothing before they are asked to (tests/packaging/test_imports.py), and say what they lack then."""

from __future__ import annotations

import sys

import pytest

from msa_tiles.compat import transformers


def test_register_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError) as caught:
        transformers.register()
    assert str(caught.value) == "register needs transformers, which is not installed: `pip install transformers`"
