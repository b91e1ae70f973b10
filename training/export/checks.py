"""What must be right before a conversion starts; everything that is wrong is told at once.

Each check answers a way in which a GGUF comes out that does not load, or loads and is another model: entries without
rows, a tied head that is not, a head that is missing, BOS and EOS that llama.cpp would make up (it takes id 11), an
add-BOS flag that says other than the tokenizer does, two chat templates, a weight that is no number.
"""

import re
from collections.abc import Iterator

from training.core.errors import IntegrityError, Problems, TrainyardError, UserError
from training.core.report import again
from training.export.adapter import EMBEDDING, HEAD
from training.export.checkpoint import CONFIG, Checkpoint
from training.export.weights import Tensor

_PHI3_TOKENS = ("<unk>", "<s>", "<|endoftext|>")
_SHOWN = 5
_LEAST_CONTEXT_TOKENS = 3  # two, one of which sees the other, and room for the next


def check(checkpoint: Checkpoint, known_architectures: frozenset[str]) -> None:
    """Raise the one problem, or all of them as Problems."""
    found = list(_problems(checkpoint, known_architectures))
    if len(found) == 1:
        raise found[0]
    if found:
        raise Problems("the checkpoint cannot be exported", found)


def check_name(checkpoint: Checkpoint, name: str) -> None:
    """Raise UserError for a name by which llama.cpp takes a model for another one: it looks for `phi-3` in it.

    Source: llama.cpp `src/llama-vocab.cpp`, `_contains_any(model_name, ...)`.
    """
    missing = [text for text in _PHI3_TOKENS if checkpoint.encoder.token_to_id(text) is None]
    if missing and any(part in name.lower() for part in ("phi-3", "phi3")):
        raise UserError(
            "by this name llama.cpp takes the model for one of Phi 3's tokenizer", where="--name", found=name,
            expected=f"another name, since there is no {missing[0]} in the tokenizer",
            next_command=again("--name", re.sub("(?i)phi-?3", "phi_3", name)),
        )  # fmt: skip


def _problems(checkpoint: Checkpoint, known_architectures: frozenset[str]) -> Iterator[TrainyardError]:
    yield from _architecture(checkpoint, known_architectures)
    yield from _context(checkpoint)
    yield from _vocabulary(checkpoint)
    yield from _head(checkpoint)
    yield from _specials(checkpoint)
    yield from _template(checkpoint)
    yield from _finite(checkpoint)


def _architecture(checkpoint: Checkpoint, known: frozenset[str]) -> Iterator[TrainyardError]:
    name = (checkpoint.config.get("architectures") or [None])[0]
    if name not in known:
        yield UserError(
            "llama.cpp's converter does not know the architecture",
            where=checkpoint.folder / CONFIG,
            found=name,
            expected=f"one of its {len(known)}: LlamaForCausalLM, Qwen3ForCausalLM, Gemma3ForCausalLM ...",
        )


def _context(checkpoint: Checkpoint) -> Iterator[TrainyardError]:
    context_tokens = checkpoint.config.get("max_position_embeddings", _LEAST_CONTEXT_TOKENS)
    if context_tokens < _LEAST_CONTEXT_TOKENS:
        yield UserError(
            "the model's context is too short for a proof", where="config.json: max_position_embeddings",
            found=context_tokens, expected=f"{_LEAST_CONTEXT_TOKENS} or more",
        )  # fmt: skip


def _vocabulary(checkpoint: Checkpoint) -> Iterator[TrainyardError]:
    rows, configured = checkpoint.shapes.get(EMBEDDING, (None,))[0], checkpoint.config.get("vocab_size")
    if rows is not None and configured != rows:
        yield UserError(
            "the configuration's vocabulary is not the embedding's", where="config.json: vocab_size",
            found=configured, expected=f"{rows}, the rows of {EMBEDDING}",
        )  # fmt: skip
    limit = rows or configured
    entries = checkpoint.encoder.get_vocab(with_added_tokens=True)
    beyond = sorted((number, token) for token, number in entries.items() if number >= limit)
    if beyond:
        names = ", ".join(f"{token!r} (id {number})" for number, token in beyond[:_SHOWN])
        more = f" and {len(beyond) - _SHOWN} more" if len(beyond) > _SHOWN else ""
        yield UserError(
            f"{len(beyond)} entries of the tokenizer have no row in the embedding",
            where=checkpoint.tokenizer_folder / "tokenizer.json",
            found=names + more,
            expected=f"ids below {limit}; resize the embedding and the head, and train the new rows",
        )


def _head(checkpoint: Checkpoint) -> Iterator[TrainyardError]:
    embedding, head = checkpoint.shapes.get(EMBEDDING), checkpoint.shapes.get(HEAD)
    tied = checkpoint.config.get("tie_word_embeddings", False)
    if embedding is None:
        return
    if head is None and not tied:
        yield UserError("an untied model without a head", where=checkpoint.folder, found=f"no {HEAD}", expected=HEAD)
    if head is not None and head[0] != embedding[0]:
        yield UserError("head and embedding differ in rows", where=HEAD, found=head[0], expected=embedding[0])
    else:
        yield from _tied(checkpoint)


def _tied(checkpoint: Checkpoint) -> Iterator[TrainyardError]:
    """A tied head that lies in the files too must be the embedding: transformers would not tie another."""
    found = checkpoint.file_tensors
    are_both = checkpoint.is_configured_tied and {EMBEDDING, HEAD} <= found.keys()
    if are_both and not _equal(found[EMBEDDING], found[HEAD]):
        yield UserError(
            "the configuration says that the head is tied, but the two tensors differ",
            where="config.json: tie_word_embeddings",
            found="true",
            expected=f"false, or {HEAD} equal to {EMBEDDING}",
        )


def _specials(checkpoint: Checkpoint) -> Iterator[TrainyardError]:
    for which, found in (("bos", checkpoint.bos_id), ("eos", checkpoint.special_id("eos"))):
        if found is None:
            yield UserError(
                f"the tokenizer has no {which.upper()}; llama.cpp would take id 11 for it",
                where=f"tokenizer_config.json: {which}_token",
                found=checkpoint.tokenizer_config.get(f"{which}_token"),
                expected="the text of an added token of tokenizer.json",
            )
    claims = {"tokenizer_config.json": checkpoint.tokenizer_config.get("add_bos_token")}
    claims["the checkpoint's manifest"] = checkpoint.origin["tokenizer"]["add_bos"]
    for where, claimed in claims.items():
        if claimed is not None and claimed != checkpoint.add_bos:
            yield UserError(
                "the add-BOS flag is not what the tokenizer does",
                where=where, found=claimed, expected=f"{checkpoint.add_bos}, as its post-processor has it",
            )  # fmt: skip


def _template(checkpoint: Checkpoint) -> Iterator[TrainyardError]:
    try:
        checkpoint.chat_template  # noqa: B018, raises where it is not one template
    except UserError as error:
        yield error


def _equal(first: Tensor, second: Tensor) -> bool:
    import torch

    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    pairs = zip(first.blocks(), second.blocks(), strict=True)
    return all(torch.equal(one, other) for (_, one), (_, other) in pairs)


def _finite(checkpoint: Checkpoint) -> Iterator[TrainyardError]:
    for where, found in checkpoint.not_finite[:1]:
        yield IntegrityError("a weight is no number", where=where, found=found, expected="finite values")


def check_weights(checkpoint: Checkpoint) -> None:
    """Raise what is wrong with the weights of a source that is not converted: a NaN, a tied head that is another."""
    for error in (*_finite(checkpoint), *_tied(checkpoint)):
        raise error
