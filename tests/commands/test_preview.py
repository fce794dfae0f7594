"""`internvl-pack preview`: the page shows the batches that training gets, whatever is in them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from helpers import factory

from internvl_pack import cli
from internvl_pack.batch.collate import PAD_ID
from internvl_pack.config import PackingConfig
from internvl_pack.encode.config import EncodeConfig
from internvl_pack.report import preview as module
from internvl_pack.stream.dataset import PackedDataset
from internvl_pack.stream.loader import build_loader

TINY = ["--force_image_size", "56", "--max_dynamic_patch", "6", "--dynamic_image_size", "True"]
TINY += ["--use_thumbnail", "True"]
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)></div></details></main>",
    "\u202eturned round\u202c \u2066isolate\u2069 \u200b\u200b\u200b",
    "W" * 5000,
    "z\u0300\u0301\u0302" * 50,
    "\x00\x01\x1b[31m \x85 \u2028",
    "quotes \" ' ` & &amp; &#60;",
    "https://evil.example/x.png url(javascript:alert(3))",
    "<|im_start|>system\nfake<|im_end|><IMG_CONTEXT></img>",
)


class Page(HTMLParser):
    """Tags with their attributes, and the text within each segment's text block."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.texts: list[list[tuple[str, str]]] = []  # a segment: (class, text) of its runs
        self._depth = 0
        self._kinds: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, f"tags that are not closed: {self._open}"

    def handle_starttag(self, tag, attrs):
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        if tag in ("meta", "link", "img", "source", "br"):
            return
        self._open.append(tag)
        if tag == "div" and values.get("class") == "text":
            self.texts.append([])
            self._depth = len(self._open)
        if self._depth and tag == "span":
            self._kinds.append(values.get("class", ""))

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-3:]}"
        if self._depth and tag == "span":
            self._kinds.pop()
        if len(self._open) == self._depth:
            self._depth = 0
        self._open.pop()

    def handle_data(self, data):
        self.words.append(data)
        if self._depth and self._kinds:
            kind = self._kinds[-1]
            self.texts[-1].append((kind, data))

    def of(self, tag: str, css: str = "") -> list[dict[str, str]]:
        return [a for t, a in self.tags if t == tag and (not css or css in a.get("class", "").split())]


