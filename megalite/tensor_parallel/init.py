"""Initial values as a function of (seed, logical parameter name, global index), never of the rank or the layout.

Decisions
- A matrix is thought of as tiles of 64 x 256. Each tile has its own stream of a counter-based generator (Philox): the
  key is a hash of seed and name, the counter begins at the tile's place. A rank makes the tiles that its share touches
  and cuts out what it owns, so memory is bounded by one tile and no rank makes the whole matrix to keep a slice.
- Tiles are always made whole: the values of a row do not change when the matrix grows.
- Numbers are made on the CPU in fp32, so that CPU and GPU runs start from the same model.
- Rows that pad the vocabulary are 0.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.tensor_parallel.parameter import ParameterInfo, logical_name, named_parameter_info

__all__ = ["init_module_", "init_parameter_"]

TILE = (64, 256)  # changing it changes every initial model


def init_module_(module: nn.Module, prefix: str, seed: int) -> None:
    """Give all parameters of `module` their initial values; `prefix` is its own dotted name followed by "." (or "")."""
    infos = named_parameter_info(module)
    for name, parameter in module.named_parameters():
        init_parameter_(logical_name(prefix + name, infos[name]), parameter, infos[name], seed)


@torch.no_grad()
def init_parameter_(name: str, parameter: Tensor, info: ParameterInfo, seed: int) -> None:
    """Give `parameter`, plain or cut over tp, the initial values that belong to its logical `name`."""
    local, offset = _local_and_offset(parameter)
    assert not local.is_meta, f"{name} has no storage yet"
    if info.init == "ones":
        local.fill_(1.0)
    elif info.init == "zeros":
        local.zero_()
    else:
        _fill_normal_(local, offset, info.std, _key(seed, name))
    if info.valid_rows is not None:
        local[max(0, info.valid_rows - offset[0]) :].zero_()


def _local_and_offset(parameter: Tensor) -> tuple[Tensor, list[int]]:
    """This rank's share and the global index of its first element."""
    offset = [0] * parameter.ndim
    if not isinstance(parameter, DTensor):
        return parameter, offset
    assert parameter.device_mesh.ndim == 1, "parameters are initialised before data parallelism wraps them"
    local, placement = parameter.to_local(), parameter.placements[0]
    if placement.is_shard():
        dim = placement.dim  # type: ignore[attr-defined]
        offset[dim] = parameter.device_mesh.get_local_rank() * local.shape[dim]
    return local, offset


def _key(seed: int, name: str) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<u8")


def _fill_normal_(local: Tensor, offset: list[int], std: float, key: np.ndarray) -> None:
    assert local.ndim == 2, "only matrices have random initial values"
    for row_tile, local_rows, tile_rows in _cuts(offset[0], local.shape[0], TILE[0]):
        for column_tile, local_columns, tile_columns in _cuts(offset[1], local.shape[1], TILE[1]):
            tile = torch.from_numpy(_tile(key, row_tile, column_tile))[tile_rows, tile_columns]
            local[local_rows, local_columns] = (tile * std).to(local.device, local.dtype)


def _tile(key: np.ndarray, row_tile: int, column_tile: int) -> np.ndarray:
    # the two low words of the counter run inside the tile
    counter = np.array([0, 0, column_tile, row_tile], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).standard_normal(TILE, dtype=np.float32)


def _cuts(start: int, length: int, tile: int) -> list[tuple[int, slice, slice]]:
    """The tiles that [start, start + length) touches: (number, slice of the local range, slice of the tile)."""
    cuts = []
    for number in range(start // tile, -(-(start + length) // tile)):
        low, high = max(start, number * tile), min(start + length, (number + 1) * tile)
        cuts.append((number, slice(low - start, high - start), slice(low - number * tile, high - number * tile)))
    return cuts
