"""Names of images as people write them: found by either normal form, hinted at, or refused in a short line."""

from __future__ import annotations

import base64
import unicodedata

import pytest

from internvl_pack.errors import SampleError
from internvl_pack.sources.files import Stamp
from internvl_pack.sources.image_refs import FolderResolver
from internvl_pack.sources.members import MemberResolver
from internvl_pack.sources.names import refuse_embedded

NAME = "한글 사진 é.jpg"


def message(resolve, name: str) -> str:
    with pytest.raises(SampleError) as caught:
        resolve(name).read()
    return str(caught.value)


@pytest.mark.parametrize("written, stored", [("NFC", "NFD"), ("NFD", "NFC")])
def test_a_file_is_found_by_the_other_normal_form_of_its_name(tmp_path, written, stored):
    (tmp_path / unicodedata.normalize(stored, NAME)).write_bytes(b"pixels")
    ref = FolderResolver(str(tmp_path))(unicodedata.normalize(written, NAME))
    assert ref.read() == ref.open().read() == b"pixels" and ref.head(3) == b"pix"


def test_a_name_of_its_own_form_comes_first(tmp_path):
    for form in ("NFC", "NFD"):
        (tmp_path / unicodedata.normalize(form, NAME)).write_bytes(form.encode())
    resolve = FolderResolver(str(tmp_path))
    assert [resolve(unicodedata.normalize(form, NAME)).read() for form in ("NFC", "NFD")] == [b"NFC", b"NFD"]


@pytest.mark.parametrize("name", ["a/Photo.JPG", "A/photo.jpg", "A/PHOTO.jpg", "a\\photo.jpg"])
def test_a_near_name_is_hinted_at(tmp_path, name):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "photo.jpg").write_bytes(b"x")
    told = message(FolderResolver(str(tmp_path)), name)
    assert told.startswith("image_missing") and repr(str(tmp_path / "a" / "photo.jpg")) in told


def test_a_name_that_nothing_resembles_has_no_hint(tmp_path):
    (tmp_path / "b.jpg").write_bytes(b"x")
    assert message(FolderResolver(str(tmp_path)), "a.jpg").endswith("a.jpg'")


PICTURE = base64.b64encode(bytes(range(256)) * 40).decode()


@pytest.mark.parametrize("name", [PICTURE, "/9j/" + PICTURE[:300], "\n /9j/" + PICTURE[:300]])
def test_a_picture_in_the_record_is_refused_in_a_short_line(tmp_path, name):
    members = MemberResolver("a.tar", Stamp(1, 1), "k", ())
    for resolve in (FolderResolver(str(tmp_path)), members):
        told = message(resolve, name)
        assert told.startswith("image_field") and len(told) < 200


@pytest.mark.parametrize("name", ["a" * 300 + ".jpg", "/".join(["folder"] * 60), "data/a.jpg", "a" * 200])
def test_long_names_are_names(name):
    refuse_embedded(name)


def test_a_long_name_is_not_told_whole(tmp_path):
    assert len(message(FolderResolver(str(tmp_path)), "a" * 5000 + ".jpg")) < 500
