"""A multipart form with one file in it, whose bytes go to the disk as they arrive; at no time is the file in memory."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from openk3.serve.errors import ApiError, shown
from openk3.serve.files.store import FileWriter

# Fields beside the file are words and numbers.
_MAX_FIELD_BYTES = 4096
_MAX_FIELDS = 16
_MAX_FILENAME = 255


class FormReader:
    """Reads a form: `fields` by name, the file's `filename` (None if there was none), and its bytes into `writer`."""

    def __init__(self, content_type: str, writer: FileWriter) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise ApiError(
                415,
                f"Unsupported content type {shown(content_type)}; send the file as 'multipart/form-data'.",
                code="unsupported_content_type",
            )
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._writer = writer
        self._complete = False
        self._header: tuple[bytes, bytes] = (b"", b"")
        self._disposition = b""
        self._field: str | None = None  # the one being read; None: the file
        self._value = b""
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._name_part,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """
        Raises:
            ApiError: 400 for what is no complete form; 507 if the disk is full.
        """
        try:
            async for chunk in chunks:
                await asyncio.to_thread(self._parser.write, chunk)
            self._parser.finalize()
        except FormParserError as error:
            raise _bad_form(str(error)) from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ApiError(
                    507, "The server's disk is full; delete files and try again.", code="disk_full"
                ) from None
            raise
        if not self._complete:
            raise _bad_form("it ends before its last boundary")

    def _begin_part(self) -> None:
        self._disposition, self._value = b"", b""

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0] + data[start:end], self._header[1])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _end_header(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = value
        self._header = (b"", b"")

    def _name_part(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "file" and b"filename" in options:
            if self.filename is not None:
                raise ApiError(400, "Invalid 'file': give one file in a request.", param="file", code="invalid_value")
            self.filename = plain_filename(options[b"filename"].decode("utf-8", "replace"))
            self._field = None
        elif not name or name in self.fields or len(self.fields) >= _MAX_FIELDS:
            raise _bad_form(f"the field {shown(name)} is repeated, or has no name, or there are too many")
        else:
            self._field = name

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._writer.write(data[start:end])
        elif len(self._value) + end - start > _MAX_FIELD_BYTES:
            what = "a file needs a filename" if self._field == "file" else f"at most {_MAX_FIELD_BYTES:,} bytes"
            raise ApiError(
                400,
                f"Invalid '{self._field}': the value is too long ({what}).",
                param=self._field,
                code="string_above_max_length",
            )
        else:
            self._value += data[start:end]

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = self._value.decode("utf-8", "replace")

    def _end(self) -> None:
        self._complete = True


def plain_filename(name: str) -> str:
    """The last part of a path from any system, without control characters, no longer than file systems allow."""
    last = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[\x00-\x1f\x7f]", "", last).strip()[:_MAX_FILENAME] or "file"


def _bad_form(why: str) -> ApiError:
    return ApiError(400, f"The request body is not a valid multipart form: {why}.", code="invalid_form")
