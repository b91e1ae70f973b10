"""The client against a real server with a tiny model."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.llamacpp import tiny_gguf
from training.core.errors import RunError
from training.llamacpp.client import Client
from training.llamacpp.server import ServerProcess, free_port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("client")
    model = tiny_gguf.write(folder / "tiny.gguf", seed=5)
    with ServerProcess.start(model, log=folder / "log", ctx_size=256, threads=1) as server:
        server.wait_healthy(30)
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Client:
    return Client(server.url)


def test_health_and_what_is_loaded(client: Client):
    assert client.health() == "ok"
    info = client.model_info()
    assert info["path"].endswith("/tiny.gguf") and info["parameters"] == tiny_gguf.parameters()
    assert info["vocab_size"] == tiny_gguf.VOCAB_SIZE and info["ctx_size"] == 256 and info["slots"] == 1
    assert Client(f"http://127.0.0.1:{free_port()}").health() == "refused"


def test_bytes_and_specials_are_tokenized(client: Client):
    ids = client.tokenize("a1<|im_end|>", add_special=True, parse_special=True)
    assert ids == [tiny_gguf.BOS_ID, ord("a"), ord("1"), 260]
    plain = client.tokenize("a<|im_end|>", add_special=False, parse_special=False)
    assert plain == list(b"a<|im_end|>")


def test_log_probabilities_are_of_the_whole_vocabulary_and_come_at_every_position(client: Client):
    """Half of the positions draw a byte that is no whole character; the server keeps those back unless asked well."""
    ids = [tiny_gguf.BOS_ID, *range(40)]
    for length in range(1, len(ids)):
        top = client.top_logprobs(ids[:length], tiny_gguf.VOCAB_SIZE)
        assert len({token for token, _ in top}) == tiny_gguf.VOCAB_SIZE
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1, abs=1e-5)


def test_log_probabilities_are_the_same_bits_in_any_order(client: Client):
    prompts = [[tiny_gguf.BOS_ID, *bytes(f"prompt {n}", "ascii")] for n in range(8)]
    assert [client.top_logprobs(p) for p in prompts] == [client.top_logprobs(p) for p in prompts[::-1]][::-1]


def test_greedy_text_is_the_likeliest_and_repeats(client: Client):
    first = client.completion("hello", max_tokens=5)
    assert first["tokens"] == client.completion("hello", max_tokens=5)["tokens"]
    ids = [tiny_gguf.BOS_ID, *b"hello"]
    for token in first["tokens"]:
        assert token == client.top_logprobs(ids)[0][0]
        ids.append(token)


def test_chat_answers_and_counts_the_prompt_that_the_template_makes(client: Client):
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat(messages, max_tokens=3)
    text = client.apply_template(messages)
    assert answer["usage"]["prompt_tokens"] == len(client.tokenize(text, add_special=True, parse_special=True))
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_an_overlong_prompt_is_told_with_both_numbers(client: Client):
    with pytest.raises(RunError, match="300") as caught:
        client.completion([1] * 300, max_tokens=1)
    assert "256" in str(caught.value)


def test_a_prompt_that_takes_too_long_is_told(client: Client):
    with pytest.raises(RunError, match="did not answer in time"):
        client.completion("x", max_tokens=100, timeout_seconds=0.001)


def test_a_proxy_in_the_environment_is_not_used(server: ServerProcess, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert Client(server.url).health() == "ok"


def test_a_web_page_of_another_origin_is_not_let_in(server: ServerProcess):
    import requests

    answer = requests.get(f"{server.url}/health", headers={"Origin": "http://example.com"})
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert requests.get(f"{server.url}/").status_code == 404  # no web page of its own


def test_something_else_on_the_port_is_told(tmp_path: Path):
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    other = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        with pytest.raises(RunError, match="something answers"):
            Client(f"http://127.0.0.1:{other.server_port}").health()
    finally:
        other.shutdown()
