"""The API reference is what the docstrings say, and the docstrings say what a caller needs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHAPE_OR_TYPE = re.compile(r"\[[A-Z, ]|\[\]|int32|float|dtype|uint8|byte|scalar")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


API = load()
THINGS = {
    f"{module.__name__}.{name}": API.thing_of(module, name)
    for module in API.modules()
    for name in API.public(module)
    if callable(API.thing_of(module, name))
}


def test_the_page_is_what_the_docstrings_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert API.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_that_is_not_is_noticed(monkeypatch, tmp_path, capsys) -> None:
    page = tmp_path / "api.md"
    shutil.copyfile(API.PAGE, page)
    monkeypatch.setattr(API, "PAGE", page)
    assert API.main(["--check"]) == 0
    page.write_text(page.read_text(encoding="utf-8").replace("int32", "int64", 1), encoding="utf-8")
    assert API.main(["--check"]) == 1 and "run python docs/make_api.py" in capsys.readouterr().err
    assert API.main([]) == 0 and API.main(["--check"]) == 0


def test_everything_public_is_on_it() -> None:
    text = API.PAGE.read_text(encoding="utf-8")
    for module in API.modules():
        part = text.split(f"\n## {module.__name__}\n", 1)[1].split("\n## ", 1)[0]
        assert re.findall(r"^### (\w+)$", part, flags=re.MULTILINE) == API.public(module)


@pytest.mark.parametrize("module", [module.__name__ for module in API.modules()])
def test_what_is_on_it_can_be_imported_from_there(module: str) -> None:
    part = API.PAGE.read_text(encoding="utf-8").split(f"\n## {module}\n", 1)[1].split("\n## ", 1)[0]
    names = re.findall(r"^### (\w+)$", part, flags=re.MULTILINE)
    assert names
    exec(f"from {module} import {', '.join(names)}", {})


def said(full: str, seen: frozenset[str] = frozenset()) -> str:
    """What a docstring says, with that of its constructor, of its module, and of what it refers to by `name`."""
    thing = THINGS[full]
    text = (thing.__doc__ or "") + "\n" + ((thing.__init__.__doc__ or "") if inspect.isclass(thing) else "")
    known = {name.rpartition(".")[2]: name for name in THINGS}
    for name in re.findall(r"(?<!`)`(?:ops\.)?(\w+)`(?!`)", text):
        other = known.get(name)
        if other is not None and other not in seen | {full}:
            text += "\n" + said(other, seen | {full})
    module = inspect.getmodule(thing)
    package = importlib.import_module(full.rpartition(".")[0])
    return "\n".join([text, package.__doc__ or "", (module.__doc__ or "") if module else ""])


def parameters(thing: Any) -> list[str]:
    try:
        found = inspect.signature(thing).parameters.values()
    except ValueError:
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in found if each.kind not in variadic]


# Those of another package's operators keep the words of that package.
OURS = [name for name in THINGS if not name.startswith(("msa_tiles.compat.vllm.", "msa_tiles.compat.sglang."))]


@pytest.mark.parametrize("full", THINGS)
def test_a_docstring_is_there(full: str) -> None:
    assert len((THINGS[full].__doc__ or "").split()) > 3


@pytest.mark.parametrize("full", OURS)
def test_every_parameter_is_spoken_of(full: str) -> None:
    text = said(full)
    assert [name for name in parameters(THINGS[full]) if not re.search(rf"\b{name}\b", text)] == []


@pytest.mark.parametrize("full", [name for name in OURS if inspect.isfunction(THINGS[name])])
def test_errors_shapes_and_dtypes_are_told(full: str) -> None:
    text = said(full)
    assert re.search(r"[Rr]aise|Error", text), "which errors?"
    tensors = [each for each in inspect.signature(THINGS[full]).parameters.values() if "Tensor" in str(each.annotation)]
    assert not tensors or SHAPE_OR_TYPE.search(text), "which shapes and dtypes?"
