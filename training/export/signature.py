"""A manifest signed with the user's own SSH key, and the check of such a signature, both by `ssh-keygen -Y`.

The signature lies beside the manifest as `<manifest>.sig`. A manifest names its file by hash, so signing it signs the
file and all that it names. Keys stay where they are. Source: ssh-keygen(1), section on -Y.
"""

import shutil
import subprocess
from pathlib import Path

from training.core.errors import IntegrityError, MachineError, UserError

NAMESPACE = "trainyard-manifest"


def path_of(manifest: Path) -> Path:
    """Where the signature of a manifest lies."""
    return manifest.with_name(f"{manifest.name}.sig")


def sign(manifest: Path, key: Path) -> Path:
    """Sign a manifest with a private key, or a public one whose private half an agent holds; returns the signature."""
    if not key.is_file():
        raise UserError("no such key", where=key, found="nothing", expected="an SSH key, such as ~/.ssh/id_ed25519")
    path_of(manifest).unlink(missing_ok=True)
    done = _run(["-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE, str(manifest)])
    if done.returncode or not path_of(manifest).is_file():
        raise UserError(
            "the manifest could not be signed", where=key, found=done.stderr.strip()[-200:] or "no signature",
            expected="a key that ssh-keygen can use; one with a passphrase needs ssh-agent and its public half",
        )  # fmt: skip
    return path_of(manifest)


def check(manifest: Path, signers: Path) -> str:
    """Hold a signature against a file of allowed signers; returns who signed. Raises IntegrityError where it is wrong.

    Args:
        signers: lines of `principal key`, as ssh-keygen(1) has them under ALLOWED SIGNERS.
    """
    signature = path_of(manifest)
    if not signature.is_file():
        raise IntegrityError("the manifest is not signed", where=signature, found="nothing", expected="a signature")
    found = _run(["-Y", "find-principals", "-s", str(signature), "-f", str(signers)])
    names = found.stdout.split()
    who = names[0] if names and not found.returncode else None
    good = (
        who
        and not _run(
            ["-Y", "verify", "-f", str(signers), "-I", who, "-n", NAMESPACE, "-s", str(signature)], manifest
        ).returncode
    )
    if not good:
        raise IntegrityError(
            "the manifest's signature is not that of an allowed signer", where=signature, found=who or "an unknown key",
            expected=f"one of {signers}",
        )  # fmt: skip
    return who


def _run(arguments: list[str], given: Path | None = None) -> subprocess.CompletedProcess:
    if shutil.which("ssh-keygen") is None:
        raise MachineError("there is no ssh-keygen", where="PATH", found="nothing", expected="OpenSSH 8.2 or newer")
    data = given.read_text() if given else None
    extra = {"input": data} if data is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(["ssh-keygen", *arguments], capture_output=True, text=True, errors="replace", **extra)
