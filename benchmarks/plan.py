"""What surveying, planning, starting and going on cost.

    python benchmarks/plan.py [--rows 1000000] [--lengths 10000000] [--preset 1000000 [--packing_policy NAME]]

planning    lengths drawn from benchmarks/real_mix_a.csv, packed in this process into steps of 64 packs: processor time
            a sample, which every reader spends, the memory it takes, and the size of a saved state
survey      the demo data's samples a second of one core, its words known from a first pass
start       a file of surveyed rows of text, opened by its index: seconds to the first batch, and to the first batch
            after 90 % of the epoch
preset      with --preset: so many rows whose lengths are known, planned into a preset: seconds of one core, its size,
            and the peak of memory (which holds the other parts' as well, so give --lengths 1 --rows 1000)

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from internvl_pack import EncodeConfig, PackedDataset, PackingConfig, build_loader
from internvl_pack.encode.sample import Encoder
from internvl_pack.errors import SampleError
from internvl_pack.estimate.simulate import LengthTable, read_lengths
from internvl_pack.order.permutation import Permutation
from internvl_pack.packing.cost import CostModel
from internvl_pack.packing.offline import OFFLINE_POLICIES
from internvl_pack.plan.groups import StepPlan
from internvl_pack.plan.online import OnlinePacks
from internvl_pack.plan.packed_state import to_json
from internvl_pack.plan.write_preset import plan_preset
from internvl_pack.records import Record, Span
from internvl_pack.samples import Samples
from internvl_pack.sources import RawSample, Source
from internvl_pack.stream.state import make_state
from internvl_pack.survey.survey import Survey
from internvl_pack.survey.table import Measured
from internvl_pack.testing.tiny import conversation_texts, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PACKS_PER_STEP = 64
BLOCK = 1 << 16  # rows that are put into a survey at once
KINDS = 60  # rows of text that differ in length


def real_lengths() -> LengthTable:
    with open(ROOT / "benchmarks" / "real_mix_a.csv", encoding="utf-8", newline="") as file:
        return read_lengths(file, "real_mix_a.csv")


def planning(num_samples: int, max_tokens: int, max_tiles: int) -> dict[str, float]:
    """Microseconds a sample, and what the process grew by, in MB."""
    lengths = real_lengths().drawn(num_samples, seed=0)
    config = PackingConfig(max_packed_tokens=max_tokens, num_images_expected=max_tiles)
    cost = CostModel.from_name("1B")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    packs = OnlinePacks(lengths, lengths.mixture(), config, cost)
    plan = StepPlan(packs, PACKS_PER_STEP, seed=0, epoch=0)
    started = time.process_time()
    for _ in range(min(100, len(lengths) // 1000)):
        plan.next_step()
    seconds = time.process_time() - started
    state = json.dumps(to_json(plan.state_dict()))
    started = time.process_time()
    while plan.next_step() is not None:
        pass
    seconds += time.process_time() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"us_a_sample": 1e6 * seconds / num_samples, "grown_MB": grown / 1024, "steps": plan.num_steps} | {
        "state_kB": len(state) / 1e3
    }


def survey_rate(folder: Path) -> float:
    """Samples a second of the demo data."""
    demo = ROOT / "shell" / "data" / "demo"
    encode = EncodeConfig(dynamic_image_size=True, use_thumbnail=True)
    samples = Samples.from_meta(demo / "meta.json", tiny_tokenizer(conversation_texts(demo / "demo.jsonl")), encode)
    survey = Survey(samples, PackingConfig().room, folder)
    rows = [row for _ in range(20) for row in range(samples.num_rows)]
    for row in range(samples.num_rows):
        survey.measure(0, row)
    started = time.process_time()
    survey.tables[0].put(rows, [survey.measure(0, row)[0] for row in rows])
    return len(rows) / (time.process_time() - started)


def write_rows(folder: Path, num_rows: int) -> Path:
    """A meta file of rows of text in KINDS lengths."""
    with open(folder / "rows.jsonl", "w", encoding="utf-8") as lines:
        kinds = [
            {"conversations": [{"from": "human", "value": "question"}, {"from": "gpt", "value": "answer " * (1 + n)}]}
            for n in range(KINDS)
        ]
        texts = [json.dumps(kind) + "\n" for kind in kinds]
        for row in range(num_rows):
            lines.write(texts[row * 7919 % KINDS])
    meta = folder / "meta.json"
    meta.write_text(json.dumps({"rows": {"root": "", "annotation": "rows.jsonl", "repeat_time": 1}}))
    return meta


def start_and_resume(folder: Path, num_rows: int) -> dict[str, float]:
    """Seconds to the first batch of an epoch and after 90 % of it, the rows surveyed and the file indexed before."""
    from internvl_pack.cli import main as command

    meta = write_rows(folder, num_rows)
    assert command(["index", str(meta), "--workers", "0"]) == 0
    tokenizer = tiny_tokenizer(["question answer 0123456789"])
    config = PackingConfig(max_packed_tokens=4096, num_images_expected=40, survey_dir=str(folder / "survey"))

    def new_loader():
        dataset = PackedDataset.from_meta(
            meta, tokenizer, config, encode=EncodeConfig(dynamic_image_size=True, use_thumbnail=True)
        )
        return build_loader(dataset, accumulation=PACKS_PER_STEP)

    def first_batch(state=None) -> tuple[float, float]:
        """Seconds to open the data, and from there to the first batch."""
        started = time.perf_counter()
        loader = new_loader()
        opened = time.perf_counter()
        if state is not None:
            loader.load_state_dict(state)
        next(iter(loader))
        return opened - started, time.perf_counter() - opened

    dataset = new_loader().packed_dataset
    kinds = [dataset.survey.measure(0, row)[0] for row in range(KINDS)]
    for start in range(0, num_rows, BLOCK):
        rows = range(start, min(start + BLOCK, num_rows))
        dataset.survey.tables[0].put(rows, [kinds[row % KINDS] for row in rows])
    assert dataset.survey.num_known == dataset.samples.num_rows
    opened, first = first_batch()
    plan = dataset.step_plan(0, PACKS_PER_STEP)
    while plan.ledger.samples_in < 0.9 * num_rows:
        plan.next_step()
    losses = {"fragments": 0, "tokens": 0, "samples": {}, "parts": []}
    text = json.dumps(make_state(0, dataset.fingerprint(), plan.state_dict(), losses))
    opened_again, resumed = first_batch(json.loads(text))
    return {
        "open_s": opened,
        "first_batch_s": first,
        "open_to_resume_s": opened_again,
        "resume_s": resumed,
    }


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


def preset_of(folder: Path, num_samples: int, policy: str, max_tokens: int, max_tiles: int) -> dict[str, float]:
    """Planning of a preset of lengths of the real mix, varied by up to 5 % so that they do not repeat."""
    offline = policy in OFFLINE_POLICIES
    config = PackingConfig(
        max_packed_tokens=max_tokens,
        num_images_expected=max_tiles,
        packing_policy=PackingConfig.packing_policy if offline else policy,
        survey_dir=str(folder / "survey"),
    )
    samples = Samples.of([Lengths(num_samples)], Encoder(tiny_tokenizer(["synthetic"])))
    survey = Survey(samples, config.room, folder / "survey")
    tokens, tiles = real_lengths().drawn(num_samples, seed=0).sizes()
    tokens = np.maximum(2, tokens * np.random.default_rng(0).uniform(0.95, 1.05, num_samples)).astype(int)
    for start in range(0, num_samples, BLOCK):
        sizes = zip(tokens[start : start + BLOCK].tolist(), tiles[start : start + BLOCK].tolist(), strict=True)
        measured = [measured_as(survey, *each) for each in sizes]
        survey.tables[0].put(range(start, start + len(measured)), measured)
    started = time.process_time()
    preset = plan_preset(folder / "preset", samples, config, policy=policy if offline else None)
    seconds = time.process_time() - started
    size = sum(f.stat().st_size for f in preset.folder.glob("*.parquet"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {f"preset_{name}": preset.content["statistics"][name] for name in ("packs_over_bound", "token_fill")}
    return {"preset_s": seconds, "preset_MB": size / 1e6, "preset_peak_MB": peak} | figures


def measured_as(survey: Survey, num_tokens: int, num_tiles: int) -> Measured:
    cuttable = not survey.room.holds(num_tokens, num_tiles)
    if cuttable and num_tiles:  # where its images stand is not known
        return Measured.of_error(SampleError("oversized_dropped", "an image cannot be cut without its spans"))
    return Measured.of_record(Record("", num_tokens, num_tiles, spans=(Span(num_tokens),)), cuttable=cuttable)


def lookup_microseconds(length: int, lookups: int = 50_000) -> float:
    """Of a position in a permutation of this length, one by one."""
    permutation = Permutation(length, seed=1)
    started = time.perf_counter()
    for position in range(lookups):
        permutation[position]
    return 1e6 * (time.perf_counter() - started) / lookups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the file that is started from")
    parser.add_argument("--lengths", type=int, default=10_000_000, help="planned in one process")
    parser.add_argument("--budget", type=int, nargs=2, default=[16384, 48], metavar=("TOKENS", "TILES"))
    parser.add_argument("--preset", type=int, help="rows planned into a preset")
    parser.add_argument("--packing_policy", default="subset_sum", help="of the preset, offline ones among them")
    args = parser.parse_args()
    result: dict[str, float] = {}
    planned = planning(args.lengths, *args.budget)
    print(
        f"planning {args.lengths:,} lengths: {planned['us_a_sample']:.1f} us a sample, {planned['grown_MB']:.0f} MB "
        f"more at the peak, {planned['steps']:,} steps of {PACKS_PER_STEP} packs, state {planned['state_kB']:.0f} kB"
    )
    result |= planned
    for length in (10**6, 10**9):
        result[f"lookup_us_{length}"] = lookup_microseconds(length)
        print(f"permutation of {length:,}: {result[f'lookup_us_{length}']:.1f} us a look-up")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INTERNVL_PACK_CACHE"] = folder
        result["survey_a_second"] = survey_rate(Path(folder))
        print(f"survey: {result['survey_a_second']:,.0f} samples a second of one core")
        result |= start_and_resume(Path(folder), args.rows)
        if args.preset:
            found = preset_of(Path(folder, "preset"), args.preset, args.packing_policy, *args.budget)
            print(f"preset of {args.preset:,} samples: " + ", ".join(f"{k[7:]} {v:.4g}" for k, v in found.items()))
            result |= found
    print(
        f"{args.rows:,} surveyed rows: opened in {result['open_s']:.2f} s, first batch {result['first_batch_s']:.2f} s "
        f"later; at 90 % of the epoch {result['open_to_resume_s']:.2f} s and {result['resume_s']:.2f} s"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
