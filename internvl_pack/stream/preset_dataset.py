"""`PresetDataset`: a `PackedDataset` whose sequence of packs was written down before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..config import PackingConfig
from ..encode.config import EncodeConfig
from ..encode.sample import Encoder
from ..order.mixture import Mixture
from ..plan.preset import Preset, PresetPacks
from ..plan.sequence import PackSequence
from ..samples import Samples
from ..survey.table import root_of
from .dataset import PackedDataset
from .reader import SampleSegments, SegmentSource
from .stored import StoredSegments


class PresetDataset(PackedDataset):
    """Packs of a preset; use it as a `PackedDataset`, with `build_loader`.

    The epochs that were planned run as planned; later ones repeat them in turn, their packs in another order.

    Args:
        preset: the folder that `internvl-pack plan` wrote, or what was read of it.
        samples: the data that it was planned for; without sources (`Samples.of((), encoder)`) its own.
        config: the run's options; None takes all from the preset. Budgets and the like must be the preset's.
        rank, world_size: as `PackedDataset` takes them.

    Raises:
        UserError: the preset does not fit the data, the tokenizer or the options any more; names what changed.
    """

    preset: Preset

    def __init__(
        self,
        preset: Preset | str | Path,
        samples: Samples,
        config: PackingConfig | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.preset = preset if isinstance(preset, Preset) else Preset(preset)
        config = self.preset.config(config)
        samples = samples.joined(config, root_of(config.survey_dir))
        self.preset.check_fits(samples)
        super().__init__(samples, config=config, rank=rank, world_size=world_size)
        self.segment_source(0)  # refuses a preset that has no data either

    @classmethod
    def open(
        cls,
        preset: str | Path,
        meta_path: str | Path | None,
        tokenizer: Any,
        config: PackingConfig | None = None,
        *,
        encode: EncodeConfig | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> PresetDataset:
        """From a preset and the meta file it was planned for, None for one that was materialised.

        Without `encode` its tile options are the preset's.
        """
        read = Preset(preset)
        encode = encode or planned_encode_config(read)
        if meta_path is None:
            samples = Samples.of((), Encoder(tokenizer, encode))
        else:
            samples = Samples.from_meta(meta_path, tokenizer, encode)
        return cls(read, samples, config, rank=rank, world_size=world_size)

    @property
    def num_positions(self) -> int:
        return self.preset.num_positions(0)

    def _open_survey(self) -> None:
        return None

    def mixture(self, epoch: int) -> Mixture:
        return super().mixture(epoch % self.preset.epochs)

    def pack_sequence(self, epoch: int) -> PackSequence:
        return PresetPacks(self.preset, epoch, self.config.on_error)

    def segment_source(self, epoch: int) -> SegmentSource:
        if not self.samples.sources:
            return StoredSegments(self.preset, self.encoder, epoch)
        return SampleSegments(self.samples, self.config, self.mixture(epoch), epoch)

    def fingerprint(self) -> dict[str, Any]:
        # The data was compared, and a preset that holds its own knows no files.
        return super().fingerprint() | {"meta": self.preset.content["data"], "preset": self.preset.digest}


def planned_encode_config(preset: Preset) -> EncodeConfig:
    """The tile options and chat format that a preset was planned for."""
    options = {name: value for name, value in preset.content["encode"].items() if name != "tokenizer"}
    options["image_size"] = options.pop("force_image_size")
    options["markup_tokens"] = tuple(options["markup_tokens"])
    return EncodeConfig(**options)
