"""Escaping of untrusted text, such as from a device or a server, for terminals and logs."""

from __future__ import annotations

import logging
import traceback

__all__ = ["printable"]


def printable(text: str) -> str:
    """Returns the text on one line, with escapes such as `\\x1b` for control and invisible characters."""
    if text.isprintable():
        return text
    return "".join(item if item.isprintable() else item.encode("unicode_escape").decode("ascii") for item in text)


class PrintableRecords(logging.Filter):
    """Log filter of a handler. Makes each message one printable line, and traceback lines printable and indented.

    This prevents untrusted text from forging log records or sending control sequences to a terminal.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Escapes the record in place and returns True."""
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info and record.exc_info[1] is not None:
            lines = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n").split("\n")
            record.exc_text = "\n".join(f"    {printable(line)}" for line in lines)
        return True
