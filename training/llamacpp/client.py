"""A client of llama.cpp's HTTP server: health, what it has loaded, tokens, completions and log-probabilities.

Every request is greedy and repeatable unless told otherwise: temperature 0, no penalties, a fixed seed, no prompt
cache (temperature 0 alone does not switch penalties off). Proxy settings of the environment are not used: the
server is on loopback. Errors are RunError with the server's own words.
Source: llama.cpp `tools/server/README.md`.
"""

from collections.abc import Sequence

import requests

from training.core.errors import RunError

GREEDY = {
    "temperature": 0.0, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
    "dry_multiplier": 0.0, "seed": 1, "cache_prompt": False,
}  # fmt: skip
# The server keeps back the probabilities of a position whose sampled token ends inside a UTF-8 character. A bias
# moves what is sampled and not what is reported, so an "a" is drawn everywhere.
_ALWAYS_A = [["a", 1e4]]
_HEALTH_TIMEOUT_SECONDS = 2.0


class Client:
    """Talks to the server at `url`; a request without an answer within `timeout_seconds` is a RunError."""

    def __init__(self, url: str, timeout_seconds: float = 60.0):
        self.url = url.rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._session = requests.Session()
        self._session.trust_env = False

    def health(self) -> str:
        """`ok`, `loading` (it answers 503, or nothing yet) or `refused` (nothing listens)."""
        try:
            answer = self._session.get(f"{self.url}/health", timeout=_HEALTH_TIMEOUT_SECONDS)
        except requests.Timeout:
            return "loading"
        except requests.ConnectionError:
            return "refused"
        if answer.status_code in (200, 503):
            return "ok" if answer.status_code == 200 else "loading"
        raise RunError(
            "something answers, but not as llama.cpp's server does",
            where=f"{self.url}/health",
            found=f"HTTP status {answer.status_code}",
            expected="200, or 503 while it loads",
        )

    def props(self) -> dict:
        """The server's properties: model_path, chat_template, total_slots, default_generation_settings ..."""
        return self._call("GET", "/props")

    def model_info(self) -> dict:
        """What the server says it has loaded.

        `{"path", "parameters", "size_bytes", "ftype", "vocab_size", "ctx_size", "slots", "build"}`; the size is that
        of the tensors, not of the file.
        """
        props = self.props()
        models = self._call("GET", "/v1/models").get("data") or [{}]
        meta = models[0].get("meta") or {}
        return {
            "path": props.get("model_path"), "parameters": meta.get("n_params"), "size_bytes": meta.get("size"),
            "ftype": meta.get("ftype"), "vocab_size": meta.get("n_vocab"), "ctx_size": meta.get("n_ctx"),
            "slots": props.get("total_slots"), "build": props.get("build_info"),
        }  # fmt: skip

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """The server's token ids of a text; `add_special` puts BOS in front where the model wants it."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return self._call("POST", "/tokenize", body)["tokens"]

    def apply_template(self, messages: Sequence[dict]) -> str:
        """The prompt text that the server makes of a conversation, without the BOS that it adds after."""
        return self._call("POST", "/apply-template", {"messages": list(messages)})["prompt"]

    def completion(
        self, prompt: str | Sequence[int], *, max_tokens: int, timeout_seconds: float | None = None, **settings: object
    ) -> dict:
        """Complete a text or token ids, greedily; `settings` are llama.cpp's own. Returns the server's answer."""
        prompt = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
        body = GREEDY | {"prompt": prompt, "n_predict": max_tokens, "return_tokens": True} | settings
        return self._call("POST", "/completion", body, timeout_seconds)

    def chat(
        self, messages: Sequence[dict], *, max_tokens: int, timeout_seconds: float | None = None, **settings: object
    ) -> dict:
        """Answer a conversation, greedily, by the chat route. Returns the server's answer (OpenAI's shape)."""
        body = GREEDY | {"messages": list(messages), "max_tokens": max_tokens} | settings
        return self._call("POST", "/v1/chat/completions", body, timeout_seconds)

    def top_logprobs(
        self, prompt_ids: Sequence[int], top: int = 5, *, reuse: bool = False
    ) -> list[tuple[int, float]]:  # fmt: skip
        """The `top` likeliest next tokens after `prompt_ids` with their log-probabilities in nats, best first.

        They are those of the softmax over the whole vocabulary, before any sampler. The ids are taken as they are:
        no BOS is added. The same request gives the same bits, because nothing of an earlier one is used, unless `reuse`
        lets the server keep what it has computed of a common beginning.
        """
        answer = self.completion(prompt_ids, max_tokens=1, n_probs=top, logit_bias=_ALWAYS_A, cache_prompt=reuse)
        entries = answer["completion_probabilities"][0]["top_logprobs"]
        return [(entry["id"], entry["logprob"]) for entry in entries[:top]]

    def given_logprobs(self, prompt_ids: Sequence[int], given_ids: Sequence[int]) -> list[float] | None:
        """The log-probability in nats of each of the given next tokens after those before it, in one request.

        A grammar of token ids allows nothing else, and the server reports what its softmax over the whole vocabulary
        says before any sampler; it keeps what it has computed of a common beginning. None where it cannot spell the
        tokens so (one that ends inside a UTF-8 character). Source: llama.cpp `grammars/README.md`, Tokens.
        """
        grammar = "root ::= " + " ".join(f"<[{int(token)}]>" for token in given_ids)
        try:
            answer = self.completion(
                prompt_ids, max_tokens=len(given_ids), n_probs=1, grammar=grammar, cache_prompt=True
            )  # fmt: skip
        except RunError:
            return None
        entries = answer.get("completion_probabilities", [])
        if [entry["id"] for entry in entries] != list(given_ids):
            return None
        return [entry["logprob"] for entry in entries]

    def _call(self, method: str, route: str, body: dict | None = None, timeout_seconds: float | None = None) -> dict:
        limit = timeout_seconds or self.timeout_seconds
        try:
            answer = self._session.request(method, self.url + route, json=body, timeout=(5.0, limit))
        except requests.Timeout:
            raise RunError("the server did not answer in time", where=route, found=f"nothing in {limit:g} s") from None
        except requests.RequestException as error:
            raise RunError(
                "the server cannot be reached", where=self.url + route, found=type(error).__name__
            ) from error
        try:
            document = answer.json()
        except ValueError:
            raise RunError("the server's answer is not JSON", where=route, found=answer.text[:200]) from None
        if answer.status_code != 200:
            error = document.get("error", document) if isinstance(document, dict) else document
            message = error.get("message", error) if isinstance(error, dict) else error
            raise RunError("the server refused a request", where=route, found=f"{answer.status_code}: {message}")
        return document
