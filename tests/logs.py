"""What is logged, for tests to read."""

import logging


class LogLines(logging.Handler):
    """A handler that keeps the messages it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
