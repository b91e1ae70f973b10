"""`export-gguf`: a checkpoint as GGUF files, proved before they get their names."""

import argparse

from training.core.report import Report

SUMMARY = "export a checkpoint to GGUF, proved against PyTorch"
EXAMPLE = 'make export-gguf CHECKPOINT=20261129-214358-demo-1a2b ARGS="--quant F16,Q8_0"'
CONTAINER = "export"
_WHOLE_GGUF_ALONE = ("importance", "no_fallback", "ollama", "llama_cpp", "allow_unpinned", "sign")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from training.tokenizer.artifact import CALLED

    parser.add_argument(
        "checkpoint", help="a step folder, a run (its best; ID/latest), a base's name, a Hugging Face or PEFT folder"
    )
    parser.add_argument(
        "--format", choices=("gguf", "merged", "adapter"), default="gguf",
        help="gguf (default); merged: a Hugging Face folder; adapter: a GGUF beside its base's",
    )  # fmt: skip
    parser.add_argument(
        "--quant", help="F32 F16 BF16 Q8_0 Q6_K Q5_K_M Q4_K_M, several with commas (default: Q8_0; an adapter's: F16)"
    )
    parser.add_argument("--base", metavar="NAME", help="an adapter's base, by name or folder, where it names none")
    parser.add_argument("--importance", action="store_true", help="weigh K-quants by the training data")
    parser.add_argument("--no-fallback", action="store_true", help="refuse a K-quant that does not fit all rows")
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help=f"where the checkpoint has none: {CALLED}")
    parser.add_argument("--name", help="the model's name (default: the recipe's, else the folder's)")
    parser.add_argument("--ollama", metavar="NAME", help="register the last file with Ollama under this name")
    parser.add_argument("--llama-cpp", metavar="DIR", help="convert with this llama.cpp, the pin's alone")
    parser.add_argument("--allow-unpinned", action="store_true", help="take another llama.cpp; the manifest says so")
    parser.add_argument("--sign", metavar="KEY", help="sign the manifests with an SSH key, by ssh-keygen -Y")
    parser.add_argument("--dry-run", action="store_true", help="check, say what would be done, and do nothing")
    parser.add_argument("--force", action="store_true", help="replace a file of the same name with other bytes")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.export import checkpoint as checkpoints
    from training.export import export
    from training.llamacpp import source
    from training.rounds import champion

    _refuse_what_has_no_effect(args)
    checkpoint = checkpoints.open_checkpoint(args.checkpoint, args.tokenizer, args.base)
    name = args.name or export.default_name(checkpoint)
    if args.format == "merged":
        return _merged(args, report, checkpoint, name)
    if args.format == "adapter":
        return _adapter(args, report, checkpoint, name)
    quants = _quants(args.quant or "Q8_0", export.QUANTS)
    chosen = source.choose(args.llama_cpp, allow_unpinned=args.allow_unpinned)
    settings = {"name": name, "weighed": args.importance, "fallback": not args.no_fallback, "llama_cpp": chosen}
    if args.dry_run:
        return _previewed(report, export.preview(checkpoint, quants, **settings))
    outputs = export.export(
        checkpoint, quants, force=args.force, may_replace=champion.require_replaceable, **settings
    )  # fmt: skip
    document = _exported(report, outputs)
    _sign_and_register(args, report, outputs)
    return document


def _refuse_what_has_no_effect(args: argparse.Namespace) -> None:
    """Raise UserError for options that the format would pass over in silence."""
    from training.core.errors import UserError

    names = {"gguf": (), "adapter": _WHOLE_GGUF_ALONE, "merged": (*_WHOLE_GGUF_ALONE, "quant")}[args.format]
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]:
        raise UserError(
            "an option that this format does not have", where=f"--format {args.format}", found=", ".join(given),
            expected="the command without it, or --format gguf",
        )  # fmt: skip


def _sign_and_register(args: argparse.Namespace, report: Report, outputs: list) -> None:
    from pathlib import Path

    from training.export import manifest, modelfile, signature

    if args.sign:
        made = [signature.sign(manifest.path_of(output.gguf), Path(args.sign).expanduser()) for output in outputs]
        report.add("signed", ", ".join(path.name for path in made))
    if args.ollama:
        modelfile.register(args.ollama, modelfile.path_of(outputs[-1].gguf))
        report.add("ollama", f"ollama run {args.ollama}")


def _previewed(report: Report, intents: dict) -> dict:
    from training.core import paths

    for gguf, intent in intents.items():
        report.add(gguf.name, f"{gguf} {intent}")
    report.add("dry run", "the checkpoint is sound; nothing was converted or written")
    outputs = [{"path": paths.for_people(path), "intent": text} for path, text in intents.items()]
    return {"dry_run": True, "outputs": outputs}


