"""Streaming writer of the indexed token files that `indexed.py` describes.

Ids go straight to disk; memory holds four bytes per sequence and eight per document, whatever the corpus weighs.
Nothing has its final name until all of it is on disk: the files are written under temporary names, flushed, and renamed
with the `.idx` last, so a crash leaves either the old dataset, none, or the new one. What a killed writer left under
temporary names is removed by the next writer of that dataset: a living one holds a lock on its file. Every id is
checked against the dtype: a wrapped id would be a valid id of another token, and nobody would ever notice.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import os
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from megalite.data.dataset_meta import meta_path
from megalite.data.indexed import DTYPE_CODES, HEADER, MAGIC, VERSION, IndexedDataset, bin_path, index_path
from megalite.errors import DataError

__all__ = ["IndexedDatasetWriter", "is_packed"]

Ids = Sequence[int] | np.ndarray
_MAX_SEQUENCE_TOKENS = np.iinfo(np.int32).max
_COPY_BYTES = 1 << 22


class IndexedDatasetWriter:
    """Context manager that writes `PREFIX.bin` and `PREFIX.idx`; leaving it with an exception removes what was written.

    Raises DataError when `dtype` is not one of the format's, when an id does not fit it, or when nothing was written.

        with IndexedDatasetWriter("corpus", np.uint16) as writer:
            writer.add_document([5, 6, 7, 0])
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: np.dtype | type | str) -> None:
        self.path_prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPE_CODES.values():
            known = ", ".join(known.name for known in DTYPE_CODES.values())
            raise DataError(f"{self.path_prefix}: ids cannot be stored as {self.dtype.name}; use one of {known}")
        self._sizes, self._documents = array("i"), array("q", [0])
        self._num_tokens = 0
        suffix = f".tmp.{os.getpid()}"
        self._temporary_bin = Path(f"{bin_path(prefix)}{suffix}")
        self._temporary_index = Path(f"{index_path(prefix)}{suffix}")
        self._temporary_bin.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(prefix)
        self._file = self._temporary_bin.open("wb")
        with suppress(OSError):  # a file system without locks: then left-overs stay
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._digest = hashlib.sha256()

    @property
    def num_documents(self) -> int:
        """Documents ended so far, empty ones included."""
        return len(self._documents) - 1

    @property
    def num_sequences(self) -> int:
        """Sequences written so far."""
        return len(self._sizes)

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return self._num_tokens

    @property
    def bin_sha256(self) -> str:
        """The digest of all ids written so far, which is that of the .bin file in the end."""
        return self._digest.hexdigest()

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finalize()
        else:
            self.abort()

    def add_sequence(self, ids: Ids) -> None:
        """Append one sequence to the open document. Raises DataError when an id does not fit the dtype."""
        _check_length(len(ids))
        tokens = self._checked(ids)
        self._write(tokens)
        self._sizes.append(len(tokens))
        self._num_tokens += len(tokens)

    def end_document(self) -> None:
        """Close the open document; one without sequences is legal and stays visible in the document index."""
        self._documents.append(len(self._sizes))

    def add_document(self, ids: Ids) -> None:
        """Append a document of one sequence, or of none when `ids` is empty. Raises like `add_sequence`."""
        if len(ids):
            self.add_sequence(ids)
        self.end_document()

    def add_documents(self, tokens: np.ndarray, sequence_lengths: np.ndarray, sequences_per_document: np.ndarray) -> None:
        """Append many documents at once: all `tokens` [T], the tokens of each sequence [S], the sequences of each document [D].

        Raises like `add_sequence`.
        """
        assert len(tokens) == sequence_lengths.sum() and len(sequence_lengths) == sequences_per_document.sum()
        self._check_no_open_document()
        _check_length(int(sequence_lengths.max(initial=0)))
        self._write(self._checked(tokens))
        ends = np.cumsum(sequences_per_document, dtype=np.int64) + len(self._sizes)
        self._sizes.frombytes(sequence_lengths.astype(np.int32).tobytes())
        self._documents.frombytes(ends.tobytes())
        self._num_tokens += len(tokens)

    def add_index(self, prefix: str | os.PathLike[str]) -> None:
        """Append a whole dataset, as if its documents had been added one by one; streams, never holds its tokens.

        Raises DataError when its dtype differs, when it has modes, or while a document is open.
        """
        other = IndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                f"cannot append {other.path_prefix} with {other.dtype.name} ids to {self.path_prefix} with "
                f"{self.dtype.name} ids: write one of them again with the other's dtype"
            )
        if other.modes is not None:
            raise DataError(f"cannot append {other.path_prefix}: it has sequence modes, which this writer would drop")
        self._check_no_open_document()
        self._copy_tokens(other)
        # Large arrays are appended as bytes: as Python integers they would take eight times the memory.
        self._documents.frombytes((other.document_indices[1:] + len(self._sizes)).tobytes())
        self._sizes.frombytes(other.sizes.tobytes())
        self._num_tokens += other.num_tokens

    def finalize(self) -> None:
        """`prepare` and `publish`; on an exception nothing remains on disk."""
        try:
            self.prepare()
            self.publish()
        except BaseException:
            self.abort()
            raise

    def prepare(self) -> None:
        """Write the index and flush both files to disk, still under their temporary names.

        Raises DataError when no token was added or a document was left open.
        """
        self._check_no_open_document()
        if self._num_tokens == 0:
            raise DataError(f"{self.path_prefix}: {self.num_documents} documents and no token: nothing to write")
        self._write_files()

    def publish(self) -> None:
        """Give both prepared files their names."""
        # Readers must never pair the new .bin with an old .idx, so that one goes first and the new one comes last.
        index_path(self.path_prefix).unlink(missing_ok=True)
        os.replace(self._temporary_bin, bin_path(self.path_prefix))
        os.replace(self._temporary_index, index_path(self.path_prefix))
        _sync_folder(self._temporary_bin.parent)
        self._file.close()

    def abort(self) -> None:
        """Remove everything written so far."""
        self._file.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_index.unlink(missing_ok=True)

    def _checked(self, ids: Ids) -> np.ndarray:
        """`ids` in the file's dtype, after proof that the conversion keeps every value."""
        where = f"{self.path_prefix}: document {self.num_documents}"
        try:
            values = np.asarray(ids) if len(ids) else np.empty(0, dtype=self.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(f"{where}: the ids are not a list of numbers: {error}") from error
        if values.ndim != 1 or values.dtype.kind not in ("fiu" if self.dtype.kind == "f" else "iu"):
            raise DataError(f"{where}: ids must be a list of whole numbers, not {values.dtype} {list(values.shape)}")
        if self.dtype.kind != "f" and len(values):
            low, high, limits = int(values.min()), int(values.max()), np.iinfo(self.dtype.name)
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{where}: token ids from {low} to {high} do not fit {self.dtype.name} ({limits.min} to "
                    f"{limits.max}); choose the dtype by the largest id of the tokenizer"
                )
        return values.astype(self.dtype, copy=False)

    def _check_no_open_document(self) -> None:
        num_open = len(self._sizes) - self._documents[-1]
        if num_open:
            raise DataError(f"{self.path_prefix}: {num_open} sequences were added without a call of end_document")

    def _write(self, tokens: np.ndarray) -> None:
        self._digest.update(tokens.data if tokens.flags.c_contiguous else tokens.tobytes())
        self._file.write(tokens.tobytes())

    def _copy_tokens(self, other: IndexedDataset) -> None:
        if not is_packed(other):
            for ids in other:
                self._write(ids)
            return
        with bin_path(other.path_prefix).open("rb") as source:
            while block := source.read(_COPY_BYTES):
                self._digest.update(block)
                self._file.write(block)

    def _write_files(self) -> None:
        sizes = np.frombuffer(self._sizes, dtype="<i4")
        pointers = np.zeros(len(sizes), dtype="<i8")
        pointers[1:] = sizes[:-1]
        np.cumsum(pointers, out=pointers)  # adding in int64 from the start: a cumsum that also converts takes ten times as long
        assert int(pointers[-1]) + int(sizes[-1]) == self._num_tokens, "the index does not cover the tokens written"
        pointers *= self.dtype.itemsize
        _sync_file(self._file)
        assert self._file.tell() == self._num_tokens * self.dtype.itemsize, "the .bin file has another length"
        code = next(code for code, known in DTYPE_CODES.items() if known == self.dtype)
        with self._temporary_index.open("wb") as file:
            file.write(MAGIC + HEADER.pack(VERSION, code, len(sizes), len(self._documents)))
            for values in (sizes, pointers, np.frombuffer(self._documents, dtype="<i8")):
                file.write(values.data)
            _sync_file(file)


def _check_length(num_tokens: int) -> None:
    if num_tokens > _MAX_SEQUENCE_TOKENS:
        raise DataError(f"a sequence of {num_tokens} tokens: the format holds up to {_MAX_SEQUENCE_TOKENS}; cut it")


def is_packed(dataset: IndexedDataset) -> bool:
    """Whether the .bin file is exactly the sequences, in order, without gaps."""
    itemsize = dataset.dtype.itemsize
    if bin_path(dataset.path_prefix).stat().st_size != dataset.num_tokens * itemsize:
        return False
    ends = np.cumsum(dataset.sizes.astype(np.int64)) * itemsize
    return len(ends) == 0 or bool(dataset.pointers[0] == 0 and np.array_equal(dataset.pointers[1:], ends[:-1]))


def _remove_leftovers(prefix: str | os.PathLike[str]) -> None:
    """Remove the temporary files of writers that are gone; a living one holds the lock of its .bin, renamed or not."""
    for path in map(Path, glob.glob(f"{glob.escape(os.fspath(prefix))}.*.tmp.*")):
        final, _, writer = str(path).rpartition(".tmp.")
        if final not in map(str, (bin_path(prefix), index_path(prefix), meta_path(prefix))):
            continue  # another dataset, whose name begins with this one's
        temporary = Path(f"{bin_path(prefix)}.tmp.{writer}")
        if not _is_locked(temporary if temporary.exists() else bin_path(prefix)):
            path.unlink(missing_ok=True)


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # its writer lives, or this file system has no locks
        return True
    return False


def _sync_file(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
