"""The meta file: what it may say, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import logging
import shutil

import pytest

from internvl_pack.errors import UserError
from internvl_pack.sources import DatasetSpec, load_meta, open_source

ROW = '{"id": "r", "conversations": []}\n'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "images").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(ROW)
    for number in range(3):
        (tmp_path / "data" / f"s-{number:03}.tar").write_bytes(bytes(10240))
    return tmp_path


def write(folder, content) -> str:
    path = folder / "meta.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def entry(**changes):
    given = {"root": "images", "annotation": "data/a.jsonl", "data_augment": False, "repeat_time": 1, **changes}
    return {key: value for key, value in given.items() if value is not ...}


def test_all_keys_are_read_and_paths_stand_against_the_meta_files_folder(folder):
    path = write(folder, {"a": entry(data_augment=True, repeat_time=0.5, max_dynamic_patch=6, length=1, weight=2)})
    assert load_meta(path) == (
        DatasetSpec(
            name="a",
            root=str(folder / "images"),
            annotation=str(folder / "data" / "a.jsonl"),
            data_augment=True,
            repeat_time=0.5,
            weight=2.0,
            max_dynamic_patch=6,
            length=1,
            meta_file=path,
        ),
    )


def test_what_is_left_out_has_a_default(folder):
    (spec,) = load_meta(write(folder, {"a": {"annotation": "data/a.jsonl"}}))
    assert (spec.repeat_time, spec.data_augment, spec.weight, spec.max_dynamic_patch) == (1.0, False, None, None)
    assert spec.root == str(folder)  # image names, like all paths, stand against the meta file's folder


def test_order_of_the_datasets_is_the_files(folder):
    path = write(folder, {name: entry() for name in ("z", "a", "m")})
    assert [spec.name for spec in load_meta(path)] == ["z", "a", "m"]


def test_absolute_paths_stand_for_themselves(folder):
    other = folder / "elsewhere"
    other.mkdir()
    path = write(other, {"a": entry(annotation=str(folder / "data/a.jsonl"), root=str(folder / "images"))})
    (spec,) = load_meta(path)
    assert spec.annotation == str(folder / "data" / "a.jsonl")
    assert spec.root == str(folder / "images")


def test_a_remote_root_is_kept(folder):
    (spec,) = load_meta(write(folder, {"a": entry(root="s3://bucket/images")}))
    assert spec.root == "s3://bucket/images"


@pytest.mark.parametrize(
    ("shards", "numbers"),
    [
        ("data/s-001.tar", [1]),
        ("data/s-{000..002}.tar", [0, 1, 2]),
        ("data/s-{000,002}.tar", [0, 2]),
        (["data/s-{001..002}.tar", "data/s-000.tar"], [1, 2, 0]),
        ("data/s-002.tar::data/s-000.tar", [2, 0]),
    ],
)
def test_shards_are_a_path_a_brace_pattern_or_a_list(folder, shards, numbers):
    (spec,) = load_meta(write(folder, {"a": {"shards": shards}}))
    assert spec.shards == tuple(str(folder / "data" / f"s-{number:03}.tar") for number in numbers)
    assert spec.annotation is None


def test_paths_of_the_working_folder_are_taken_with_a_warning(folder, monkeypatch, caplog):
    (folder / "meta").mkdir()
    monkeypatch.chdir(folder)
    (spec,) = load_meta(write(folder / "meta", {"a": entry()}))
    assert spec.annotation == str(folder / "data" / "a.jsonl")
    assert spec.root == str(folder / "images")
    assert sum("working folder" in record.message for record in caplog.records) == 2


def test_the_meta_files_folder_comes_before_the_working_folder(folder, monkeypatch, tmp_path):
    other = tmp_path / "other"
    (other / "data").mkdir(parents=True)
    (other / "data" / "a.jsonl").write_text(ROW * 3)
    monkeypatch.chdir(other)
    (spec,) = load_meta(write(folder, {"a": entry()}))
    assert spec.annotation == str(folder / "data" / "a.jsonl")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"annotation": ...}, ["neither 'annotation' nor 'shards'"]),
        ({"shards": "data/s-000.tar"}, ["both 'annotation' and 'shards'"]),
        ({"annotation": "data/gone.jsonl"}, ["'annotation'", "gone.jsonl", "does not exist"]),
        ({"annotation": "data"}, ["'annotation'", "is a folder"]),
        ({"annotation": ""}, ["'annotation' is empty"]),
        ({"annotation": 7}, ["'annotation'", "must be a string", "a number"]),
        ({"annotation": ["data/a.jsonl"]}, ["'annotation'", "must be a string", "a list"]),
        ({"annotation": "a\0b"}, ["'annotation'", "file name"]),
        ({"root": 3}, ["'root'", "must be a string"]),
        ({"repeat_time": 0}, ["'repeat_time'", "more than 0"]),
        ({"repeat_time": -1}, ["'repeat_time'", "more than 0"]),
        ({"repeat_time": "2"}, ["'repeat_time'", "must be a number", "'2'"]),
        ({"repeat_time": True}, ["'repeat_time'", "must be a number"]),
        ({"repeat_time": 10**400}, ["'repeat_time'"]),
        ({"weight": -0.5}, ["'weight'", "at least 0"]),
        ({"weight": []}, ["'weight'", "must be a number"]),
        ({"data_augment": "false"}, ["'data_augment'", "true or false", "'false'"]),
        ({"data_augment": 1}, ["'data_augment'", "true or false"]),
        ({"max_dynamic_patch": 0}, ["'max_dynamic_patch'", "at least 1"]),
        ({"max_dynamic_patch": 6.5}, ["'max_dynamic_patch'", "whole number"]),
        ({"length": -1}, ["'length'", "at least 0"]),
        ({"repeat_tme": 2}, ["unknown key 'repeat_tme'", "did you mean 'repeat_time'"]),
        ({"Annotation": "x"}, ["unknown key 'Annotation'", "did you mean 'annotation'"]),
        ({"annotation": ..., "shards": []}, ["'shards' is an empty list"]),
        ({"annotation": ..., "shards": [1]}, ["'shards' must be a path"]),
        ({"annotation": ..., "shards": "data/s-{000..004}.tar"}, ["'shards'", "s-003.tar does not exist"]),
        ({"annotation": ..., "shards": "data/s-{000..001.tar"}, ["'shards'", "cannot be expanded"]),
        ({"annotation": ..., "shards": "data/s-*.tar"}, ["'shards'", "does not exist", "braces"]),
        ({"annotation": ..., "shards": ["data/s-000.tar", "./data/s-000.tar"]}, ["s-000.tar twice", "repeat_time"]),
    ],
)
def test_a_mistake_is_one_line_with_file_dataset_and_key(folder, changes, words):
    path = write(folder, {"fine": entry(), "wrong one": entry(**changes)})
    with pytest.raises(UserError) as error:
        load_meta(path)
    message = str(error.value)
    assert "\n" not in message
    for word in [path, "'wrong one'", *words]:
        assert word in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["line 1"]),
        ("{", ["line 1"]),
        ('{"a": {}', ["line 1", "column"]),
        ("[]", ["one JSON object", "a list"]),
        ("null", ["one JSON object", "null"]),
        ("{}", ["no dataset"]),
        ('{"a": [1]}', ["'a'", "expected an object", "a list"]),
        ('{"": {}}', ["give it a name"]),
        ('{"a": {"annotation": "x"}, "a": {"annotation": "y"}}', ["'a' is given twice"]),
        ('{"a": {"annotation": "x", "annotation": "y"}}', ["'annotation' is given twice"]),
        ('{"a": {"repeat_time": NaN}}', ["NaN"]),
        ("[" * 100_000, ["nested too deeply"]),
        ('{"\\ud800": {"annotation": "x"}}', ["surrogate"]),
    ],
)
def test_a_file_that_is_no_meta_file_is_refused(folder, content, words):
    with pytest.raises(UserError) as error:
        load_meta(write(folder, content))
    for word in ["meta.json", *words]:
        assert word in str(error.value)


def test_a_meta_file_that_is_not_utf8_is_refused(folder):
    (folder / "meta.json").write_bytes(b'{"caf\xe9": {}}')
    with pytest.raises(UserError, match="byte 5 is not UTF-8"):
        load_meta(folder / "meta.json")


def test_a_byte_order_mark_is_no_mistake(folder):
    (folder / "meta.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"a": entry()}).encode())
    assert load_meta(folder / "meta.json")[0].name == "a"


@pytest.mark.parametrize("name", ["gone.json", "images", "a\0b"])
def test_a_missing_meta_file_is_named(folder, name):
    with pytest.raises(UserError, match="meta file"):
        load_meta(f"{folder}/{name}")


def test_unknown_keys_are_ignored_with_a_warning_and_comments_without(folder, caplog):
    load_meta(write(folder, {"_comment": "text", "a": entry(license="CC BY", _note="x")}))
    assert [record.message for record in caplog.records if "license" in record.message]
    assert not [record.message for record in caplog.records if "_note" in record.message]


def test_a_root_that_is_no_folder_is_warned_of(folder, caplog):
    load_meta(write(folder, {"a": entry(root="gone")}))
    assert "'root'" in caplog.text
    assert "gone" in caplog.text


def test_a_wrong_length_is_warned_of_and_the_real_count_used(folder, caplog):
    (spec,) = load_meta(write(folder, {"set a": entry(length=999)}))
    with caplog.at_level(logging.WARNING):
        source = open_source(spec)
    assert len(source) == 1
    assert len(source.warnings) == 1
    for word in ("set a", "meta.json", "'length'", "999", "it has 1 row;"):
        assert word in caplog.text


@pytest.fixture
def cases(shared_dir, tmp_path):
    """A copy of the hostile cases, with the meta files in the folder that their paths stand against."""
    shutil.copytree(shared_dir / "cases", tmp_path / "cases")
    for path in (tmp_path / "cases" / "meta").glob("*.json"):
        shutil.copy(path, tmp_path / "cases")
    return tmp_path / "cases"


def test_case_missing_repeat_time_is_one(cases):
    assert load_meta(cases / "missing_repeat_time.json")[0].repeat_time == 1.0


def test_case_missing_annotation_file_names_the_dataset(cases):
    with pytest.raises(UserError, match=r"'gone'.*nope\.jsonl does not exist"):
        load_meta(cases / "missing_annotation_file.json")


def test_case_length_field_wrong(cases):
    source = open_source(load_meta(cases / "length_field_wrong.json")[0])
    assert len(source) == 6
    assert "999" in source.warnings[0]


def test_case_annotation_is_a_json_array(cases):
    (spec,) = load_meta(cases / "annotation_is_json_not_jsonl.json")
    with pytest.raises(UserError, match=r"records_array\.json is a JSON array.*json.load"):
        open_source(spec)


def test_cases_work_from_the_working_folder_too(cases, monkeypatch):
    monkeypatch.chdir(cases)
    assert len(open_source(load_meta("meta/missing_repeat_time.json")[0])) == 6


def test_comments_beside_datasets_are_passed_over(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "meta.json").write_text(json.dumps({"_by": "us", "_list": [1], "a": {"annotation": "a.jsonl"}}))
    assert [spec.name for spec in load_meta(tmp_path / "meta.json")] == ["a"]


def test_the_hint_for_missing_images_names_the_key_that_is_read():
    beside = DatasetSpec(name="a", root="/images").where_images_are
    assert "joined to /images" in beside and beside.endswith("as 'root' in a meta file")
    of_a_kind = DatasetSpec(name="a", source="mine", options={"root": "/images"}).where_images_are
    assert "joined to /images" in of_a_kind and of_a_kind.endswith("beside a 'source' in its 'options'")
