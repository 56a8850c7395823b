"""What is shipped, and what the repository's files may say."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# None of these patterns matches itself.
FORBIDDEN = {
    # A proxy or a mirror would be written into the lock file of every user.
    "a package registry": re.compile(
        r"py[p]i\.[a-z]|python[h]osted\.|[-_]index[-_]url|\bPIP_(?:INDEX|PROXY)|/[s]imple\b",
        re.IGNORECASE,
    ),
    "a folder of one machine": re.compile(
        r"(?<![\w.\-/:])/(?:home|root|work|workspace|mnt|data|Users|tmp)/\w"
    ),
    "a folder beside the repository": re.compile(r"(?<![\w/.])\.\./(?:\.\./)*shared"),
}


def git(*args: str, cwd: Path = ROOT) -> str:
    return subprocess.run(
        ["git", *args], cwd=cwd, check=True, capture_output=True, text=True
    ).stdout


def tracked_texts() -> dict[str, str]:
    """The text files that git tracks; links and binary files left out."""
    texts = {}
    for name in git("ls-files", "-z").split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            data = path.read_bytes()
            if b"\0" not in data:
                texts[name] = data.decode()
    return texts


def test_the_installed_distribution_has_one_top_level_package():
    # Written by setuptools, from the same configuration as a wheel's.
    distribution = importlib.metadata.distribution("fp8rl_jax")
    assert distribution.read_text("top_level.txt").split() == ["fp8rl_jax"]


def test_only_the_package_is_found():
    with (ROOT / "pyproject.toml").open("rb") as file:
        find = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]
    assert find == {"include": ["fp8rl_jax*"]}
    matching = [path.name for path in ROOT.glob("fp8rl_jax*") if path.suffix == ""]
    assert matching == ["fp8rl_jax"]
    for module in (ROOT / "fp8rl_jax").rglob("*.py"):
        assert (module.parent / "__init__.py").is_file(), module


def test_models_is_a_link_into_the_package():
    link = ROOT / "models"
    assert link.is_symlink()
    assert link.readlink() == Path("fp8rl_jax/models")
    assert (link / "qwen3" / "model.py").is_file()


def test_nothing_in_the_package_imports_the_link():
    for path in (ROOT / "fp8rl_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}:{node.lineno}: relative import"
                names = [node.module]
            for name in names:
                assert name.split(".")[0] != "models", f"{path}:{node.lineno}"


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_names(what):
    texts = tracked_texts()
    assert "pyproject.toml" in texts and "fp8rl_jax/train.py" in texts
    found = [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if FORBIDDEN[what].search(line)
    ]
    assert not found, f"names {what}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("a package registry", "https://" + "pypi" + ".org/project/jax"),
        ("a package registry", "pip install --" + "index-url https://host"),
        ("a folder of one machine", 'path = "/' + 'home/me/qwen3"'),
        ("a folder beside the repository", "--tokenizer=.." + "/shared/tokenizer"),
    ],
)
def test_the_patterns_notice(what, line):
    assert FORBIDDEN[what].search(line)


def test_constraints_are_names_with_exact_versions():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    names = [re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins]
    assert len(set(names)) == len(names) and "fp8rl-jax" not in names
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint"} <= set(names)


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(tmp_path):
    source = tmp_path / "source"
    git("checkout-index", "--all", f"--prefix={source}/")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "."]
    subprocess.run([*command, "-w", tmp_path], cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    version = importlib.metadata.version("fp8rl_jax")
    assert tops == {"fp8rl_jax", f"fp8rl_jax-{version}.dist-info"}
    assert "fp8rl_jax/models/qwen3/model.py" in names
