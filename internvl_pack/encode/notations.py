"""Images that annotations of other tools write in another way than `<image>`.

    <img>cat.jpg</img>   <IMAGE>   <image_1>   <image 1>   <|image_1|>   <|image_pad|>   <ImageHere>   [IMG]   [image]
    <img>   <start_of_image>   <|media|>   <__media__>   and of what is no image <|video_pad|>   <VIDEO>   <audio>

They are taken for `<image>` where that is clear: no human turn has an `<image>`, and one notation occurs exactly as
often as there are images, numbers in order. Everywhere else they are refused rather than trained as text in silence,
but for what text may well hold: `[IMG]` within a line ("What does [IMG] mean?"), and the number of an image that has
its `<image>` ("<image>\\nDescribe <image_1>"). In other turns a file name between `<img>` and `</img>` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import SampleError
from ..options import count
from ..sources.normalise import NAMED_IN_TEXT

PLACEHOLDER = "<image>"

# The first character by itself: a search for two characters is fast.
_NOTATION = re.compile(
    r"[<\[](?i:"
    r"(?<=<)\|?image[ _-]?(?P<number>[0-9]{1,4})\|?>"
    r"|(?P<file>(?<=<)img>[^<>\n]{1,1000}\.\w{2,5}</img>)"
    r"|(?<=<)img><ImageHere></img>|(?<=<)img ?/?>"
    r"|(?<=<)(?:\|vision_start\|><)?\|image(?:_pad)?\|>(?:<\|vision_end\|>)?"
    r"|(?<=<)image>|(?<=<)image_(?:placeholder|pad|token)>|(?<=<)ImageHere>|(?<=<)start_of_image>"
    r"|(?<=<)(?:\|media\||__media__)>|(?<=\[)(?:IMG|image)\]"
    r"|(?P<video>(?<=<)(?:\|vision_start\|><)?\|video(?:_pad)?\|>(?:<\|vision_end\|>)?|(?<=<)video>)"
    r"|(?P<audio>(?<=<)audio>|(?<=<)\|audio\|>))"
)


def bind_other_notations(turns: Sequence[tuple[str, str]], num_images: int) -> list[tuple[str, str]]:
    """The turns, other notations of images in human ones written as `<image>` where they are clear.

    Args:
        turns: (role, text).
        num_images: of the sample.

    Raises:
        SampleError: `placeholder_mismatch`, one is neither clear nor text.
    """
    for role, text in turns:
        if role != "human" and (named := NAMED_IN_TEXT.search(text)):
            raise SampleError(
                "placeholder_mismatch",
                f"{named[0][:60]!r} stands in a turn of {role!r}, where it is neither an image nor text: write <image> "
                "into the user's turn, or remove it",
            )
    human = [text for role, text in turns if role == "human"]
    # Most texts hold no other bracket than that of a placeholder, and counting is faster than a search.
    suspect = [text for text in human if "[" in text or text.count("<") > text.count(PLACEHOLDER)]
    others = [(m, text) for text in suspect for m in _NOTATION.finditer(text) if m[0] not in (PLACEHOLDER, "<video>")]
    if not others:
        return list(turns)
    num_placeholders = sum(text.count(PLACEHOLDER) for text in human)
    matches = [match for match, _ in others]
    if num_placeholders == 0 and len(matches) == num_images and _are_clear(matches):
        return [(role, _NOTATION.sub(PLACEHOLDER, text) if role == "human" else text) for role, text in turns]
    bound = num_placeholders == num_images
    for match, text in others:
        if not _is_text(match, text, bound, num_images):
            what = f"write <image>; the record has {count(num_images, 'images')}"
            if match["audio"] or match["video"]:
                what = "audio is not read" if match["audio"] else "write <video>"
            raise SampleError("placeholder_mismatch", f"{match[0][:60]!r} stands where no text does: {what}")
    return list(turns)


def _are_clear(matches: Sequence[re.Match[str]]) -> bool:
    if any(match["file"] or match["audio"] or match["video"] for match in matches):
        return False
    numbers = [int(match["number"] or -1) for match in matches]
    if -1 in numbers:
        return len({match[0].lower() for match in matches}) == 1
    return numbers == list(range(numbers[0], numbers[0] + len(numbers))) and numbers[0] in (0, 1)


def _is_text(match: re.Match[str], text: str, bound: bool, num_images: int) -> bool:
    """Whether a notation may stay as it is typed. `bound`: each image has its `<image>`, or there is none of either."""
    if match["file"]:
        return False
    if match["number"]:
        return bound and 0 < num_images >= int(match["number"])
    before, after = text[: match.start()].rpartition("\n")[2], text[match.end() :].partition("\n")[0]
    return bound and bool(before.strip() and after.strip())
