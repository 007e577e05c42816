"""Images are prepared in processes that can be ended, and refused as soon as they are too many."""

import asyncio
import zlib

import msgspec
import numpy as np
import pytest

from milepost.engine.media import Given, ImageFacts, MediaRules, Preparer
from milepost.engine.media.facts import VideoFacts
from milepost.errors import InvalidPromptError
from milepost.images import FrameSampling, ImageSettings, prepare
from milepost.images.tiles import prepare_tiles
from milepost.images.videos import prepare_file
from tests import tiled
from tests.images.pictures import picture
from tests.pictured_chat import data_url, image

SETTINGS = ImageSettings(patch_size=4, min_pixels=64, max_pixels=4096)
FACTS = ImageFacts(settings=SETTINGS, token_id=1, text="")


def preparer_of(facts=FACTS, max_tokens=1000):
    return Preparer(facts, MediaRules(), max_images=99, max_tokens=max_tokens)


def prepared(*sources, max_tokens=1000, facts=FACTS):
    async def main():
        preparer = preparer_of(facts, max_tokens)
        try:
            return (await preparer.prepare([Given(source) for source in sources])).found
        finally:
            await preparer.close()

    return asyncio.run(main())


def bomb(side):
    """A PNG whose header says that it is this large."""

    def chunk(kind, body):
        check = zlib.crc32(kind + body).to_bytes(4, "big")
        return len(body).to_bytes(4, "big") + kind + body + check

    head = side.to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    body = zlib.compress(bytes(2**22))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def test_what_a_process_prepares_is_what_is_prepared_here():
    shown = [image(8, 8, seed) for seed in range(5)]
    found = [each.pictures[0] for each in prepared(*map(data_url, shown), shown[0])]
    expected = [prepare(each, SETTINGS) for each in (*shown, shown[0])]
    assert [each.record.identity for each in found] == [each.identity for each in expected]
    assert found[3].record.rows == expected[3].rows.tobytes()
    assert (found[3].num_tokens, found[3].num_positions) == (64, 8)


def test_tiles_come_with_their_labels_and_all_their_tokens():
    facts = ImageFacts(settings=tiled.SETTINGS, token_id=1, text="<image>")
    large = picture(64, 96)
    (found,) = prepared(data_url(large), facts=facts)
    expected = prepare_tiles(large, tiled.SETTINGS)
    assert list(found.texts) == [each.label for each in expected]
    assert [each.record.identity for each in found.pictures] == [
        each.image.identity for each in expected
    ]
    assert found.num_tokens == sum(each.image.num_tokens for each in expected) == 108
    assert found.num_bytes == sum(each.image.rows.nbytes for each in expected)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (bomb(60000), "pixels"),
        (bomb(2000)[:-40], "image"),
        (b"\xff\xd8\xff" + bytes(100), "image"),
        (b"GIF89a" + b"\xff" * 50, "image"),
    ],
)
def test_hostile_files_are_refused_and_others_are_served(source, message):
    async def main():
        preparer = preparer_of()
        try:
            for _ in range(3):
                with pytest.raises(InvalidPromptError, match=message):
                    await preparer.prepare([Given(source)])
            return (await preparer.prepare([Given(data_url(image(8, 8)))])).found
        finally:
            await preparer.close()

    (found,) = asyncio.run(main())
    assert found.num_tokens == 64


def test_more_images_than_a_prompt_can_have_are_refused():
    url = data_url(image(8, 8))
    assert len(prepared(*[url] * 3, max_tokens=193)) == 3
    with pytest.raises(InvalidPromptError, match="images of 192 tokens or more") as caught:
        prepared(*[url] * 40, max_tokens=192)
    assert caught.value.is_too_long


def test_a_caller_that_leaves_ends_the_work():
    async def main():
        preparer = preparer_of(max_tokens=10**6)
        images = [Given(data_url(image(8, 8, seed))) for seed in range(20)]
        task = asyncio.create_task(preparer.prepare(images))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        try:
            return len((await preparer.prepare(images[:2])).found)
        finally:
            await preparer.close()

    assert asyncio.run(main()) == 2


def test_a_video_file_is_decoded_in_a_process(tmp_path):
    """Within its memory, and in its own words if it is cut short."""
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "video.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 10, (1920, 1080))
    for seed in range(12):
        writer.write(np.asarray(picture(1080, 1920, seed)))
    writer.release()
    video = VideoFacts(
        settings=SETTINGS, sampling=FrameSampling(), token_id=2, text="", max_videos=1
    )
    facts, data = msgspec.structs.replace(FACTS, video=video), path.read_bytes()

    async def main(data):
        preparer = preparer_of(facts)
        try:
            return (await preparer.prepare([Given(data, is_video=True)])).found
        finally:
            await preparer.close()

    (found,) = asyncio.run(main(data))
    expected = prepare_file(data, SETTINGS, FrameSampling())
    assert [each.record.identity for each in found.pictures] == [
        each.image.identity for each in expected
    ]
    with pytest.raises(InvalidPromptError, match=r"the MP4 video of .* cut short"):
        asyncio.run(main(data[: len(data) // 2]))
