"""`Samples`: the data of a run as one object, handed to whoever reads rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .encode.config import EncodeConfig
from .encode.joined import JoinedSource
from .encode.outline import Outline
from .encode.sample import Encoded, Encoder
from .encode.trees import answers_of
from .errors import SampleError, UserError, isolate_sample_errors
from .order.mixture import Mixture, MixturePart
from .records import Fragment
from .sources import DatasetSpec, Source, load_meta, open_source

if TYPE_CHECKING:
    from .config import PackingConfig

# Rows of a dataset that are looked at before a model is loaded.
FIRST_ROWS = 32


@dataclass(frozen=True)
class Samples:
    """Datasets that are open, and how their rows become tokens and tiles. Picklable.

    Attributes:
        sources: where rows come from, one `Source` a dataset; none where a preset holds the data.
        specs: the matching entries of the meta file (repeat_time, weight, max_dynamic_patch ...).
        encoder: tokenizer, chat format and tile rules.
    """

    sources: tuple[Source, ...]
    specs: tuple[DatasetSpec, ...]
    encoder: Encoder

    def __post_init__(self) -> None:
        assert len(self.sources) == len(self.specs), "a spec a source"
        if self.encoder.grid_positions and (names := [spec.name for spec in self.specs if spec.data_augment]):
            raise UserError(
                f"data_augment of dataset {names[0]!r}: it compresses tiles one by one, which would cut up pictures of "
                f"{self.encoder.config.family!r}; leave it out"
            )

    @classmethod
    def of(cls, sources: Sequence[Source], encoder: Encoder, specs: Sequence[DatasetSpec] | None = None) -> Samples:
        """From open sources; without specs each dataset is read once an epoch."""
        return cls(tuple(sources), tuple(specs or [DatasetSpec(name=source.name) for source in sources]), encoder)

    @classmethod
    def from_meta(cls, meta_path: str | Path, tokenizer: Any, encode: EncodeConfig | None = None) -> Samples:
        """Of an InternVL meta file.

        Raises:
            UserError: the meta file, its data or the tokenizer cannot be used.
        """
        return cls.from_specs(load_meta(meta_path), Encoder(tokenizer, encode))

    @classmethod
    def from_specs(cls, specs: Sequence[DatasetSpec], encoder: Encoder) -> Samples:
        """Of the entries of a meta file."""
        return cls(tuple(open_source(spec) for spec in specs), tuple(specs), encoder)

    def joined(self, config: PackingConfig, folder: Path | None) -> Samples:
        """With `share_prefix` neighbouring rows that begin alike joined to trees; without it as they are.

        Every record is read once, unless an earlier run kept what it found in `folder`; None keeps nothing. The rules
        are in encode/joined.py.

        Raises:
            UserError: the objective is of pairs, which are trees already.
        """
        if not config.share_prefix:
            return self
        if self.encoder.config.objective != "sft":
            raise UserError(
                f"share_prefix with objective {self.encoder.config.objective!r}: pairs are trees already, leave it out"
            )
        sources = (
            source
            if isinstance(source, JoinedSource)
            else JoinedSource(source, spec, self.encoder, config.room, folder)
            for source, spec in zip(self.sources, self.specs, strict=True)
        )
        return replace(self, sources=tuple(sources))

    @property
    def names(self) -> tuple[str, ...]:
        """The datasets' names."""
        return tuple(spec.name for spec in self.specs)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all datasets, bad ones included."""
        return sum(map(len, self.sources))

    def chunks(self, num_rows: int) -> Iterator[tuple[int, int, int]]:
        """(dataset, start, stop) of all rows, up to `num_rows` at a time, in order."""
        for dataset, source in enumerate(self.sources):
            for start in range(0, len(source), num_rows):
                yield dataset, start, min(start + num_rows, len(source))

    def check_some(self, num_positions: int) -> None:
        """Check that an epoch has positions.

        Raises:
            UserError: it has none; says why.
        """
        if num_positions:
            return
        why = "all datasets have weight or repeat_time 0"
        if not self.num_rows:
            why = next((str(error) for error in self.damage), "all of its files are empty")
        raise UserError(f"the data holds no samples: {why}")

    def check_objective(self) -> None:
        """Check by each dataset's first rows that it is not wholly of another objective, as nothing else looks at them.

        Raises:
            UserError: it is pairs without an objective of pairs, or the other way round; names the dataset.
        """
        objective = self.encoder.config.objective
        for source, spec in zip(self.sources, self.specs, strict=True):
            errors = (_other_objective(source, row, objective) for row in range(min(len(source), FIRST_ROWS)))
            found = list(takewhile(bool, errors))
            if found and len(found) == min(len(source), FIRST_ROWS):
                raise UserError(f"dataset {spec.name!r}: {found[0]}")

    @property
    def damage(self) -> list[SampleError]:
        """Damage in the files that belongs to no row."""
        return [error for source in self.sources for error in source.damage]

    def encode(self, dataset: int, row: int) -> Encoded:
        """Read and encode a row.

        Raises:
            SampleError: whatever goes wrong with it.
        """
        return self.encoder.load(self.sources[dataset], row, self.specs[dataset])

    def outline(self, dataset: int, row: int) -> Outline:
        """Read a row for `encode_part`.

        Raises:
            SampleError: whatever goes wrong with it.
        """
        with isolate_sample_errors(source=partial(self.sources[dataset].origin, row)):
            return self.encoder.outline(self.sources[dataset].read(row), self.specs[dataset])

    def encode_part(self, outline: Outline, fragment: Fragment) -> Encoded:
        """Encode a part of a sample.

        Raises:
            SampleError: whatever goes wrong with it.
        """
        with isolate_sample_errors(source=lambda: outline.raw.origin):
            return self.encoder.encode_part(outline, fragment)

    def sample_id(self, dataset: int, row: int) -> str:
        return self.sources[dataset].sample_id(row)

    def origin(self, dataset: int, row: int) -> str:
        """Where a row stands, for messages."""
        return self.sources[dataset].origin(row)

    def without_folder(self, text: str) -> str:
        """A text whose paths below the meta file's folder are relative to it: what is written of data that may move."""
        for folder in {os.path.dirname(spec.meta_file) for spec in self.specs} - {""}:
            text = re.sub(rf"(?<![\w./-]){re.escape(folder + os.sep)}", "", text)
        return text

    def mixture(self, config: PackingConfig, epoch: int) -> Mixture:
        """The order of an epoch: which row of which dataset stands at each position."""
        parts = [
            MixturePart(
                name=spec.name,
                num_rows=len(source),
                repeat_time=spec.repeat_time,
                weight=spec.weight,
                block_starts=tuple(map(int, source.block_starts)) if config.shuffle_buffer_size else None,
            )
            for spec, source in zip(self.specs, self.sources, strict=True)
        ]
        return Mixture(
            parts,
            seed=config.seed,
            epoch=epoch,
            shuffle=config.shuffle,
            replacement=config.replacement,
            use_data_resampling=config.use_data_resampling,
            shuffle_buffer_size=config.shuffle_buffer_size,
        )

    def fingerprint(self) -> list[dict[str, Any]]:
        """What the order of samples depends on of each dataset, as JSON values. Its folder is not: data may move."""
        return [
            {
                "name": spec.name,
                "rows": len(source),
                "repeat_time": spec.repeat_time,
                "weight": spec.weight,
                "max_dynamic_patch": spec.max_dynamic_patch,
                "data_augment": spec.data_augment,
                "content": source.content,
            }
            for spec, source in zip(self.specs, self.sources, strict=True)
        ]


def _other_objective(source: Source, row: int, objective: str) -> SampleError | None:
    """Why a row is of another objective; None where it is not, or cannot be read."""
    try:
        with isolate_sample_errors(source=partial(source.origin, row)):
            answers_of(source.read(row).data, objective)
    except SampleError as error:
        return error if error.reason in ("preference_data", "no_preference_data") else None
    return None
