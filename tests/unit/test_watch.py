"""The live page's server: what it answers, what it refuses, and what it pushes."""

import http.client
import io
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

import qurl.run.watch as watch_module
from qurl.cli import main
from qurl.config import Config
from qurl.errors import ConfigError, DataError
from qurl.run.directory import Run
from qurl.run.report.reader import RunReader
from qurl.run.watch import WatchServer


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watch_module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(watch_module, "SILENCE_SECONDS", 0.1)


@pytest.fixture
def run(tmp_path):
    run = Run.open(Config(steps=5, run_dir=str(tmp_path / "run")), output=io.StringIO())
    for step in range(2):
        run.log(step, {"reward/mean": 0.5})
    return run


@contextmanager
def serving(*paths, host="127.0.0.1"):
    with WatchServer(paths, host) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.is_closing.set()
            server.shutdown()
            thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=5)
    port = server.server_address[1]
    connection.putrequest(method, path, skip_host=True)
    for name, value in ({"Host": f"127.0.0.1:{port}"} | headers).items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders()
    return connection.getresponse()


def messages(response):
    """What the stream pushes, one dict at a time."""
    while line := response.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_the_page_and_its_headers(run):
    with serving(run.path) as server:
        answer = ask(server)
        page = answer.read().decode()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        policy = answer.headers["Content-Security-Policy"]
        for part in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'"):
            assert part in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "reward/mean" in page  # a chart of it; the data comes with the stream
        assert '"live":true' in page
        assert server.url == f"http://127.0.0.1:{server.server_address[1]}/"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"])
def test_it_can_only_be_read(run, method):
    with serving(run.path) as server:
        answer = ask(server, method=method)
        assert (answer.status, answer.headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    ["/config.json", "/../config.json", "/%2e%2e/config.json", "/events/", "/./", "http://[/", "*"],
)
def test_no_file_is_served(run, path):
    with serving(run.path) as server:
        assert ask(server, path).status == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:{port}", 200),
        ("127.0.0.1:{port}", 200),
        ("[::1]:{port}", 200),
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example:{port}", 421),
        ("localhost:1", 200),  # as through `ssh -L 1:localhost:{port}`
        ("localhost", 200),
        ("[::1]", 200),
        ("", 421),
        (None, 421),
    ],
)
def test_a_rebound_name_is_refused(run, host, status):
    with serving(run.path) as server:
        host = host and host.format(port=server.server_address[1])
        assert ask(server, Host=host).status == status
        assert ask(server, "/x", Host=host).status == (404 if status == 200 else status)


def test_elsewhere_a_token_is_needed(run):
    with serving(run.path, host="0.0.0.0") as server:
        token = server.url.partition("?token=")[2]
        assert len(token) >= 32
        for path in ("/", "/?token=", f"/?token={token[:-1]}", "/events", "/?token=%ff%00é"):
            refused = ask(server, path.replace("é", "%C3%A9"), Host="any.example")
            assert refused.status == 403
            assert token not in refused.read().decode()
        assert ask(server, f"/?token={token}", Host="any.example").status == 200
        assert ask(server, f"/events?token={token}").status == 200
    with serving(run.path, host="0.0.0.0") as other:
        assert other.token != token


def test_new_rows_are_pushed(run):
    with serving(run.path) as server:
        stream = messages(ask(server, "/events"))
        [first] = next(stream)["updates"]
        assert (first["index"], first["reset"], first["columns"]["step"]) == (0, True, [0, 1])
        run.log(2, {"reward/mean": 0.75})
        [new] = next(stream)["updates"]
        assert (new["reset"], new["columns"]["step"]) == (False, [2])
        assert new["columns"]["reward/mean"] == [0.75]
        run.event("alarm", "step 2: entropy collapsed")
        [new] = next(stream)["updates"]
        assert new["events"][0]["kind"] == "alarm"
        assert new["verdict"]["level"] == "bad"


