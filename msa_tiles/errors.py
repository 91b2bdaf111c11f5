"""Errors that commands report in one line, kept apart so that naming them imports nothing."""


class ToolError(RuntimeError):
    """A tool outside this package is missing or failed; the message says which one and what to do."""
