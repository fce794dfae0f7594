"""Records of several answers: every form, and that each branch has the ids of its answer alone."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.chat_tokenizers import of_format
from helpers.encode_samples import SPEC, assert_branches_are_the_answers, jpeg, raw_sample

from internvl_pack.encode import EncodeConfig, Encoder
from internvl_pack.encode.formats import known_templates
from internvl_pack.errors import SampleError
from internvl_pack.packing.budget import Budget
from internvl_pack.packing.split import split
from internvl_pack.records import Branch, Record

ASKED = "<image>\nWhat is it?"
CHOSEN, REJECTED = "A crane over water.", "A dog."
USER, GOOD, BAD = (
    {"role": "user", "content": ASKED},
    {"role": "assistant", "content": CHOSEN},
    {"role": "assistant", "content": REJECTED},
)
PARTS = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}
FORMS = {
    "MMPR": {"question": ASKED, "chosen": CHOSEN, "rejected": REJECTED},
    "TRL, texts": {"prompt": ASKED, "chosen": CHOSEN, "rejected": REJECTED},
    "TRL, turns": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "TRL, implicit prompt": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "TRL, prompt and whole conversations": {"prompt": ASKED, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "TRL, prompt and one whole conversation": {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [BAD]},
    "TRL, parts": {"prompt": [PARTS], "chosen": [GOOD], "rejected": [BAD]},
    "LLaMA-Factory": {"conversations": [{"from": "human", "value": ASKED}], "chosen": {"from": "gpt", "value": CHOSEN}}
    | {"rejected": {"from": "gpt", "value": REJECTED}},
    "messages": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "ms-swift": {"messages": [USER, GOOD], "rejected_response": REJECTED},
    "nulls of a joined table": {"question": ASKED, "chosen": CHOSEN, "rejected": REJECTED, "prompt": None}
    | {"answers": [], "conversations": None},
}


CONV_STYLES = sorted({*known_templates(), "chat_template"})


def encoder(tokenizer, objective="dpo", conv_style="internvl2_5"):
    return Encoder(tokenizer, EncodeConfig(conv_style=conv_style, tokens_per_tile=4, objective=objective))


def sample(fields, images=("a.jpg",)):
    return raw_sample(
        fields.get("conversations"),
        {name: jpeg() for name in images},
        **{name: value for name, value in fields.items() if name != "conversations"},
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_pair_in_every_form(tokenizer, form):
    tree = encoder(tokenizer).encode(sample(FORMS[form]), SPEC)
    plain = encoder(tokenizer, "sft")
    turns = [[("human", ASKED), ("gpt", answer)] for answer in (CHOSEN, REJECTED)]
    assert_branches_are_the_answers(tree, [plain.encode(raw_sample(t, {"a.jpg": jpeg()}), SPEC) for t in turns])
    assert tree.record.is_pair and tree.record.num_tiles == 1
    assert tree.record.num_prefix_tokens > tree.record.num_tokens // 2


@pytest.mark.parametrize("text", ["[]", "{}", "null"])
def test_an_answer_of_json_is_an_answer(tokenizer, text):
    tree = encoder(tokenizer).encode(sample(FORMS["MMPR"] | {"chosen": text}), SPEC)
    plain = encoder(tokenizer, "sft")
    turns = [[("human", ASKED), ("gpt", answer)] for answer in (text, REJECTED)]
    assert_branches_are_the_answers(tree, [plain.encode(raw_sample(t, {"a.jpg": jpeg()}), SPEC) for t in turns])


@pytest.mark.parametrize("conv_style", CONV_STYLES)
def test_answers_that_begin_alike_share_what_is_before_them(tokenizer, conv_style):
    answers = ["A crane over water.", "A crane over land, I think.", "  A", "\nNo.", "A"]
    turns = [("human", "Hello."), ("gpt", "Hi!"), ("human", "What is it?")]
    assert_a_group_is_its_answers(of_format(tokenizer, conv_style), conv_style, turns, answers)


@pytest.mark.parametrize("conv_style", CONV_STYLES)
def test_answers_about_many_images(tokenizer, conv_style):
    images = {f"{number}.jpg": jpeg(60 + number, 40) for number in range(7)}
    turns = [("human", "<image>\n<image>\nCompare."), ("gpt", "Alike."), ("human", "<image>" * 5 + "And these?")]
    assert_a_group_is_its_answers(
        of_format(tokenizer, conv_style), conv_style, turns, ["Yes.", "Yes, all.", "No"], images
    )


@pytest.mark.parametrize("conv_style", CONV_STYLES)
@pytest.mark.parametrize("images", [(), ("a.jpg",)], ids=["text", "image"])
def test_pairs_in_every_chat_format(tokenizer, conv_style, images):
    tokenizer = of_format(tokenizer, conv_style)
    asked = "<image>\nWhat is it?" if images else "What is it?"
    pair = {"question": asked, "chosen": "A crane.", "rejected": "A crane, or a dog."}
    tree = encoder(tokenizer, "mpo", conv_style).encode(sample(pair, images), SPEC)
    plain = encoder(tokenizer, "sft", conv_style)
    alone = [
        plain.encode(raw_sample([("human", asked), ("gpt", pair[name])], {name: jpeg() for name in images}), SPEC)
        for name in ("chosen", "rejected")
    ]
    assert_branches_are_the_answers(tree, alone)
    assert tree.record.is_pair and tree.record.num_tiles == len(images)


def assert_a_group_is_its_answers(tokenizer, conv_style, turns, answers, images=None):
    one = encoder(tokenizer, "sft", conv_style)
    system = {} if conv_style == "internvl_zh" else {"system": "Be brief."}
    tree = one.encode(raw_sample(turns, images, answers=answers, **system), SPEC)
    alone = []
    for answer in answers:
        record = raw_sample([*turns, ("gpt", answer)], images, **system)
        record.data["conversations"][1]["loss"] = False  # of the prompt nothing is trained
        alone.append(one.encode(record, SPEC))
    assert_branches_are_the_answers(tree, alone)
    assert not tree.record.is_pair and tree.record.num_tiles == len(images or ())


def test_a_group_has_weights_and_rewards(tokenizer):
    answers = ["Yes.", {"text": "No.", "weight": 0.5}, {"text": "Perhaps.", "reward": -1}]
    tree = encoder(tokenizer, "sft").encode(raw_sample([("human", "Is it?")], answers=answers), SPEC)
    assert [(b.weight, b.reward) for b in tree.branches] == [(1.0, None), (0.5, None), (1.0, -1.0)]


def test_several_answers_of_a_conversation_are_one(tokenizer):
    """What both begin with is the prompt, but for an answer that both begin with."""
    again = {"role": "user", "content": "Sure?"}
    record = {"chosen": [USER, GOOD, again, GOOD], "rejected": [USER, GOOD, again, BAD]}
    tree = encoder(tokenizer).encode(sample(record), SPEC)
    trained = [b.num_loss_tokens for b in tree.branches]
    one = encoder(tokenizer).encode(sample(FORMS["MMPR"]), SPEC)
    assert trained == [b.num_loss_tokens for b in one.branches]
    same = encoder(tokenizer).encode(sample({"chosen": [USER, GOOD], "rejected": [USER, GOOD, again, BAD]}), SPEC)
    assert same.branches[1].num_loss_tokens > trained[0]


def test_answers_beside_a_conversation_that_has_one_are_not_read(tokenizer):
    """VQA data have them, for evaluation: such records train as they did."""
    plain = encoder(tokenizer, "sft")
    turns = [("human", ASKED), ("gpt", CHOSEN)]
    with_answers = plain.encode(
        raw_sample(turns, {"a.jpg": jpeg()}, answers=["a", {"score": 1}], question="What?"), SPEC
    )
    without = plain.encode(raw_sample(turns, {"a.jpg": jpeg()}), SPEC)
    assert not with_answers.branches and with_answers.record == without.record
    np.testing.assert_array_equal(with_answers.input_ids, without.input_ids)


@pytest.mark.parametrize("fields", [{"label": True}, {"label": 0}, {"kto_tag": True, "label": "cat"}, {"kto_tag": 1}])
def test_an_answer_that_is_not_labelled_as_a_bad_one_is_trained(tokenizer, fields):
    turns, images = [("human", ASKED), ("gpt", CHOSEN)], {"a.jpg": jpeg()}
    one, other = (encoder(tokenizer, "sft").encode(raw_sample(turns, images, **f), SPEC) for f in (fields, {}))
    np.testing.assert_array_equal(one.labels, other.labels)


BAD_RECORDS = {
    "preference_data": ("sft", FORMS["MMPR"], "with --objective dpo or mpo"),
    "preference_data, swift": ("sft", FORMS["ms-swift"], "with --objective dpo or mpo"),
    "no_preference_data": ("mpo", {"messages": [USER, GOOD]}, "objective 'mpo' is of pairs"),
    "preference_data, KTO": ("sft", {"messages": [USER, BAD], "label": False}, "'label' is false: its answer is a bad"),
    "preference_data, KTO of LLaMA-Factory": ("sft", {"messages": [USER, BAD], "kto_tag": False}, "'kto_tag' is false"),
    "preference_data, KTO of TRL": ("dpo", {"prompt": [USER], "completion": [BAD], "label": False}, "'label' is false"),
    "unsupported_field": ("sft", {"conversations": [USER, GOOD], "chosen": CHOSEN}, "without a rejected one"),
    "answers, two prompts": ("dpo", FORMS["MMPR"] | {"prompt": ASKED}, "'prompt' and 'question' are both a prompt"),
    "answers, no prompt": ("dpo", {"chosen": CHOSEN, "rejected": REJECTED}, "no common prompt"),
    "answers, other prompts": ("dpo", {"chosen": [USER, GOOD], "rejected": [{"role": "user", "content": "No?"}, BAD]},
                               "no common prompt"),
    "answers, another prompt": ("dpo", {"prompt": "Who?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
                                "'chosen' begins with a turn that is no answer"),
    "answers, two pairs": ("dpo", FORMS["ms-swift"] | {"chosen": GOOD, "rejected": BAD}, "keep one of the two pairs"),
    "answers, large": ("sft", {"messages": [USER], "answers": [{"text": "a", "reward": 10**400}]}, "not a number"),
    "no_preference_data, empty": ("dpo", FORMS["MMPR"] | {"rejected": ""}, "the record has nothing in 'rejected'"),
    "no_preference_data, both empty": ("dpo", FORMS["MMPR"] | {"chosen": "", "rejected": []}, "in 'chosen' and"),
    "no_preference_data, messages": ("dpo", {"messages": [USER, GOOD], "rejected_messages": [USER, BAD]},
                                     "'rejected_messages', which are not read"),
    "unsupported_field, messages": ("sft", {"conversations": [USER, GOOD], "rejected_messages": [USER, BAD]},
                                    "'rejected_messages'"),
    "unsupported_field, images": ("dpo", FORMS["ms-swift"] | {"rejected_images": ["b.jpg"]}, "'rejected_images'"),
    "answers, ended": ("dpo", {"messages": [USER, GOOD], "chosen": GOOD, "rejected": BAD}, "ends with an answer"),
    "preference_data, a number": ("sft", {"messages": [USER, BAD], "kto_tag": 0}, "'kto_tag' is 0: its answer"),
    "preference_data, a text": ("sft", {"messages": [USER, BAD], "kto_tag": "False"}, "'kto_tag' is false: its answer"),
    "answers, the same": ("mpo", FORMS["MMPR"] | {"rejected": CHOSEN}, "'chosen' and 'rejected' are the same answer"),
    "answers, form": ("dpo", {"question": ASKED, "chosen": 3, "rejected": REJECTED}, "'chosen' is neither a text nor"),
    "answers, swift": ("dpo", {"messages": [USER], "rejected_response": REJECTED}, "last turn is the preferred answer"),
    "answers, group": ("sft", {"messages": [USER], "answers": [CHOSEN, 3]}, "answer 2 is neither a text nor"),
    "answers, unknown": ("sft", {"messages": [USER], "answers": [{"text": "a", "score": 1}]}, "answer 1 has 'score'"),
    "answers, weight": ("sft", {"messages": [USER], "answers": [{"text": "a", "weight": -1}]}, "'weight' of answer 1"),
    "answers, sums": ("sft", {"messages": [USER], "answers": [{"text": "a", "weight": 1e30}]}, "not a number of at"),
    "answers, reward": ("sft", {"messages": [USER], "answers": [{"text": "a", "reward": "x"}]}, "'reward' of answer 1"),
    "answers, no list": ("sft", {"messages": [USER], "answers": "a"}, "'answers' is no list"),
    "no_trained_token": ("dpo", FORMS["MMPR"] | {"rejected": " "}, "'rejected' has no answer with text"),
    "no_trained_token, group": ("sft", {"messages": [USER], "answers": ["a", ""]}, "answer 2 has no answer with text"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_RECORDS)
def test_other_records_are_refused_by_name(tokenizer, name):
    objective, fields, message = BAD_RECORDS[name]
    with pytest.raises(SampleError, match=message) as caught:
        encoder(tokenizer, objective).encode(sample(fields), SPEC)
    assert caught.value.reason == name.split(",")[0] and "\n" not in str(caught.value)


def test_the_objective_is_part_of_the_fingerprint_where_it_is_not_sft(tokenizer):
    assert "objective" not in encoder(tokenizer, "sft").fingerprint()
    assert json.loads(json.dumps(encoder(tokenizer, "mpo").fingerprint()))["objective"] == "mpo"


# --- cutting ----------------------------------------------------------------------------------------


def tree_record(prefix, *branches, tiles=2, is_pair=False):
    found = tuple(Branch(n, n - 1) for n in branches)
    return Record("t", prefix + sum(branches), tiles, sum(branches), branches=found, is_pair=is_pair)


def test_a_tree_is_cut_between_its_branches():
    record = tree_record(10, 5, 6, 3, 9, 2)
    budget = Budget(22, 4)
    parts = split(record, 7, budget)
    assert [(f.token_start, f.token_stop, f.num_prefix_tokens) for f in parts] == [
        (0, 21, 0),
        (21, 33, 10),
        (33, 35, 10),
    ]
    assert [f.num_tokens for f in parts] == [21, 22, 12] and {f.num_tiles for f in parts} == {2}
    assert [(f.position, f.index, f.count) for f in parts] == [(7, n, 3) for n in range(3)]
    assert [(f.index, f.count) for f in split(record, 7, Budget(35, 2))] == [(0, 1)]


def test_what_cannot_be_cut_is_refused():
    for change, budget, message in (
        ({}, Budget(14, 4), "an answer of 16 tokens with its prompt"),
        ({"tiles": 5}, Budget(99, 4), "5 tiles, a pack holds 99 and 4"),
        ({"is_pair": True}, Budget(20, 4), "a pair is not cut"),
    ):
        with pytest.raises(SampleError, match=message) as caught:
            split(tree_record(10, 5, 6, **change), 0, budget)
        assert caught.value.reason == "oversized_dropped"
    with pytest.raises(SampleError, match="max_seq_length is 12"):
        split(tree_record(10, 5, 6), 0, Budget(99, 4), max_segment_tokens=12)
    with pytest.raises(SampleError) as caught:
        split(tree_record(10, 5, 6), 0, Budget(20, 4), oversize="error")
    assert caught.value.reason == "oversized_error"


def test_parts_of_a_tree_are_its_prefix_and_some_branches(tokenizer):
    answers = [f"Answer {number} of several." for number in range(5)]
    one, raw = encoder(tokenizer, "sft"), raw_sample([("human", ASKED)], {"a.jpg": jpeg()}, answers=answers)
    outline = one.outline(raw, SPEC)
    tree = one.encode(raw, SPEC)
    room = tree.record.num_prefix_tokens + 2 * max(b.num_tokens for b in tree.branches)
    fragments = split(tree.record, 0, Budget(room, 1))
    parts = [one.encode_part(outline, fragment) for fragment in fragments]
    assert [len(part.branches) for part in parts] == [2, 2, 1]
    prefix = tree.record.num_prefix_tokens
    for part, fragment in zip(parts, fragments, strict=True):
        assert len(part.input_ids) == fragment.num_tokens and part.images == tree.images
        np.testing.assert_array_equal(part.input_ids[:prefix], tree.input_ids[:prefix])
    rest = np.concatenate([part.input_ids[prefix:] for part in parts])
    np.testing.assert_array_equal(rest, tree.input_ids[prefix:])
    with pytest.raises(SampleError, match="other lengths now") as caught:
        one.encode_part(outline, fragments[1]._replace(token_start=fragments[1].token_start + 1))
    assert caught.value.reason == "changed_since_survey"