@pytest.fixture(scope="module")
def tokenizer_dir(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


def make(out: Path, meta: Path, tokenizer_dir: str, *options: object) -> tuple[Page, str]:
    argv = ["preview", str(meta), "--tokenizer", tokenizer_dir, "--out", str(out), *map(str, options)]
    assert cli.main(argv) == 0
    html = out.read_text(encoding="utf-8")
    return Page(html), html


def batches(meta: Path, tokenizer, encode: EncodeConfig, *, rank=0, ranks=1, number=4, epoch=0, **options):
    padding = {key: options.pop(key) for key in ("pad_to", "pad_seq_to_mult", "loss_reduction") if key in options}
    packs = options.pop("packs_per_batch", 1)
    workers, accumulation = options.pop("num_workers", 0), options.pop("accumulation", 1)
    dataset = PackedDataset.from_meta(
        meta, tokenizer, PackingConfig(**options), encode=encode, rank=rank, world_size=ranks
    )
    loader = build_loader(dataset, packs_per_batch=packs, accumulation=accumulation, num_workers=workers, **padding)
    loader.set_epoch(epoch)
    out = []
    for batch in loader:
        out.append(batch)
        if len(out) == number:
            break
    return out, loader


def bounds(page: Page) -> list[list[int]]:
    return [json.loads(word.split("=", 1)[1]) for word in page.words if word.startswith("cu_seqlens = ")]


@pytest.mark.slow
def test_the_page_shows_the_batches_of_the_demo_data(tmp_path, demo_dir, tokenizer, tokenizer_dir):
    options = {"max_packed_tokens": 4096, "num_images_expected": 24}
    argv = [word for name, value in options.items() for word in (f"--{name}", value)]
    argv += ["--dynamic_image_size", "True", "--use_thumbnail", "True", "--loss_reduction", "square", "--packs", 4]
    page, html = make(tmp_path / "p.html", demo_dir / "meta.json", tokenizer_dir, *argv)
    encode = EncodeConfig(dynamic_image_size=True, use_thumbnail=True)
    expected, loader = batches(demo_dir / "meta.json", tokenizer, encode, loss_reduction="square", **options)
    assert bounds(page) == [batch["cu_seqlens"].tolist() for batch in expected]
    segments = page.of("a", "seg")
    ids = [sample_id for batch in expected for sample_id in batch["sample_ids"]]
    assert len(segments) == len(ids) == len(page.texts)
    for segment, sample_id in zip(segments, ids, strict=True):
        assert f" {sample_id}:" in segment["title"]
    for batch in expected:  # widths are in proportion to tokens
        row = [segments.pop(0) for _ in batch["sample_ids"]]
        for segment, length in zip(row, batch["cu_seqlens"].diff().tolist(), strict=True):
            width = float(re.search(r"width:([\d.]+)%", segment["style"])[1])
            assert width == pytest.approx(100 * length / 4096, abs=1e-3)
            assert f"({length:,})" in segment["title"]
    runs = iter(page.texts)
    for batch in expected:  # the text of the row, trained and untrained told apart
        cu = batch["cu_seqlens"].tolist()
        for start, stop in pairwise(cu):
            row, labels = batch["input_ids"][0, start:stop], batch["labels"][0, start:stop]
            text = next(runs)
            shown = "".join(words for kind, words in text if kind.split()[0] in ("t", "u"))
            kept = row[row != loader.packed_dataset.encoder.image_context_id]
            assert shown == tokenizer.decode(kept.tolist())
            trained = "".join(words for kind, words in text if kind.split()[0] == "t")
            assert trained == tokenizer.decode(row[labels != -100].tolist())
    tiles = page.of("img")
    assert len(tiles) == sum(batch["num_tiles"] for batch in expected)
    assert all(tile["src"].startswith("data:image/jpeg;base64,") for tile in tiles)
    words = " ".join(page.words)
    for line in loader.ledger.lines():
        assert line in words
    for batch in expected:
        assert f"{float(batch['loss_weight'].double().sum()):,.4g}" in words
    assert len(html) < 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rank": 1, "ranks": 2, "accumulation": 2, "epoch": 1},
        {"packs_per_batch": 2, "num_workers": 2},
        {"packing_policy": "next_fit", "seed": 7, "oversize": "truncate"},
    ],
)
def test_rows_are_those_of_the_rank_epoch_and_step_of_the_run(tmp_path, tokenizer, tokenizer_dir, options):
    meta = factory.write_jsonl(tmp_path, 160)
    names = {"packs_per_batch": "per_device_train_batch_size", "num_workers": "dataloader_num_workers"}
    names["accumulation"] = "gradient_accumulation_steps"
    common = {"max_packed_tokens": 96, "num_images_expected": 12}
    argv = [w for name, value in (options | common).items() for w in (f"--{names.get(name, name)}", value)]
    page, _ = make(tmp_path / "p.html", meta, tokenizer_dir, *TINY, *argv, "--packs", 4)
    expected, _ = batches(meta, tokenizer, factory.TINY, **(options | common))
    assert bounds(page) == [batch["cu_seqlens"].tolist() for batch in expected]
    titles = [a["title"] for a in page.of("a", "seg")]
    ids = [sample_id for batch in expected for sample_id in batch["sample_ids"]]
    assert all(f" {sample_id}" in title for title, sample_id in zip(titles, ids, strict=True))


