"""Encoding: from raw samples to token ids, labels, tile grids and, when asked for, uint8 tiles."""

from .config import EncodeConfig
from .sample import Encoded, Encoder, PlannedImage
from .tiles import TileGrid, plan_grid, tokens_per_tile

__all__ = ["EncodeConfig", "Encoded", "Encoder", "PlannedImage", "TileGrid", "plan_grid", "tokens_per_tile"]
