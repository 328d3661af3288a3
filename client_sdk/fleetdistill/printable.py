"""Text that somebody else chose, such as a device or a server, made safe for a terminal and a log."""

from __future__ import annotations

import logging
import traceback


def printable(text: str) -> str:
    """The text on one line, with an escape such as `\\x1b` for each character that a terminal obeys or hides."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


class PrintableRecords(logging.Filter):
    """For a handler: each record's message is one printable line, the lines of a traceback are printable and indented.

    So nothing that a device sends can look like a record of its own, or reach the terminal as a control sequence.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record; always True."""
        record.msg, record.args = printable(record.getMessage()), ()
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = "\n".join(f"    {printable(line)}" for line in _lines(record.exc_info[1]))
        return True


def _lines(error: BaseException) -> list[str]:
    return "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
