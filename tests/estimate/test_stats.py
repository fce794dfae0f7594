"""`internvl-pack stats`: its numbers against an independent count, its plots and its page."""

from __future__ import annotations

import base64
import json
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from helpers import factory

from internvl_pack import cli
from internvl_pack.config import PackingConfig
from internvl_pack.encode.tiles import plan_grid
from internvl_pack.estimate.epochs import estimate_epochs
from internvl_pack.estimate.stats import counts_of, gather, padded_share
from internvl_pack.packing.tally import quantile
from internvl_pack.report.plots import write_report
from internvl_pack.samples import Samples
from internvl_pack.stream.dataset import PackedDataset

DEMO_OPTIONS = ["--dynamic_image_size", "True", "--use_thumbnail", "True"]


@pytest.fixture(scope="module")
def tokenizer_dir(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


def stats_of(capsys, *argv) -> dict:
    assert cli.main(["stats", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def demo_lengths(demo_dir: Path, tokenizer) -> list[tuple[int, int]]:
    """Tokens and tiles of the demo's samples by another way: the whole ChatML string through the tokenizer at once."""
    from PIL import Image

    from internvl_pack.encode.chat import INTERNVL2_5_SYSTEM_PROMPT

    out = []
    for line in (demo_dir / "demo.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        names = record.get("image") or []
        names = [names] if isinstance(names, str) else names
        counts = []
        for name in names:
            with Image.open(demo_dir / "images" / name) as image:
                most = max(1, 12 // len(names))
                grid = plan_grid(*image.size, min_tiles=1, max_tiles=most, image_size=448, use_thumbnail=True)
            counts.append(grid.num_tiles)
        text = f"<|im_start|>system\n{INTERNVL2_5_SYSTEM_PROMPT}<|im_end|>\n"
        for turn in record["conversations"]:
            role = {"human": "user", "gpt": "assistant"}[turn["from"]]
            text += f"<|im_start|>{role}\n{turn['value'].strip()}<|im_end|>\n"
        for count in counts:
            text = text.replace("<image>", f"<img>{'<IMG_CONTEXT>' * 256 * count}</img>", 1)
        out.append((len(tokenizer(text, add_special_tokens=False).input_ids), sum(counts)))
    return out


def test_the_figures_of_the_demo_data_are_those_of_an_independent_count(demo_dir, tokenizer, tokenizer_dir, capsys):
    got = stats_of(capsys, demo_dir / "meta.json", "--tokenizer", tokenizer_dir, *DEMO_OPTIONS)
    lengths = demo_lengths(demo_dir, tokenizer)
    tokens, tiles = (np.array(values) for values in zip(*lengths, strict=True))
    assert (got["samples"], got["good"], got["bad"], got["reasons"]) == (52, 52, 0, {})
    assert (got["tokens"]["total"], got["tiles"]["total"]) == (tokens.sum(), tiles.sum())
    assert got["tokens"]["mean"] == pytest.approx(tokens.mean())
    for name, share in (("min", 0), ("p5", 0.05), ("p50", 0.5), ("p95", 0.95), ("max", 1)):
        assert got["tokens"][name] == np.quantile(tokens, share, method="inverted_cdf")
        assert got["tiles"][name] == np.quantile(tiles, share, method="inverted_cdf")
    assert got["share_of_budget"]["tokens"]["p95"] == got["tokens"]["p95"] / 8192
    assert got["share_of_budget"]["tiles"]["max"] == tiles.max() / 40
    (dataset,) = got["datasets"]
    assert (dataset["name"], dataset["rows"], dataset["share_of_tokens"]) == ("demo", 52, 1.0)


@pytest.mark.slow
def test_packs_and_steps_are_those_that_training_plans(tmp_path, tokenizer, tokenizer_dir, capsys):
    meta = factory.write_jsonl(tmp_path, 300)
    options = {"max_packed_tokens": 96, "num_images_expected": 12, "oversize": "split"}
    argv = [word for name, value in options.items() for word in (f"--{name}", value)]
    argv += ["--force_image_size", 56, "--max_dynamic_patch", 6, "--dynamic_image_size", "True"]
    argv += ["--use_thumbnail", "True", "--ranks", 2, "--gradient_accumulation_steps", 3]
    got = stats_of(capsys, meta, "--tokenizer", tokenizer_dir, *argv)
    dataset = PackedDataset.from_meta(
        meta, tokenizer, PackingConfig(**options), encode=factory.TINY, rank=0, world_size=2
    )
    estimated = estimate_epochs(dataset, 6, 1).first
    chosen = got["packing"]["subset_sum"]
    assert estimated.exact and chosen["exact"]
    assert (chosen["packs"], chosen["steps"]) == (estimated.packs, estimated.steps)
    assert got["rank_efficiency"] == estimated.rank_efficiency
    assert chosen["split"] > 0, "the budget is small enough for some to be split"
    assert got["steps_an_epoch"] == chosen["steps"]
    single = got["packing"]["single"]
    assert single["segments_a_pack"] == 1.0 and single["packs"] > single["samples"] == chosen["samples"] == 300
    assert got["packing"]["next_fit"]["packs"] >= chosen["packs"] >= chosen["lower_bound"]
    many = stats_of(capsys, meta, "--tokenizer", tokenizer_dir, *argv, "--ranks", 2 * chosen["packs"])
    assert many["trouble"].startswith(f"the data is small for {6 * chosen['packs']:,} packs a step")


@pytest.mark.slow
def test_worker_processes_give_the_same_figures(tmp_path, tokenizer_dir, capsys):
    meta = factory.write_jsonl(tmp_path, 600)
    lines = (tmp_path / "made.jsonl").read_text().splitlines()
    lines[7] = "not json"
    lines[560] = '{"conversations": []}'
    (tmp_path / "made.jsonl").write_text("\n".join(lines) + "\n")
    one, two = (stats_of(capsys, meta, "--tokenizer", tokenizer_dir, "--workers", n) for n in (0, 2))
    assert one == two
    assert one["bad"] == 2 and one["good"] == 598


def test_bad_samples_are_counted_and_named_by_reason(tmp_path, tokenizer_dir, capsys):
    meta = factory.write_jsonl(tmp_path, 40)
    lines = (tmp_path / "made.jsonl").read_text().splitlines()
    lines[3] = "{ broken"
    lost = next(i for i, line in enumerate(lines) if '"image"' in line and i > 3)
    for name in json.loads(lines[lost])["image"]:
        (tmp_path / "images" / name).unlink()
    (tmp_path / "made.jsonl").write_text("\n".join(lines) + "\n")
    assert cli.main(["stats", str(meta), "--tokenizer", tokenizer_dir, "--json"]) == 0
    out = capsys.readouterr().out
    got = json.loads(out.splitlines()[-1])
    assert got["samples"] == 40 and got["good"] == 38 and sum(got["reasons"].values()) == got["bad"] == 2
    assert f"; left out: {', '.join(f'{n} {reason}' for reason, n in got['reasons'].items())}\n" in out
    for reason in got["reasons"]:
        assert reason in out.split("{")[0]
    assert f"dataset 'made': image names are joined to {tmp_path / 'images'}; if they lie elsewhere, give" in out
    assert any("made.jsonl:line 4" in detail for details in got["examples"].values() for detail in details)


@pytest.mark.slow
def test_a_dataset_without_one_good_sample_is_still_reported(tmp_path, tokenizer_dir, capsys):
    meta = factory.write_jsonl(tmp_path, 50)
    (tmp_path / "made.jsonl").write_text("broken\n" * 50)
    got = stats_of(capsys, meta, "--tokenizer", tokenizer_dir, "--out", tmp_path / "out")
    assert got["good"] == 0 and got["bad"] == 50 and got["packing"]["subset_sum"]["packs"] == 0
    assert (tmp_path / "out" / "stats.html").is_file()


def test_quantiles_and_expected_padding_match_brute_force():
    rng = random.Random(1)
    values = [rng.randint(1, 50) for _ in range(400)]
    found = counts_of(np.array(values[:150])) + counts_of(np.array(values[150:]))
    for share in (0, 0.1, 0.5, 0.77, 1):
        assert quantile(found, share) == np.quantile(values, share, method="inverted_cdf")
    assert padded_share({5: 10}, 8) == 0.0
    # Two lengths, batches of two: half of the batches are mixed and hold (1 + 9) of 18 tokens.
    assert padded_share({1: 1, 9: 1}, 2) == pytest.approx(1 - 5 / (0.25 * 1 + 0.75 * 9))
    drawn = [[rng.choice(values) for _ in range(4)] for _ in range(20000)]
    brute = 1 - sum(map(sum, drawn)) / (4 * sum(map(max, drawn)))
    assert padded_share(found, 4) == pytest.approx(brute, abs=0.01)


@pytest.mark.slow
def test_large_data_is_extrapolated_from_some_of_its_samples(tmp_path, tokenizer):
    meta = factory.write_jsonl(tmp_path, 800)
    samples = Samples.from_meta(meta, tokenizer, factory.TINY)
    config = PackingConfig(max_packed_tokens=512, num_images_expected=24)
    found = {planned: gather(samples, config, planned_samples=planned).chosen for planned in (10**6, 200)}
    exact, about = found[10**6], found[200]
    assert exact.exact and not about.exact and about.num_planned == 200
    assert about.packs == pytest.approx(exact.packs, rel=0.1)
    assert about.tokens == pytest.approx(exact.tokens, rel=0.1)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.slow
def test_the_report_is_one_page_with_four_plots_and_nothing_from_outside(tmp_path, tokenizer, monkeypatch):
    name = "<script>alert(1)</script>$x_1$\u202e_é" + "long" * 40
    meta = factory.write_jsonl(tmp_path, 60, name="made")
    content = json.loads(meta.read_text())
    content = {name: content["made"], "_second": content["made"] | {"repeat_time": 2}}
    meta.write_text(json.dumps(content))
    stats = gather(Samples.from_meta(meta, tokenizer, factory.TINY), PackingConfig())
    result = stats.as_json() | {"meta": "<meta>", "tokenizer": None}
    path = write_report(stats, result, tmp_path, options=[("--seed", "42")])
    html = path.read_text(encoding="utf-8")
    for plot in ("lengths", "tokens_tiles", "fill", "padding"):
        png = (tmp_path / f"{plot}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and base64.b64encode(png).decode() in html
    page = _Page()
    page.feed(html)
    assert not [tag for tag, _ in page.tags if tag in ("script", "iframe", "object")]
    urls = [a[key] for _, a in page.tags for key in ("src", "href", "srcset") if key in a]
    assert len(urls) == 9 and all(url.startswith("data:") for url in urls)
    assert "url(" not in html and not re.search(r"https?://", html)
    words = " ".join(page.words)
    assert "<script>alert(1)</script>" in words and "\u202e" not in html
    assert f"{result['tokens']['total']:,}" in words and f"{result['packing']['subset_sum']['packs']:,}" in words


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "--ranks is 0: give at least 1 rank"),
        (["--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps is 0"),
        (["--max_packed_tokens", "0"], "max_packed_tokens"),
        (["--num_images_expected", "0"], "num_images_expected"),
        (["--packing_policy", "best"], "--packing_policy 'best' is unknown"),
        (["--workers", "-1"], "--workers"),
        (["--conv_style", "nobody"], "nobody"),
        (["--tokenizer", "/nowhere"], "--tokenizer /nowhere: no such folder, and no hub name"),
        (["--oversize", "keep"], "oversize"),
    ],
)
def test_a_mistake_is_answered_by_one_line_and_exit_code_2(demo_dir, tokenizer_dir, capsys, options, words):
    argv = ["stats", str(demo_dir / "meta.json"), "--tokenizer", tokenizer_dir, *options]
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1


def test_plots_without_matplotlib_are_refused_before_anything_is_read(demo_dir, capsys, monkeypatch, tmp_path):

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    assert cli.main(["stats", str(demo_dir / "meta.json"), "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert "pip install 'internvl-pack[report]'" in err and len(err.splitlines()) == 1 and not out.exists()
