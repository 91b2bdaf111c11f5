"""The specs in use as far as they can be read: a mistake in those of a tree breaks nothing but what it is about."""

from __future__ import annotations

import logging

from msa_tiles import paths, trees
from msa_tiles.spec import SpecError, Specs, load

_log = logging.getLogger(__name__)
_told: set[str] = set()


def specs() -> Specs:
    """The shipped specs, with what the trees in use extend or replace.

    Trees whose specs have mistakes are passed over: a warning in the log tells each once.
    """
    found, mistaken = readable()
    for tree, error in mistaken.items():
        if (sentence := told(tree, error)) not in _told:
            _log.warning("%s", sentence)
            _told.add(sentence)
    return found


def mistakes() -> list[str]:
    """Sentences about trees in use whose specs have mistakes, which whoever asks tells: the log does not then."""
    sentences = [told(tree, error) for tree, error in readable()[1].items()]
    _told.update(sentences)
    return sentences


def readable() -> tuple[Specs, dict[trees.Tree, SpecError]]:
    """The specs, and the mistakes of each tree that is passed over. Raises SpecError for those that are shipped."""
    try:
        return load(*trees.specs_dirs()), {}
    except SpecError:
        pass
    folders, mistaken = [paths.specs_dir()], {}
    found = load(*folders)
    for tree in reversed(trees.present()):
        if tree.specs.is_dir():
            try:
                found = load(*folders, tree.specs)
            except SpecError as error:
                mistaken[tree] = error
            else:
                folders.append(tree.specs)
    return found, mistaken


def told(tree: trees.Tree, error: SpecError) -> str:
    """The sentence about a tree whose specs have mistakes, or inherit from what is not there."""
    return (
        f"the specs of {tree.directory} cannot be read, and its kernels are as they were until "
        f"`msa-tiles generate --tree {tree.directory}`:\n{error}"
    )