def test_a_rewind_sends_everything_again(run):
    with serving(run.path) as server:
        stream = messages(ask(server, "/events"))
        next(stream)
        run.rewind(1)
        reset = next(u for message in stream for u in message["updates"] if u["reset"])
        while reset["columns"]["step"] != [0]:  # the files are replaced one after the other
            reset = next(u for message in stream for u in message["updates"] if u["reset"])


def test_several_runs_and_their_comparison(run, tmp_path):
    other = Run.open(Config(steps=5, run_dir=str(tmp_path / "other"), seed=1), output=io.StringIO())
    with serving(run.path, other.path) as server:
        message = next(messages(ask(server, "/events")))
        assert [update["name"] for update in message["updates"]] == ["run", "other"]
        assert message["comparison"]["differences"] == {"seed": ["0", "1"]}


def test_pages_that_open_together_are_read_in_turn(run, monkeypatch):
    real, now, most = RunReader.read, [], []

    def read(reader):
        now.append(reader)
        most.append(len(now))
        time.sleep(0.02)
        now.remove(reader)
        return real(reader)

    monkeypatch.setattr(RunReader, "read", read)
    with serving(run.path) as server:
        streams = [ask(server, "/events") for _ in range(3)]
        assert all(next(messages(stream))["updates"] for stream in streams)
    assert max(most) == 1


def test_disorder_is_told_once_and_mended(run):
    config = (run.path / "config.json").read_text()
    with serving(run.path) as server:
        stream = messages(ask(server, "/events"))
        next(stream)
        (run.path / "config.json").unlink()
        (run.path / "metrics.jsonl").unlink()
        assert "config.json" in next(stream)["error"]
        time.sleep(0.2)
        (run.path / "config.json").write_text(config)
        [update] = next(stream)["updates"]
        assert update["reset"]


def test_no_more_streams_than_allowed(run, monkeypatch):
    monkeypatch.setattr(watch_module, "MAX_STREAMS", 1)
    with serving(run.path) as server:
        first = ask(server, "/events")
        next(messages(first))
        assert ask(server, "/events").status == 503
        assert ask(server).status == 200
        first.close()  # the next comment finds nobody
        deadline = time.monotonic() + 5
        while ask(server, "/events").status == 503:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_nothing_is_printed_and_nothing_is_written(run, capfd):
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    with serving(run.path) as server:
        ask(server).read()
        ask(server, "/x").read()
        stream = ask(server, "/events")
        next(messages(stream))
        stream.close()
        with socket.create_connection(server.server_address[:2]) as client:
            client.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
            client.recv(1000)
        time.sleep(0.2)
    assert capfd.readouterr() == ("", "")
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}


def test_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(DataError, match="is not a run directory"):
        WatchServer([tmp_path])


def test_a_port_in_use(run):
    with serving(run.path) as server, pytest.raises(ConfigError, match="leave --port out to get"):
        WatchServer([run.path], port=server.server_address[1])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["watch"], "expected RUN, got nothing"),
        (["watch", "--port", "x", "run"], "--port x is not a port"),
        (["watch", "--port", "70000", "run"], "--port 70000 is not a port"),
        (["watch", "run", "--host"], "--host needs an address"),
        (["watch", "--nonsense"], "expected RUN, got --nonsense; --nonsense is no flag of this"),
        (["watch", "run", "--host", "no.such.host.invalid"], "is not a run directory"),
        (["report"], "expected RUN, got nothing"),
        (["report", "run", "--out"], "--out needs the name of a file"),
    ],
)
def test_wrong_arguments(args, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(args) == 2
    assert message in capsys.readouterr().err


def test_watch_prints_its_address_and_ends_quietly(run, capsys, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(WatchServer, "serve_forever", interrupted)
    assert main(["watch", str(run.path), "--host", "localhost"]) == 0
    assert "watching on http://localhost:" in capsys.readouterr().out
