"""Fields that nobody knows are counted by their names."""

from __future__ import annotations

import json

from helpers.factory import write_jsonl

from internvl_pack.cli import main
from internvl_pack.sources import load_meta, open_source
from internvl_pack.survey.validate import count_unknown_fields, report_lines


def test_unknown_fields_are_counted_by_dataset_and_told_by_validate(tmp_path, capsys):
    meta = write_jsonl(tmp_path, 30)
    path = tmp_path / "made.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["sytem"] = "You are a pirate."
        if number % 3 == 0:
            row["conversations"][1]["los"] = False
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "half a rec")
    sources = [open_source(spec) for spec in load_meta(meta)]
    counts = count_unknown_fields(sources)
    assert counts == {"made: sytem": 30, "made: conversations[].los": 10}
    assert count_unknown_fields(sources, max_rows=4)["made: sytem"] == 4
    assert main(["validate", str(meta), "--json"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert "passed over, as no such field is known: made: sytem (30 records): did you mean 'system'?" in out
    assert "known: made: conversations[].los (10 records): did you mean 'loss'?" in "".join(out)
    assert all(line in out for line in report_lines(counts))
    assert json.loads(out[-1])["unknown_fields"] == counts


def test_a_misspelt_field_and_images_elsewhere_are_hinted_at(tmp_path, capsys):
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Tea."}]
    rows = [{"conversations": turns, "imgae": "a.png"}, {"conversations": turns, "image": "b.png"}]
    path = tmp_path / "made.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["validate", str(path)]) == 1
    out = capsys.readouterr().out
    assert "1 placeholder <image>, but no image; the record has 'imgae': did you mean 'image'?" in " ".join(out.split())
    assert f"dataset 'made': image names are joined to {tmp_path}; if they lie elsewhere, give" in out
