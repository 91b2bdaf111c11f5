"""What loads a server's files for tests: real modules from a wheel or a directory, hollow ones for the rest."""

from __future__ import annotations

import importlib
import inspect
import sys
import zipfile

import pytest
from compat import carry
from compat.stand_ins import Finder, Source, source_of, standing_in

LAYER = """
from served.config import Config, register
from served.kernels.fast import run


@register("x")
class Layer(Config):
    size: Config | None = Config[int]

    def go(self):
        return run()
"""
FILES = {
    "served/__init__.py": "",
    "served/layer.py": LAYER,
    "served/kernels/fast.py": "def run():\n    return 7\n",
    "served/config.py": "raise RuntimeError('not to be loaded')\n",
}


@pytest.fixture(params=["wheel", "directory"])
def place(request, tmp_path):
    if request.param == "wheel":
        place = tmp_path / "served-1.0-py3-none-any.whl"
        with zipfile.ZipFile(place, "w") as wheel:
            for name, text in FILES.items():
                wheel.writestr(name, text)
        return place
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_chosen_modules_are_real(place):
    finder = Finder(Source(place), "served", ("served.layer", "served.kernels."))
    with standing_in(finder, {"served.elsewhere": {"given": 1}}):
        layer = importlib.import_module("served.layer")
        assert layer.Layer().go() == 7 and inspect.getsource(layer.Layer.go).strip().startswith("def go")
        assert importlib.import_module("served.elsewhere").given == 1
        assert not isinstance(3, layer.Config) and layer.Layer.__bases__ == (object,)
        with pytest.raises(ImportError, match=r"has no module served\.kernels\.slow"):
            importlib.import_module("served.kernels.slow")
    assert not [name for name in sys.modules if name.startswith("served")]


def test_few_files_are_carried(place, tmp_path):
    out = tmp_path / "out"
    assert carry.carry(Source(place), ("served.layer", "served.kernels."), out) == 2
    assert {str(path.relative_to(out)) for path in out.rglob("*.py")} == {"served/layer.py", "served/kernels/fast.py"}
    with standing_in(Finder(Source(out), "served", ("served.layer", "served.kernels.")), {}):
        assert importlib.import_module("served.layer").Layer().go() == 7


def test_where_a_package_is(place, monkeypatch):
    monkeypatch.setenv("SERVED_FILES", str(place))
    assert source_of("served", "SERVED_FILES").place == place
    monkeypatch.setenv("SERVED_FILES", str(place / "nowhere"))
    with pytest.raises(pytest.fail.Exception, match="nothing is at"):
        source_of("served", "SERVED_FILES")
    monkeypatch.delenv("SERVED_FILES")
    with pytest.raises(pytest.skip.Exception, match="served is not installed, and SERVED_FILES names neither"):
        source_of("served", "SERVED_FILES")