def _merged(args: argparse.Namespace, report: Report, checkpoint, name: str) -> dict:
    from training.core import paths
    from training.core.files import short
    from training.core.units import format_bytes
    from training.export import merge

    if args.dry_run:
        merge.check(checkpoint)
        size = format_bytes(merge.num_bytes(checkpoint, cast=True))
        return _previewed(report, {merge.folder_of(name): f"would hold the merged model, {size}"})
    made = merge.standalone(checkpoint, name, force=args.force)
    report.add("merged", f"{made.folder}{' (the same bytes were there)' if made.reused else ''}")
    report.add("used", ", ".join(f"{count} {kind}" for kind, count in made.manifest["adapter_tensors"].items()))
    origin = made.manifest["merged_from"]
    base = f"{origin['base']['name']}, weights {short(origin['base']['weights_sha256'])}"
    report.add("from", f"adapter {short(origin['weights_sha256'])} on {base}")
    report.add("weights", short(made.manifest["weights_sha256"]))
    report.add("next", f"make export-gguf CHECKPOINT={made.folder}")
    return {"path": paths.for_people(made.folder), "reused": made.reused, "manifest": made.manifest}


def _adapter(args: argparse.Namespace, report: Report, checkpoint, name: str) -> dict:
    from training.core import paths
    from training.core.errors import UserError
    from training.export import adapter_gguf

    quant, *more = _quants(args.quant or "F16", adapter_gguf.QUANTS)
    if more:
        raise UserError(
            "an adapter is written in one type at a time", where="--quant", found=args.quant, expected=quant
        )
    if args.dry_run:
        adapter_gguf.check(checkpoint)
        target = adapter_gguf.path_of(name, quant)
        return _previewed(report, {target: f"would be the adapter in {quant}, served beside its base"})
    output = adapter_gguf.export(checkpoint, quant, name=name, force=args.force)
    report.add(f"adapter {quant}", _figures(output))
    report.add("from", _chain(output.manifest))
    report.add("served by", f"llama-server --model BASE.gguf --lora {paths.container_path(output.gguf)}")
    return {"path": paths.for_people(output.gguf), "reused": output.reused, "manifest": output.manifest}


def _exported(report: Report, outputs: list) -> dict:
    from training.core import paths

    for output in outputs:
        report.add(output.manifest["quant_type"], _figures(output))
    made = outputs[-1].manifest
    counts = made["parity"]["ids"]
    report.add(
        "token ids", f"equal on {counts['nasty_strings']} nasty strings, {counts['lines']} lines and "
        f"{counts['conversations']} conversations; stops at {', '.join(map(str, made['parity']['stops']))}",
    )  # fmt: skip
    report.add("proved on", made["parity"]["drawn_from"])
    if gap := made["parity"].get("base_in_4_bits"):
        report.add("base in NF4", f"as it was trained: KL {gap['kl_mean_nats']:g}, same first choice "
                   f"{100 * gap['same_first_choice']:.1f} % of the base exported here")  # fmt: skip
    if made["adapter_tensors"]:
        report.add("merged", ", ".join(f"{count} {kind}" for kind, count in made["adapter_tensors"].items()))
    report.add("from", _chain(made))
    pinned = made["llama_cpp"]
    named = f"{pinned['build']}-{pinned['commit'][:9]}" if "build" in pinned else "not the pinned one"
    report.add("llama.cpp", f"{named}, served by {made['fingerprint']['server']}")
    report.add("fits", _fit(outputs[-1].gguf))
    report.add("next", f"make serve-eval MODEL={paths.container_path(outputs[-1].gguf)}")
    return {
        "outputs": [
            {"path": paths.for_people(output.gguf), "reused": output.reused, "manifest": output.manifest}
            for output in outputs
        ]
    }


def _fit(gguf) -> str:
    from training.calculator import devices
    from training.serving import memory, model

    served = model.served(model.read_header(gguf), gguf.stat().st_size)
    return memory.fit_text(memory.fit(served, "cuda" if devices.gpus() else "cpu"))


def _figures(output) -> str:
    from training.core import files
    from training.core.units import format_bytes

    made, parity = output.manifest, output.manifest["parity"]
    types = " ".join(f"{name} x {count}" for name, count in made["tensor_types"].items())
    return (
        f"{output.gguf}{' (the same bytes were there)' if output.reused else ''}\n"
        f"sha256 {files.short(made['sha256'])}, {format_bytes(made['bytes'])}, {types}\n"
        f"{parity['positions']} positions: max {parity['max_nats']:g}, median {parity['median_nats']:g} nats; "
        f"KL mean {parity['kl_mean_nats']:g}, p99 {parity['kl_p99_nats']:g}; "
        f"same first choice {100 * parity['same_first_choice']:.1f} %"
    )


def _quants(text: str, known: tuple[str, ...]) -> list[str]:
    from training.core.errors import UserError

    quants = list(dict.fromkeys(part.strip().upper() for part in text.split(",") if part.strip()))
    unknown = [quant for quant in quants if quant not in known]
    if unknown or not quants:
        raise UserError("no such quant", where="--quant", found=text, expected=", ".join(known))
    return quants


def _chain(made: dict) -> str:
    from training.core.files import short
    from training.core.store import reference_to

    def reference(part: dict | None) -> str:
        return reference_to(part) if part else "none named"

    run = f"run {made['run']}, step {made['step']}" if made["run"] else "no run"
    run += f" on {made['base']['name']}" if made["base"] else ""
    return (
        f"dataset {reference(made['dataset'])}, tokenizer {reference(made['tokenizer'])}, {run}, "
        f"weights {short(made['weights_sha256'])}"
    )
