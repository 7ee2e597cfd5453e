"""A mailbox in an object store: a server that speaks S3, on this machine."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")
pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto", reason="moto is not installed: no server that speaks S3")

import boto3
from carried import Federation, assert_as_on_one_machine
from moto.server import ThreadedMotoServer

from fewbytes.mailbox.box import Box, BoxError


@pytest.fixture(scope="module")
def bucket():
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    region = "eu-central-1"
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (("ENDPOINT_URL", f"http://{host}:{port}"), ("DEFAULT_REGION", region)):
            patched.setenv(f"AWS_{name}", value)
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patched.setenv(f"AWS_{name}", "test")
        boto3.client("s3").create_bucket(Bucket="rounds", CreateBucketConfiguration={"LocationConstraint": region})
        yield "s3://rounds"
    server.stop()


def test_files_in_a_bucket_are_as_in_a_folder(bucket, tmp_path):
    for place in (f"{bucket}/study", str(tmp_path / "study")):
        box = Box(place).below("north", "inbox")
        assert box.names(".order") == []
        box.make()
        box.write("2.order", b"second")
        box.write("1.order", b"first")
        box.write("1.order", b"again")
        assert box.names(".order") == ["1.order", "2.order"]
        assert (box.read("1.order"), box.read("3.order")) == (b"again", b"")
        box.rename("1.order", "1.order.refused")
        box.remove("2.order")
        box.remove("2.order")
        assert (box.names(".order"), box.names(".refused")) == ([], ["1.order.refused"])


def test_a_bucket_that_is_not_there_is_an_error_in_one_line(bucket):
    with pytest.raises(BoxError, match="s3://elsewhere/a cannot be used: ") as caught:
        Box("s3://elsewhere/a").write("1.order", b"x")
    assert "\n" not in str(caught.value)


def test_rounds_through_a_bucket_are_equal_to_the_local_engines(bucket, tmp_path):
    federation = Federation(tmp_path, place=f"{bucket}/trial")
    assert_as_on_one_machine(federation, federation.run())
    assert Box(f"{bucket}/trial").below("north", "inbox").names("") == []
