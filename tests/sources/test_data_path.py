"""A path of data where a meta file is expected."""

from __future__ import annotations

import io
import json
import tarfile

import pytest

from internvl_pack.errors import SampleError, UserError
from internvl_pack.sources import load_meta, open_source

ASK = {"role": "user", "content": "Hi."}
RECORD = {"messages": [ASK, {"role": "assistant", "content": "Ho."}], "images": []}
LINE = json.dumps(RECORD) + "\n"


def write_tar(path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "one.jsonl").write_text(LINE)
    (folder / "many.json").write_text(LINE * 3)
    (folder / "array.json").write_text(json.dumps([RECORD]))
    (folder / "none").mkdir()
    for number in range(2):
        write_tar(folder / "shards" / f"s-{number}.tar", {"a.json": LINE.encode(), "b.json": LINE.encode()})
    return folder


@pytest.fixture(scope="module")
def tables(folder):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"messages": RECORD["messages"], "images": ["a.jpg"]}] * 4)
    data.save_to_disk(str(folder / "saved"))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(str(folder / "splits"))
    data.to_parquet(str(folder / "rows"))
    (folder / "hub" / "data").mkdir(parents=True)
    for split in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        data.to_parquet(str(folder / "hub" / "data" / f"{split}.parquet"))
    (folder / "hub" / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


@pytest.mark.parametrize(
    ("path", "name", "rows"),
    [
        ("one.jsonl", "one", 1),
        ("many.json", "many", 3),
        ("shards/s-0.tar", "s-0", 2),
        ("shards/s-{0..1}.tar", "s", 4),
        ("shards", "shards", 4),
    ],
)
def test_files_and_shards_need_no_meta_file(folder, path, name, rows):
    (spec,) = load_meta(folder / path)
    source = open_source(spec)
    assert (spec.name, len(source)) == (name, rows)
    assert source.read(rows - 1).data["conversations"] == RECORD["messages"]


@pytest.mark.parametrize(
    ("path", "name", "rows"),
    [
        ("saved", "saved", 4),
        ("splits/train", "train", 4),
        ("rows", "rows", 4),
        ("hub/data/train-*.parquet", "train", 8),
    ],
)
def test_tables_need_no_meta_file_either_and_may_be_an_annotation(tables, path, name, rows):
    (spec,) = load_meta(tables / path)
    assert (spec.name, len(open_source(spec))) == (name, rows)
    (tables / "meta.json").write_text(json.dumps({"a": {"annotation": path}}))
    (spec,) = load_meta(tables / "meta.json")
    source = open_source(spec)
    assert len(source) == rows
    assert source.read(0).resolve("#0").name == str(tables / "a.jpg")


def test_images_are_looked_for_beside_the_file(folder):
    (spec,) = load_meta(folder / "one.jsonl")
    assert spec.root == str(folder)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("array.json", "is a JSON array.*json.load"),
        ("gone.jsonl", "does not exist"),
        ("shards/s-{0..2}.tar", "s-2.tar does not exist"),
        ("none", "is a folder without"),
    ],
)
def test_what_is_no_data_is_answered_with_what_to_do(folder, path, message):
    with pytest.raises(UserError, match=message):
        open_source(load_meta(folder / path)[0])


def of(folder, entry):
    (folder / "meta.json").write_text(json.dumps({"a": entry}))
    return open_source(load_meta(folder / "meta.json")[0])


def table(path: str, **options) -> dict:
    return {"source": "datasets", "options": {"path": path, **options}}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (table("hub"), "hub has train, test: .*option 'split'"),
        ({"annotation": "splits"}, "splits has train, test: choose one by its folder, such as .*splits/train, or"),
        (table("rows", conversations="mesages"), "'conversations': no column 'mesages': did you mean 'messages'"),
        (table("rows", image="x"), r"'image': no column 'x' \(there are messages, images\)"),
        (table("rows", name="x"), r"has no option 'name' \(there are path, split, root, conversations, image\)"),
        (table("rows", splitt="x"), "has no option 'splitt': did you mean 'split'"),
        (table("someone/charts"), "hf download someone/charts --repo-type dataset"),
        ({"annotation": "someone/charts"}, "hf download someone/charts --repo-type dataset"),
        ({"annotation": "none-*.parquet"}, "does not exist"),
        ({"annotation": "shards"}, "without a saved Dataset or Parquet files"),
    ],
)
def test_mistakes_about_tables_are_told_by_name(tables, entry, message):
    with pytest.raises(UserError, match=message):
        of(tables, entry)


def test_a_split_of_a_download_is_chosen(tables):
    assert len(of(tables, table("hub", split="train"))) == 8


def test_a_table_without_turns_says_which_columns_there_are(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"question": "?"}]).to_parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(UserError, match=r"no column 'conversations' or 'messages'.*there are question"):
        of(tmp_path, {"annotation": "a.parquet"})
    datasets.Dataset.from_list([{"mesages": [ASK]}]).to_parquet(str(tmp_path / "b.parquet"))
    with pytest.raises(UserError, match=r'"source": "datasets", "options": {"path": ..., "conversations": "mesages"}}'):
        of(tmp_path, {"annotation": "b.parquet"})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"instruction": "?", "output": "!"}, "fields 'instruction', 'output': .* in 'conversations' or 'messages'$"),
        ({"id": 1, "conversation": [ASK]}, "fields 'id', 'conversation': .*: did you mean 'conversations'"),
    ],
)
def test_json_lines_without_turns_say_which_fields_there_are(tmp_path, record, message):
    (tmp_path / "a.jsonl").write_text((json.dumps(record) + "\n") * 2)
    with pytest.raises(UserError, match=message):
        load_meta(tmp_path / "a.jsonl")


# -- captions

CAPTIONS = {
    "a.jpg": b"pixels",
    "a.txt": "Tee für zwei.\n".encode(),
    "b.png": b"pixels",
    "b.json": b'{"url": "https://host/b.png"}',
    "b.txt": b"Coffee.",
    "c.jpg": b"pixels",
    "d.txt": b"No picture.",
    "e.jpg": b"pixels",
    "e.txt": b"\xff",
}


def test_captions_in_txt_answer_the_question_of_the_meta_file(tmp_path):
    write_tar(tmp_path / "s.tar", CAPTIONS)
    source = of(tmp_path, {"shards": "s.tar", "caption": "What is shown?"})
    told = []
    for row in range(len(source)):
        try:
            raw = source.read(row)
            assert raw.resolve(raw.data["image"][0]).read() == b"pixels"
            assert raw.data["conversations"][0] == {"from": "human", "value": "What is shown?"}
            told.append((source.key(row), raw.data["conversations"][1]["value"]))
        except SampleError as error:
            told.append((source.key(row), error.reason))
    assert told == [
        ("a", "Tee für zwei."),
        ("b", "Coffee."),
        ("c", "record_missing"),
        ("d", "image_missing"),
        ("e", "invalid_utf8"),
    ]
    assert of(tmp_path, {"shards": "s.tar", "caption": "And here?"}).content != source.content
    with pytest.raises(SampleError, match="'caption' in the meta file"):
        of(tmp_path, {"shards": "s.tar"}).read(0)


def test_a_caption_belongs_to_shards(tmp_path):
    (tmp_path / "a.jsonl").write_text(LINE)
    with pytest.raises(UserError, match="'caption' belongs to 'shards'"):
        of(tmp_path, {"annotation": "a.jsonl", "caption": "What?"})
