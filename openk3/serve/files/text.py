"""The text of an uploaded file, for whoever asks for it over HTTP or searches in it."""

from __future__ import annotations

from openk3.documents.text import MAX_BYTES, Document, read_document
from openk3.serve.errors import ApiError, shown
from openk3.serve.files.store import FileStore, StoredFile


def read_file(files: FileStore, file: StoredFile, param: str) -> Document:
    """The text of a stored file. May take seconds; not for the event loop's thread.

    Raises:
        ApiError: 400, it cannot be read; 404, it was deleted just now.
    """
    try:
        if file.bytes > MAX_BYTES:  # before so much is read
            raise ValueError(f"{file.filename}: it has {file.bytes >> 20} MB; at most {MAX_BYTES >> 20} MB are read")
        return read_document(file.filename, files.path(file).read_bytes())
    except FileNotFoundError:
        raise ApiError(404, f"No such file: {shown(file.id)}.", param=param, code="file_not_found") from None
    except ValueError as error:
        raise ApiError(400, f"Invalid '{param}': {error}.", param=param, code="unreadable_file") from None
