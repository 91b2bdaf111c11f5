"""A real text and its tokens, without downloading anything."""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from msa_tiles.names import counted

# One token is a word, a number, one sign, or one character of a script that is written without spaces.
_TOKEN = re.compile(r"[぀-ヿ㐀-䶿一-鿿가-힯]|[^\W\d_぀-ヿ㐀-䶿一-鿿가-힯]+|\d+|_|[^\w\s]")


@dataclass(frozen=True)
class Text:
    """A tokenised text: `words[i]` is what token `ids[i]` looks like."""

    source: str
    words: list[str]
    ids: list[int]
    vocabulary: list[str]


def tokenise(text: str, source: str, limit: int | None = None) -> Text:
    """Split `text` into at most `limit` tokens; ids are handed out in order of appearance, letter case ignored."""
    words: list[str] = []
    ids: list[int] = []
    number: dict[str, int] = {}
    for match in _TOKEN.finditer(text):
        if limit is not None and len(words) >= limit:
            break
        word = match.group()
        words.append(word)
        ids.append(number.setdefault(word.casefold(), len(number)))
    return Text(source, words, ids, list(number))


def default_text(tokens: int) -> tuple[str, str]:
    """`(text, where it comes from)`: Python's reference topics, then standard library sources for what is missing."""
    parts: list[str] = []
    sources: list[str] = []
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions ship Python without its documentation
        pass
    else:
        parts.append("\n\n".join(topics.topics.values()))
        sources.append("pydoc_data.topics")
    # A token is at least one character, so the first tokens * 8 characters hold enough of them in nearly every text.
    missing = tokens * 8 - sum(map(len, parts))
    if missing > 0:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        for file in files:
            parts.append(file.read_text(encoding="utf-8", errors="replace"))
            missing -= len(parts[-1])
            if missing <= 0:
                break
        sources.append("sources of the standard library")
    return "\n\n".join(parts), " and ".join(sources)


def load(path: Path | None, tokens: int) -> Text:
    """The first `tokens` tokens of the file at `path`, or of the default text.

    Raises ValueError when the file cannot be read, or when there would be less than `MINIMUM_TOKENS` tokens.
    """
    if tokens < MINIMUM_TOKENS:
        raise ValueError(f"--tokens: {tokens}, wanted at least {MINIMUM_TOKENS}, or every query could see every block")
    if path is None:
        content, source = default_text(tokens)
    else:
        try:
            content = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise ValueError(f"--text: cannot read {path}: {error.strerror}") from error
        source = str(path)
    text = tokenise(content, source, tokens)
    if len(text.ids) < MINIMUM_TOKENS:
        raise ValueError(
            f"--text: {source} holds {counted(len(text.ids), 'token')}; the demo wants at least {MINIMUM_TOKENS}, "
            "so that there is something far back to ask for"
        )
    return text


def refuse_runaway(text: Text, gpu: bool) -> None:
    """Raise ValueError for a text that would keep the device busy for hours: time grows with the square of it."""
    most = MOST_TOKENS[gpu]
    if len(text.ids) > most:
        where = "a GPU" if gpu else "a CPU, where that takes a quarter of an hour"
        raise ValueError(f"--tokens: {len(text.ids):,} of {text.source}, wanted at most {most:,} on {where}")


# Sixteen blocks of 128: below that, every query could select every block and nothing would be shown.
MINIMUM_TOKENS = 2048
MOST_TOKENS = {False: 1 << 16, True: 1 << 20}
"""Without and with a GPU."""
