"""The layers of the architecture: a module imports from its own layer or one below, and libraries where allowed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mlxcel"

# In the order of dependence: each may import what stands before it, and itself.
LAYERS = [
    [
        "errors",
        "settings",
        "settings_files",
        "settings_table",
        "settings_values",
        "logs",
        "metrics",
        "sources",
        "usage",
    ],
    ["cache"],
    ["prompt", "text"],
    ["engine"],
    ["api"],
    ["loading"],
    ["server", "__main__", "__init__"],
]
LIBRARIES = {
    "blake3": {"cache", "prompt"},
    "jinja2": {"prompt"},
    "orjson": {"api"},
    "mlx": {"engine", "server"},
    "mlx_lm": {"engine"},
    "gguf": {"engine"},
    "llguidance": {"engine"},
    "aiohttp": {"api", "server"},
    "transformers": {"engine"},
    "tokenizers": {"engine"},
    "numpy": {"engine"},
    "huggingface_hub": {"sources"},
    "uvloop": {"server"},
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imports(path: Path, *, everywhere: bool = True) -> set[str]:
    """Dotted names that a file imports at run time; what stands under `if TYPE_CHECKING` does not count."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_from_its_own_layer_or_one_below(path):
    own = part_of(path)
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "mlxcel":
            assert not rest or layer(rest[0]) <= layer(own), f"{own} must not import {name}"
        elif first in LIBRARIES:
            assert own in LIBRARIES[first], f"{own} must not import {first}"


def test_few_modules_import_mlx_lm():
    users = [p.name for p in MODULES if any(n.split(".")[0] == "mlx_lm" for n in imports(p))]
    assert len(users) <= 7, users


@pytest.mark.parametrize("flags", [["--help"], ["--version"], ["--no-such-flag"]])
def test_help_version_and_a_bad_flag_do_not_pay_for_the_model_libraries(flags):
    code = (
        "import sys\nfrom mlxcel.__main__ import main\n"
        f"try:\n    main({flags!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'mlx', 'mlx_lm', 'transformers', 'aiohttp', 'numpy', 'llguidance'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
