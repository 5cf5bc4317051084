"""An S3 server of this machine for tests: `s3` is the URL of a prefix in a fresh bucket."""

import logging

import pytest


@pytest.fixture(scope="session")
def s3_server():
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    import boto3

    for name, value in {
        "AWS_ACCESS_KEY_ID": "an-access-key",
        "AWS_SECRET_ACCESS_KEY": "a-very-secret-key",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_server,
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=s3_server)
    client.create_bucket(Bucket="fleet")
    yield "s3://fleet/some/prefix"
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="fleet"):
        for entry in page.get("Contents", []):
            client.delete_object(Bucket="fleet", Key=entry["Key"])
    client.delete_bucket(Bucket="fleet")
