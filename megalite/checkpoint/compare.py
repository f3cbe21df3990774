"""Which logical tensors of two checkpoints differ, and by how much; and whether one checkpoint is what was written.

Decisions
- Names, shapes and dtypes come from the manifests; where both have equal hashes the tensors are equal and are not read.
- Other tensors are read one by one and compared in fp64, so memory is bounded by two tensors.
- Equal means equal bits. A NaN on one side only is an infinite difference.
- A relative difference is that of the whole tensor: the largest difference over the largest magnitude. Relative differences of single
  elements say nothing about elements near 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megalite.checkpoint.files import check_contents
from megalite.checkpoint.hashes import hash_of
from megalite.checkpoint.reading import TensorReader
from megalite.errors import CheckpointError
from megalite.grid import Axis

__all__ = ["Contents", "Difference", "Verdict", "compare_tensors", "differences", "verify_checkpoint"]

_PIECE = 1 << 18  # elements compared at a time


@dataclass(frozen=True, kw_only=True)
class Contents:
    """How far two tensors of one shape are apart. max_abs; max_relative: over the largest magnitude; num_elements that differ."""

    max_abs: float
    max_relative: float
    num_elements: int


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One logical tensor that is not the same in A and B.

    kind: "missing" (in A only), "extra" (in B only), "shape", "dtype" or "content". text: the two facts. contents: where both shapes are
    equal.
    """

    name: str
    kind: Literal["missing", "extra", "shape", "dtype", "content"]
    text: str
    contents: Contents | None = None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What `verify_checkpoint` found. problems: a sentence each; num_hashed: tensors whose content was compared with its hash."""

    problems: list[str]
    num_tensors: int = 0
    num_hashed: int = 0


def differences(a: TensorReader, b: TensorReader, *, prefix: str = "", trust_hashes: bool = True) -> Iterator[Difference]:
    """All differences in names that begin with `prefix`, in the order of the layers. Raises CheckpointError for what cannot be read."""
    of_a, of_b = a.manifest.tensors, b.manifest.tensors
    for name in sorted(of_a.keys() | of_b.keys(), key=_natural):
        if not name.startswith(prefix):
            continue
        if name not in of_b:
            yield Difference(name=name, kind="missing", text=f"only in {a.checkpoint}")
        elif name not in of_a:
            yield Difference(name=name, kind="extra", text=f"only in {b.checkpoint}")
        else:
            found = _difference(name, a, b, trust_hashes)
            if found is not None:
                yield found


def _difference(name: str, a: TensorReader, b: TensorReader, trust_hashes: bool) -> Difference | None:
    left, right = a.manifest.tensors[name], b.manifest.tensors[name]
    if left["shape"] != right["shape"]:
        return Difference(name=name, kind="shape", text=f"{left['shape']} and {right['shape']}")
    same_dtype = left["dtype"] == right["dtype"]
    if trust_hashes and same_dtype and left.get("hash") is not None and left.get("hash") == right.get("hash"):
        return None
    contents = compare_tensors(a.read(name), b.read(name))
    if not same_dtype:
        return Difference(name=name, kind="dtype", text=f"{left['dtype']} and {right['dtype']}", contents=contents)
    return Difference(name=name, kind="content", text="", contents=contents) if contents.num_elements else None


def compare_tensors(a: Tensor, b: Tensor) -> Contents:
    """Of two tensors of one shape and any dtypes."""
    max_abs, magnitude, num_elements = 0.0, 0.0, 0
    for left, right in zip(a.flatten().split(_PIECE), b.flatten().split(_PIECE), strict=True):
        is_same = _equal_bits(left, right) if left.dtype == right.dtype else None
        if is_same is not None and bool(is_same.all()):
            magnitude = max(magnitude, _largest(left.double()))
            continue
        left, right = left.double(), right.double()
        both_nan = left.isnan() & right.isnan()
        is_same = (left == right) | both_nan if is_same is None else is_same
        num_elements += int(left.numel() - is_same.sum())
        apart = (left - right).abs().masked_fill(is_same | both_nan, 0.0).nan_to_num(nan=torch.inf, posinf=torch.inf)
        max_abs = max(max_abs, float(apart.max()))
        magnitude = max(magnitude, _largest(left), _largest(right))
    relative = max_abs / magnitude if magnitude > 0 else (torch.inf if max_abs > 0 else 0.0)
    return Contents(max_abs=max_abs, max_relative=relative, num_elements=num_elements)


def _largest(values: Tensor) -> float:
    """The largest finite magnitude."""
    return float(values.abs().nan_to_num(nan=0.0, posinf=0.0).max()) if values.numel() else 0.0


def _equal_bits(a: Tensor, b: Tensor) -> Tensor:
    """Per element."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(kind) == b.contiguous().view(kind)


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Layer 10 comes after layer 9."""
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", name)]


def verify_checkpoint(checkpoint: Path, *, files_only: bool = False) -> Verdict:
    """Compare files with the manifest and, unless files_only, read every tensor and compare it with its hash."""
    try:
        reader = TensorReader(checkpoint)
        check_contents(checkpoint, reader.manifest.files, Axis.single("world"))
    except CheckpointError as error:
        return Verdict(problems=[str(error)])
    tables = reader.manifest.tensors
    problems = _table_problems(tables, reader.stored)
    if files_only or problems:
        return Verdict(problems=problems, num_tensors=len(tables))
    num_hashed = 0
    for name in sorted(tables, key=_natural):
        try:
            tensor = reader.read(name)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        wanted = tables[name].get("hash")
        if wanted is None:
            continue
        num_hashed += 1
        found = hash_of(tensor)
        if found != wanted:
            problems.append(f"{name} has the content hash {found}, the manifest says {wanted}")
    return Verdict(problems=problems, num_tensors=len(tables), num_hashed=num_hashed)


def _table_problems(manifest: Mapping[str, Mapping[str, Any]], stored: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where the manifest and the checkpoint library disagree about what there is."""
    found = [f"{name} is in the manifest, but not stored" for name in sorted(manifest.keys() - stored.keys())]
    found += [f"{name} is stored, but not in the manifest" for name in sorted(stored.keys() - manifest.keys())]
    for name in sorted(manifest.keys() & stored.keys()):
        for fact in ("shape", "dtype"):
            if manifest[name][fact] != stored[name][fact]:
                found.append(f"{name}: {fact} {manifest[name][fact]} in the manifest, {stored[name][fact]} stored")
    return found
