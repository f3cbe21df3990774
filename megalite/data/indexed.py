"""Indexed token files: one `.bin` of raw ids and one `.idx` that says where each sequence lies.

The layout is Megatron's, byte for byte, so that corpora move freely between the two programs:

    .idx   9 B magic | u64 version = 1 | u8 dtype code | u64 S | u64 D | i32 sizes[S] | i64 pointers[S] | i64
    documents[D]
           and for multimodal files i8 modes[S].   S sequences; D = documents + 1; sizes in tokens, pointers in bytes.

A *sequence* is what training draws from; a *document* is a run of sequences (usually one, possibly none). Everything is
little-endian. A damaged or foreign file is refused when it is opened, not in the middle of a run; the price is one pass
over the index, never over the tokens.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megalite.errors import DataError

__all__ = ["DTYPE_CODES", "IndexedDataset", "best_dtype"]

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<QBQQ")
DATA_OFFSET = len(MAGIC) + HEADER.size
DTYPE_CODES: dict[int, np.dtype] = {
    code: np.dtype(name) for code, name in enumerate(("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1)
}
_CHECK_ROWS = 1 << 22  # index rows validated at a time: bounds the temporary memory of opening a billion sequences


def best_dtype(max_id: int) -> np.dtype:
    """The narrowest dtype that the writer uses for ids up to `max_id`: uint16 up to 65535, int32 above.

    Raises DataError when `max_id` is negative or beyond int32.
    """
    if not 0 <= max_id <= np.iinfo(np.int32).max:
        raise DataError(f"the largest token id is {max_id}; ids must lie in [0, {np.iinfo(np.int32).max}]")
    return np.dtype("<u2") if max_id <= np.iinfo(np.uint16).max else np.dtype("<i4")


class IndexedDataset:
    """Read-only, memory-mapped view of `PREFIX.bin` and `PREFIX.idx`. Cheap to pickle: only the prefix travels.

    Attributes: `sizes` int32 [S] tokens per sequence; `pointers` int64 [S] byte offsets in .bin; `document_indices`
    int64 [D] first sequence of each document, ending with S; `modes` int8 [S] or None; `dtype` of the ids;
    `num_tokens`; `path_prefix`.

    Raises DataError when a file is missing, foreign, truncated, or inconsistent with the other one.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.path_prefix = os.fspath(prefix)
        self._index_path, self._bin_path = index_path(prefix), bin_path(prefix)
        index = _map_file(self._index_path)
        self.dtype, num_sequences, num_boundaries = self._read_header(index)
        self._read_arrays(index, num_sequences, num_boundaries)
        self._bin = _map_file(self._bin_path)
        self._check_documents()
        self._check_sequences()
        self.num_tokens = int(self.sizes.sum(dtype=np.int64))

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return type(self), (self.path_prefix,)

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sizes)

    def __getitem__(self, i: int) -> np.ndarray:
        """All ids of sequence `i`: a read-only view [size] of the file."""
        return self.get(i)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.get(i) for i in range(len(self)))

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """`length` ids (default: the rest) of sequence `i` from token `offset`: a read-only view [length] of the file.

        Raises IndexError when the sequence does not exist, DataError when it does not hold those tokens.
        """
        if not 0 <= i < len(self.sizes):
            raise IndexError(f"sequence {i} of {self.path_prefix}: it has {len(self.sizes)} sequences")
        size = int(self.sizes[i])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise DataError(f"{self._bin_path}: sequence {i} has {size} tokens, tokens {offset} to {offset + length} were asked for")
        start = int(self.pointers[i]) + offset * self.dtype.itemsize
        return self._bin[start : start + length * self.dtype.itemsize].view(self.dtype)

    def max_id(self) -> int:
        """The largest id in the data, found by reading all of it; -1 without tokens. Compare it with the vocabulary."""
        return max((int(ids.max()) for ids in self if len(ids)), default=-1)

    def _read_header(self, index: np.ndarray) -> tuple[np.dtype, int, int]:
        path = self._index_path
        if bytes(index[: len(MAGIC)]) != MAGIC:
            raise DataError(f"{path} is not an indexed dataset: it starts with {bytes(index[:9])!r}, not {MAGIC!r}")
        if len(index) < DATA_OFFSET:
            raise DataError(f"{path} is cut off: {len(index)} bytes, the header alone has {DATA_OFFSET}")
        version, code, num_sequences, num_boundaries = HEADER.unpack(index[len(MAGIC) : DATA_OFFSET].tobytes())
        if version != VERSION:
            raise DataError(f"{path} has format version {version}; this program reads version {VERSION}")
        if code not in DTYPE_CODES:
            raise DataError(f"{path} has dtype code {code}; known codes are {min(DTYPE_CODES)} to {max(DTYPE_CODES)}")
        return DTYPE_CODES[code], num_sequences, num_boundaries

    def _read_arrays(self, index: np.ndarray, num_sequences: int, num_boundaries: int) -> None:
        expected = DATA_OFFSET + 12 * num_sequences + 8 * num_boundaries
        if len(index) not in (expected, expected + num_sequences):
            raise DataError(
                f"{self._index_path} has {len(index)} bytes, but {num_sequences} sequences and {num_boundaries} "
                f"document boundaries need {expected} (or {expected + num_sequences} with modes)"
            )
        sizes_end = DATA_OFFSET + 4 * num_sequences
        pointers_end = sizes_end + 8 * num_sequences
        self.sizes = index[DATA_OFFSET:sizes_end].view("<i4")
        self.pointers = index[sizes_end:pointers_end].view("<i8")
        self.document_indices = index[pointers_end:expected].view("<i8")
        self.modes = index[expected:].view("i1") if len(index) > expected else None

    def _check_documents(self) -> None:
        bounds, num_sequences = self.document_indices, len(self.sizes)
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != num_sequences:
            found = "no document boundary" if len(bounds) == 0 else f"documents from {bounds[0]} to {bounds[-1]}"
            raise DataError(f"{self._index_path} has {found}; {num_sequences} sequences need 0 to {num_sequences}")
        for start in range(0, len(bounds), _CHECK_ROWS):
            part = bounds[start : start + _CHECK_ROWS + 1]
            if np.any(part[1:] < part[:-1]):
                bad = start + int(np.argmax(part[1:] < part[:-1]))
                raise DataError(
                    f"{self._index_path}: document {bad} starts at sequence {bounds[bad]} and ends before it, at {bounds[bad + 1]}"
                )

    def _check_sequences(self) -> None:
        num_bytes = len(self._bin)
        for start in range(0, len(self.sizes), _CHECK_ROWS):
            sizes, pointers = self.sizes[start : start + _CHECK_ROWS], self.pointers[start : start + _CHECK_ROWS]
            # The subtraction cannot overflow int64, an addition to a damaged pointer could.
            room = num_bytes - sizes.astype(np.int64) * self.dtype.itemsize
            bad = (sizes < 0) | (pointers < 0) | (pointers > room)
            if np.any(bad):
                i = start + int(np.argmax(bad))
                raise DataError(
                    f"{self._index_path}: sequence {i} has {self.sizes[i]} tokens of {self.dtype.itemsize} bytes at "
                    f"byte {self.pointers[i]}, but {self._bin_path} has {num_bytes} bytes; the pair does not belong "
                    "together or was cut off: write it again"
                )


def index_path(prefix: str | os.PathLike[str]) -> Path:
    """`PREFIX.idx`."""
    return Path(f"{os.fspath(prefix)}.idx")


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    """`PREFIX.bin`."""
    return Path(f"{os.fspath(prefix)}.bin")


def _map_file(path: Path) -> np.ndarray:
    """The file's bytes as a read-only uint8 array, mapped; an empty file cannot be mapped and gives an empty array."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return np.empty(0, dtype=np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise DataError(
            f"cannot read {path}: {reason}; a dataset prefix names two files, .idx and .bin, "
            "which tools/preprocess_data.py writes as PREFIX_text_document"
        ) from error
