"""Writes `docs/api.md` from the docstrings of what is public: `python docs/make_api.py [--check]`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).with_name("api.md")
WIDTH = 110
HEAD = """# API reference

<!-- written by docs/make_api.py -->

What is public, by module; the text is that of the docstrings. Shapes are in brackets, with these letters: T query
tokens and Tk key tokens of all requests, packed one after another; B requests; Hq query heads, Hkv KV heads, Hi index
heads; D and Di head dims; k or topk selected blocks. Where a letter stands for something else, the text says so.
"""
# Of the package itself, which loads nothing before it is asked to, there is no __all__.
PACKAGE = ("explain", "Explanation", "use_tree", "use_pack")
# Names of the package that are told where they are at home.
SAYS_MORE = {"explain": "msa_tiles.explaining"}


def modules() -> list[ModuleType]:
    """The modules of the page, in its order; a drop-in is one that says what is public in it."""
    names = ["msa_tiles", "msa_tiles.ops", "msa_tiles.nn", "msa_tiles.quant"]
    compat = importlib.import_module("msa_tiles.compat")
    found = [importlib.import_module(name) for name in names]
    for part in sorted(pkgutil.iter_modules(compat.__path__), key=lambda part: part.name):
        module = importlib.import_module(f"msa_tiles.compat.{part.name}")
        if hasattr(module, "__all__"):
            found.append(module)
    return found


def public(module: ModuleType) -> list[str]:
    """The names of a module that belong on the page."""
    return list(PACKAGE if module.__name__ == "msa_tiles" else module.__all__)


def thing_of(module: ModuleType, name: str) -> Any:
    """What a name of the page stands for."""
    home = SAYS_MORE.get(name) if module.__name__ == "msa_tiles" else None
    return getattr(importlib.import_module(home) if home else module, name)


def text_of(thing: Any) -> str:
    """The docstring as Markdown."""
    return re.sub(r"``(.+?)``", r"`\1`", inspect.cleandoc(thing.__doc__ or ""), flags=re.DOTALL)


def annotation(kind: Any) -> str:
    text = getattr(kind, "__forward_arg__", kind)
    return text if isinstance(text, str) else inspect.formatannotation(kind)


def spelled(parameter: inspect.Parameter) -> str:
    """A parameter as one writes it."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{kind}"
    return f"{stars}{parameter.name}{kind}{' = ' if kind else '='}{parameter.default!r}"


def signature_of(name: str, function: Any, method: bool = False) -> str:
    """A code block with the signature, wrapped."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[1 if method else 0 :]
    words, starred = [], False
    for place, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        words.append(spelled(parameter))
        following = parameters[place + 1].kind if place + 1 < len(parameters) else None
        if parameter.kind is parameter.POSITIONAL_ONLY and following is not parameter.POSITIONAL_ONLY:
            words.append("/")
    result = signature.return_annotation
    end = ")" if result in (signature.empty, None, "None") else f") -> {annotation(result)}"
    line = f"{name}({', '.join(words)}{end}"
    if len(line) > WIDTH:
        # Blanks inside a parameter stay together.
        inside = textwrap.fill(", ".join(word.replace(" ", "\0") for word in words), WIDTH - 4).replace("\0", " ")
        line = f"{name}(\n{textwrap.indent(inside, '    ')},\n{end}"
    return f"```py\n{line}\n```"


def members_of(name: str, cls: type) -> Iterator[str]:
    """Public methods and properties that the class itself defines, and what they say."""
    for member_name, member in vars(cls).items():
        if member_name.startswith("_") or not member.__doc__:
            continue
        if isinstance(member, property):
            yield f"`{name}.{member_name}`: {text_of(member)}"
        elif isinstance(member, (staticmethod, classmethod)) or inspect.isfunction(member):
            function = getattr(member, "__func__", member)
            yield signature_of(f"{name}.{member_name}", function, method=not isinstance(member, staticmethod))
            yield text_of(function)


def section(name: str, thing: Any) -> Iterator[str]:
    """What the page says of one name."""
    yield f"### {name}"
    if inspect.isclass(thing):
        yield signature_of(name, thing)
        yield text_of(thing)
        own = vars(thing).get("__init__")
        if own is not None and own.__doc__ and inspect.isfunction(own) and own.__module__ == thing.__module__:
            yield text_of(own)
        yield from members_of(name, thing)
    elif not callable(thing):
        yield f"`{thing!r}`"
    elif thing.__name__ != name:
        yield f"Another name of `{thing.__name__}`."
    else:
        yield signature_of(name, thing)
        yield text_of(thing)


def page() -> str:
    """The whole page."""
    parts, contents = [], []
    for module in modules():
        names = public(module)
        anchor = module.__name__.replace(".", "")
        contents.append(f"- [`{module.__name__}`](#{anchor}): {', '.join(f'`{name}`' for name in names)}")
        parts += [f"## {module.__name__}", text_of(module)]
        for name in names:
            parts += section(name, thing_of(module, name))
    return "\n\n".join([HEAD.strip(), "\n".join(contents), *(part for part in parts if part)]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is not up to date")
    if not parser.parse_args(arguments).check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write(f"{PAGE} is not what the docstrings say: run python docs/make_api.py\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
