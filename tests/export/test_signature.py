"""Manifests signed with a key of the test's own, and signatures that must not count."""

import shutil
import subprocess
from pathlib import Path

import pytest

from training.core.errors import IntegrityError, UserError
from training.export import signature

pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="no ssh-keygen on this machine")


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path


@pytest.fixture
def signed(key: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A signed manifest and the file of allowed signers."""
    manifest, signers = tmp_path / "x.manifest.json", tmp_path / "signers"
    manifest.write_text('{"sha256": "1"}\n')
    signers.write_text(f"someone {key.with_suffix('.pub').read_text()}")
    assert signature.sign(manifest, key) == tmp_path / "x.manifest.json.sig"
    return manifest, signers


def test_a_signature_names_who_signed_and_is_renewed(signed, key: Path):
    manifest, signers = signed
    assert signature.check(manifest, signers) == "someone"
    manifest.write_text('{"sha256": "2"}\n')
    with pytest.raises(IntegrityError, match="not that of an allowed signer"):
        signature.check(manifest, signers)
    signature.sign(manifest, key)
    assert signature.check(manifest, signers) == "someone"


def test_a_key_that_is_not_allowed_is_refused(signed, tmp_path: Path):
    manifest, signers = signed
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(other)], check=True)
    signature.sign(manifest, other)
    with pytest.raises(IntegrityError, match="not that of an allowed signer"):
        signature.check(manifest, signers)


def test_what_is_not_signed_or_no_key_is_told(signed, tmp_path: Path):
    manifest, signers = signed
    signature.path_of(manifest).unlink()
    with pytest.raises(IntegrityError, match="not signed"):
        signature.check(manifest, signers)
    with pytest.raises(UserError, match="no such key"):
        signature.sign(manifest, tmp_path / "nothing")
    with pytest.raises(UserError, match="could not be signed"):
        signature.sign(manifest, manifest)
