"""`export-gguf`: a checkpoint as GGUF files, proved before they get their names."""

import argparse

from training.core.report import Report

SUMMARY = "export a checkpoint to GGUF, proved against PyTorch"
EXAMPLE = 'make export-gguf CHECKPOINT=20261129-214358-demo-1a2b ARGS="--quant F16,Q8_0"'
CONTAINER = "export"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a step folder, a run's id or folder (its best), or a Hugging Face folder")
    parser.add_argument("--quant", default="Q8_0", help="F32, F16, BF16 or Q8_0; several with commas (default: Q8_0)")
    parser.add_argument("--tokenizer", metavar="DIR", help="name@hash or a folder, where the checkpoint has none")
    parser.add_argument("--name", help="the model's name (default: the recipe's, else the folder's)")
    parser.add_argument("--dry-run", action="store_true", help="check, say what would be done, and do nothing")
    parser.add_argument("--force", action="store_true", help="replace a file of the same name with other bytes")


def run(args: argparse.Namespace, report: Report) -> dict:
    from training.core import files, paths
    from training.core.units import format_bytes
    from training.export import checkpoint as checkpoints
    from training.export import export

    quants = _quants(args.quant, export.QUANTS)
    checkpoint = checkpoints.open_checkpoint(args.checkpoint, args.tokenizer)
    name = args.name or export.default_name(checkpoint)
    if args.dry_run:
        intents = export.preview(checkpoint, quants, name=name)
        for gguf, intent in intents.items():
            report.add(gguf.name, f"{gguf} {intent}")
        report.add("dry run", "the checkpoint is sound; nothing was converted or written")
        return {
            "dry_run": True,
            "outputs": [{"path": paths.for_people(path), "intent": text} for path, text in intents.items()],
        }
    outputs = export.export(checkpoint, quants, name=name, force=args.force)
    for output in outputs:
        made, parity = output.manifest, output.manifest["parity"]
        types = " ".join(f"{name} x {count}" for name, count in made["tensor_types"].items())
        report.add(
            made["quant_type"],
            f"{output.gguf}{' (the same bytes were there)' if output.reused else ''}\n"
            f"sha256 {files.short(made['sha256'])}, {format_bytes(made['bytes'])}, {types}\n"
            f"{parity['positions']} positions: max {parity['max_nats']:g}, median {parity['median_nats']:g} nats; "
            f"KL mean {parity['kl_mean_nats']:g}, p99 {parity['kl_p99_nats']:g}; "
            f"same first choice {100 * parity['same_first_choice']:.1f} %",
        )
    made = outputs[-1].manifest
    counts = made["parity"]["ids"]
    report.add("token ids", f"equal on {counts['nasty_strings']} nasty strings and {counts['lines']} lines")
    report.add("proved on", made["parity"]["drawn_from"])
    report.add("from", _chain(made))
    pinned = made["llama_cpp"]
    report.add("llama.cpp", f"{pinned['build']}-{pinned['commit'][:9]}, served by {made['fingerprint']['server']}")
    report.add("next", f"make serve-eval MODEL={paths.container_path(outputs[-1].gguf)}")
    return {
        "outputs": [
            {"path": paths.for_people(output.gguf), "reused": output.reused, "manifest": output.manifest}
            for output in outputs
        ]
    }


def _quants(text: str, known: tuple[str, ...]) -> list[str]:
    from training.core.errors import UserError

    quants = list(dict.fromkeys(part.strip().upper() for part in text.split(",") if part.strip()))
    unknown = [quant for quant in quants if quant not in known]
    if unknown or not quants:
        raise UserError("no such quant", where="--quant", found=text, expected=", ".join(known))
    return quants


def _chain(made: dict) -> str:
    from training.core.files import short

    def reference(part: dict | None) -> str:
        return f"{part['name']}@{short(part['hash'])}" if part else "none named"

    run = f"run {made['run']}, step {made['step']}" if made["run"] else "a plain folder"
    return (
        f"dataset {reference(made['dataset'])}, tokenizer {reference(made['tokenizer'])}, {run}, "
        f"weights {short(made['weights_sha256'])}"
    )