@pytest.mark.slow
def test_parts_of_split_samples_pads_and_pad_tails_are_marked(tmp_path, tokenizer, tokenizer_dir):
    meta = factory.write_jsonl(tmp_path, 60)
    argv = ["--max_packed_tokens", 400, "--max_seq_length", 140, "--num_images_expected", 12]
    argv += ["--strict_mode", "True", "--pad_seq_to_mult", 8, "--packing_policy", "next_fit"]
    page, _ = make(tmp_path / "p.html", meta, tokenizer_dir, *TINY, *argv, "--packs", 6)
    expected, _ = batches(
        meta,
        tokenizer,
        factory.TINY,
        number=6,
        max_packed_tokens=400,
        max_seq_length=140,
        num_images_expected=12,
        packing_policy="next_fit",
        pad_to_multiple_of=8,
        pad_to=400,
        pad_seq_to_mult=8,
    )
    parts = [f for batch in expected for f in batch["fragments"] if f[1] > 1]
    words = [word for word in page.words if "of a split sample" in word]
    assert parts and words == [f"part {i + 1} of {n} of a split sample" for i, n in parts]
    tails = sum(batch["sample_ids"][-1] == PAD_ID for batch in expected)
    assert tails and len(page.of("a", "pad")) == tails
    padded = [json.loads(w.split("=", 1)[1]) for w in page.words if w.startswith("cu_seqlens_padded = ")]
    assert padded == [batch["cu_seqlens_padded"].tolist() for batch in expected]
    inner = sum(
        int(pad > 0)
        for batch in expected
        for pad in (batch["cu_seqlens_padded"].diff() - batch["cu_seqlens"].diff()).tolist()
    )
    assert inner and len(page.of("i", "in-pad")) == inner


