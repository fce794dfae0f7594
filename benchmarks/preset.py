"""Planning of a preset whose samples are surveyed already: seconds of one core, peak memory and fill.

    python benchmarks/preset.py --lengths benchmarks/real_mix_a.csv --samples 1000000

The lengths are drawn from a file with the columns num_tokens and num_tiles, tokens varied by up to 5 % so that they do
not repeat. Measuring the rows of real data comes before this and is not in the figures.
"""

from __future__ import annotations

import argparse
import csv
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from internvl_pack.config import PackingConfig
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import SampleError
from internvl_pack.packing.offline import OFFLINE_POLICIES
from internvl_pack.plan.write_preset import plan_preset
from internvl_pack.records import Record, Span
from internvl_pack.samples import Samples
from internvl_pack.sources import RawSample, Source
from internvl_pack.survey.survey import Survey
from internvl_pack.survey.table import Measured
from internvl_pack.testing.tiny import tiny_tokenizer

BLOCK = 1 << 16


class Lengths(Source):
    """Rows that have lengths and no content."""

    name = "synthetic"

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __len__(self) -> int:
        return self._num_rows

    def read(self, row: int) -> RawSample:
        raise SampleError("no_content", "only its length is known")

    def sample_id(self, row: int) -> str:
        return f"{self.name}/{row}"

    def origin(self, row: int) -> str:
        return f"{self.name}: row {row}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", required=True, help="CSV of measured lengths")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--max_packed_tokens", type=int, default=8192)
    parser.add_argument("--num_images_expected", type=int, default=40)
    parser.add_argument("--packing_policy", default="subset_sum")
    args = parser.parse_args()
    policy = args.packing_policy if args.packing_policy in OFFLINE_POLICIES else None
    config = PackingConfig(max_packed_tokens=args.max_packed_tokens, num_images_expected=args.num_images_expected)
    if policy is None:
        config = replace(config, packing_policy=args.packing_policy)
    samples = Samples.of([Lengths(args.samples)], Encoder(tiny_tokenizer(["synthetic"])))
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, survey_dir=str(Path(folder) / "survey"))
        fill_survey(Survey(samples, config.room, Path(folder) / "survey"), Path(args.lengths))
        started = time.process_time()
        preset = plan_preset(Path(folder) / "preset", samples, config, policy=policy)
        seconds = time.process_time() - started
        size = sum(f.stat().st_size for f in preset.folder.glob("*.parquet"))
    figures = preset.content["statistics"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{args.samples:,} samples, {args.packing_policy}: {seconds:.1f} s, {size / 2**20:.0f} MiB of preset")
    print(f"peak memory {peak:.2f} GiB")
    print(
        f"packs {figures['packs']:,}, over the bound {figures['packs_over_bound']:.4f}, token fill "
        f"{figures['token_fill']:.2%}, refused {figures['refused']}"
    )


def fill_survey(survey: Survey, source: Path) -> None:
    """Lengths of all rows as if they had been measured."""
    with open(source, encoding="utf-8") as file:
        known = np.array([(int(r["num_tokens"]), int(r["num_tiles"])) for r in csv.DictReader(file)])
    rng = np.random.default_rng(0)
    for start in range(0, survey.samples.num_rows, BLOCK):
        count = min(BLOCK, survey.samples.num_rows - start)
        lengths = known[rng.integers(0, len(known), count)]
        tokens = np.maximum(2, lengths[:, 0] * rng.uniform(0.95, 1.05, count)).astype(int).tolist()
        measured = [_measured(survey, *each) for each in zip(tokens, lengths[:, 1].tolist(), strict=True)]
        survey.tables[0].put(range(start, start + count), measured)


def _measured(survey: Survey, num_tokens: int, num_tiles: int) -> Measured:
    cuttable = not survey.room.holds(num_tokens, num_tiles)
    if cuttable and num_tiles:  # where its images stand is not known
        return Measured.of_error(SampleError("oversized_dropped", "an image cannot be cut without its spans"))
    return Measured.of_record(Record("", num_tokens, num_tiles, spans=(Span(num_tokens),)), cuttable=cuttable)


if __name__ == "__main__":
    main()
