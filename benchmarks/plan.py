"""What surveying, planning, starting and going on cost.

    python benchmarks/plan.py [--rows 1000000] [--lengths 10000000]

planning    lengths drawn from benchmarks/real_mix_a.csv, packed in this process into steps of 64 packs: processor time
            a sample, which every reader spends, the memory it takes, and the size of a saved state
survey      the demo data's samples a second of one core, its words known from a first pass
start       a file of surveyed rows of text, opened by its index: seconds to the first batch, and to the first batch
            after 90 % of the epoch

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from internvl_pack import EncodeConfig, PackedDataset, PackingConfig, build_loader
from internvl_pack.estimate.simulate import read_lengths
from internvl_pack.order.permutation import Permutation
from internvl_pack.packing.cost import CostModel
from internvl_pack.plan.groups import StepPlan
from internvl_pack.plan.online import OnlinePacks
from internvl_pack.plan.packed_state import to_json
from internvl_pack.samples import Samples
from internvl_pack.stream.state import make_state
from internvl_pack.survey.survey import Survey
from internvl_pack.testing.tiny import conversation_texts, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]
PACKS_PER_STEP = 64
KINDS = 60  # rows of text that differ in length


def planning(num_samples: int, max_tokens: int, max_tiles: int) -> dict[str, float]:
    """Microseconds a sample, and what the process grew by, in MB."""
    with open(ROOT / "benchmarks" / "real_mix_a.csv", encoding="utf-8", newline="") as file:
        lengths = read_lengths(file, "real_mix_a.csv").drawn(num_samples, seed=0)
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
    for start in range(0, num_rows, 1 << 16):
        rows = range(start, min(start + (1 << 16), num_rows))
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
    print(
        f"{args.rows:,} surveyed rows: opened in {result['open_s']:.2f} s, first batch {result['first_batch_s']:.2f} s "
        f"later; at 90 % of the epoch {result['open_to_resume_s']:.2f} s and {result['resume_s']:.2f} s"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