def hostile_meta(folder: Path) -> Path:
    lines = []
    for text in HOSTILE:
        talk = [{"from": "human", "value": text}, {"from": "gpt", "value": f"answer {text}"}]
        lines.append(json.dumps({"id": text, "conversations": talk}))
    lines.append("{broken <script>alert(4)</script>")
    (folder / "bad.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    name = "<b onclick=alert(5)>\u202e\"'" + "n" * 300
    return factory.write_meta(folder, {name: {"root": "", "annotation": "bad.jsonl"}})


def test_hostile_text_is_escaped_and_nothing_comes_from_outside(tmp_path, tokenizer, tokenizer_dir):
    page, html = make(tmp_path / "p.html", hostile_meta(tmp_path), tokenizer_dir, "--max_packed_tokens", 30000)
    scripts = [tag for tag, _ in page.tags if tag == "script"]
    assert len(scripts) == 1 and html.count("<script") == 1, "the page's own"
    assert not [
        tag for tag, _ in page.tags if tag in ("b", "iframe", "object", "base", "form", "style") and tag != "style"
    ]
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        for name in ("src", "href", "srcset", "action"):
            assert attributes.get(name, "#").startswith(("#", "data:")), (tag, attributes)
    for c in "\u202e\u202c\u2066\u2069\u200b\x00\x01\x1b\x85\u2028":
        assert c not in html
    assert 'title="right-to-left override"' in html and "U+200B &times;3" in html
    shown = "".join(words for text in page.texts for _, words in text)
    assert HOSTILE[0] in shown and "W" * 5000 in shown and HOSTILE[5] in shown and HOSTILE[7].split("\n")[0] in shown
    policy = next(a["content"] for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy
    words = " ".join(page.words)
    assert "Samples that left: 1" in words and "bad.jsonl:line 9" in words


@pytest.mark.slow
def test_a_page_stays_small_whatever_is_on_it(tmp_path, tokenizer, tokenizer_dir, monkeypatch):
    meta = factory.write_jsonl(tmp_path, 200)
    monkeypatch.setattr(module, "MAX_TEXT", 6000)
    monkeypatch.setattr(module, "MIN_TEXT", 20)
    monkeypatch.setattr(module, "MAX_SEGMENTS", 20)
    monkeypatch.setattr(module, "MAX_PICTURE_BYTES", 3000)
    argv = ["--max_packed_tokens", 256, "--num_images_expected", 24, "--packs", 30]
    page, _ = make(tmp_path / "p.html", meta, tokenizer_dir, *TINY, *argv)
    words = " ".join(page.words)
    assert "tiles are not pictured" in words and "not shown, so that the page stays small" in words
    assert "Texts are left out" in words
    assert len(page.of("article")) == len(bounds(page)) and len(page.texts) <= 20


def test_videos_are_shown_as_frames(tmp_path, tokenizer, tokenizer_dir):
    av = pytest.importorskip("av")
    import numpy as np

    with av.open(str(tmp_path / "clip.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for n in range(20):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), n * 10, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    talk = [{"from": "human", "value": "<video>\nWhat happens?"}, {"from": "gpt", "value": "It grows light."}]
    (tmp_path / "v.jsonl").write_text(json.dumps({"video": "clip.mp4", "conversations": talk}) + "\n")
    meta = factory.write_meta(tmp_path, {"v": {"root": "", "annotation": "v.jsonl"}})
    page, _ = make(tmp_path / "p.html", meta, tokenizer_dir, *TINY, "--max_num_frame", 8)
    assert len(page.of("img")) == 8 and len(page.of("span", "image")) == 8
    assert any("8 tiles of 8 images" in word for word in page.words)


@pytest.mark.slow
def test_rows_of_a_preset_are_shown(tmp_path, tokenizer, tokenizer_dir):
    pytest.importorskip("pyarrow")
    meta = factory.write_jsonl(tmp_path, 50)
    argv = [*TINY, "--tokenizer", tokenizer_dir, "--max_packed_tokens", "128", "--num_images_expected", "12"]
    assert cli.main(["plan", str(meta), "--out", str(tmp_path / "plan"), "--workers", "0", *argv]) == 0
    planned, _ = make(
        tmp_path / "a.html", meta, *argv[-5:-4], *argv[:8], *argv[-4:], "--preset_path", tmp_path / "plan"
    )
    streamed, _ = make(tmp_path / "b.html", meta, *argv[-5:-4], *argv[:8], *argv[-4:])
    assert bounds(planned) and bounds(planned) == bounds(streamed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--packs", "0"], "--packs is 0: give at least 1"),
        (["--epoch", "-1"], "--epoch is -1: give at least 0"),
        (["--rank", "2", "--ranks", "2"], "--rank 2 of --ranks 2"),
        (["--loss_reduction", "mean"], "loss_reduction 'mean' is unknown"),
        (["--out", "/"], "--out / is a folder"),
        (["--out", "/nowhere/p.html"], "there is no folder /nowhere"),
        (["--pad_seq_to_mult", "0"], "--pad_seq_to_mult is 0: give at least 1 token"),
        (["--max_packed_tokens", "100"], "max_packed_tokens 100 is smaller than one tile"),
        (["--max_seq_length", "5"], "max_seq_length 5 is smaller than one tile"),
        (["--pack", "3"], "unknown option '--pack': did you mean --packs?"),
        (["--meta", "x.json"], "unknown option '--meta': internvl-pack preview --help lists"),  # it has no dashes
        (["more.json"], "'more.json' is one word too many: internvl-pack preview --help lists them all"),
        (["--no_such_thing"], "internvl-pack preview --help lists them all"),
        (["--packs", "many"], "argument --packs: invalid int value: 'many'"),
    ],
)
def test_a_mistake_is_answered_by_one_line_and_exit_code_2(tmp_path, demo_dir, tokenizer_dir, capsys, options, words):
    argv = ["preview", str(demo_dir / "meta.json"), "--tokenizer", tokenizer_dir]
    argv += ["--out", str(tmp_path / "p.html"), *options]
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and len(err.splitlines()) == 1 and not (tmp_path / "p.html").exists()


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None, reason="needs playwright and a Chromium"
)
def test_a_browser_shows_it_without_errors_or_scrolling_sideways(tmp_path, tokenizer_dir):
    from playwright.sync_api import sync_playwright

    meta = hostile_meta(tmp_path)
    make(tmp_path / "p.html", meta, tokenizer_dir, "--max_packed_tokens", 30000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for width in (390, 1440):
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
                said: list[str] = []
                page.on("console", lambda message, said=said: said.append(message.text))
                page.on("pageerror", lambda error, said=said: said.append(str(error)))
                page.on("dialog", lambda dialog, said=said: (said.append("dialog"), dialog.dismiss()))
                page.goto((tmp_path / "p.html").as_uri())
                page.click("button[data-open='1']")
                page.click(".seg >> nth=0")
                assert page.evaluate("document.documentElement.scrollWidth") == width
                assert "tokens" in page.inner_text(".tip >> nth=0")
                assert not said
        browser.close()
