"The notebooks and the package they export are one thing, and the notebooks are clean, small and in order."
import ast
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(p for p in ROOT.glob("nbs/**/*.ipynb") if ".ipynb_checkpoints" not in p.parts)
EXPORTING = {p: m[1] for p in NOTEBOOKS if (m := re.search(r"#\| *default_exp (\w+)", p.read_text(encoding="utf-8")))}


def code(path):
    "Python source of a notebook, magics left out."
    cells = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    return "\n".join(line for cell in cells for line in cell.splitlines() if not re.match(r"\s*[%!]", line))


def nbdev(command, folder):
    "An nbdev command in a folder."
    done = subprocess.run([Path(sys.executable).parent / command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    "The notebooks and the package in a folder of their own."
    folder = tmp_path_factory.mktemp("copy")
    for name in ("nbs", "qk_geometry"): shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("settings.ini", "pyproject.toml", "setup.py", "README.md"): shutil.copy(ROOT / name, folder)
    return folder


def test_export_is_in_sync(copy):
    for p in (copy / "qk_geometry").glob("*.py"):
        if p.name != "__init__.py": p.unlink()
    nbdev("nbdev_export", copy)
    made = {p.name: p.read_text() for p in (copy / "qk_geometry").glob("*.py")}
    kept = {p.name: p.read_text() for p in (ROOT / "qk_geometry").glob("*.py")}
    assert set(made) == set(kept) and [name for name in made if made[name] != kept[name]] == []


def test_one_notebook_one_module():
    modules = sorted(EXPORTING.values())
    assert modules == sorted(set(modules)) == sorted(p.stem for p in (ROOT / "qk_geometry").glob("*.py") if not p.stem.startswith("_"))
    numbers = [p.name.split("_")[0] for p in NOTEBOOKS if p.parent.name == "nbs"]
    assert len(numbers) == len(set(numbers)) and all(re.fullmatch(r"\d\d[a-z]?", n) for n in numbers)


def test_notebooks_are_clean_and_keep_their_parameters_tag(copy):
    nbdev("nbdev_clean", copy)
    changed = [p.name for p in NOTEBOOKS if (copy / p.relative_to(ROOT)).read_bytes() != p.read_bytes()]
    assert changed == []
    for p in NOTEBOOKS:
        if p.parent.name == "runs":
            assert sum("parameters" in c.metadata.get("tags", []) for c in nbformat.read(copy / p.relative_to(ROOT), 4).cells) == 1


@pytest.mark.parametrize("path", [*NOTEBOOKS, ROOT / "paper/paper.ipynb"], ids=lambda p: p.stem)
def test_notebook_is_small_and_free_of_errors(path):
    assert path.stat().st_size < 300_000
    outputs = [o for c in nbformat.read(path, 4).cells if c.cell_type == "code" for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    paths = r"/(home|root|Users)/|(?<![\w.…])/([\w.-]+/)+(site-packages|nbs|results|grids|qk_geometry)\b"
    assert not re.search(paths, "".join(str(o) for o in outputs)), "an output names a folder of the machine it was made on"


@pytest.mark.parametrize("path", EXPORTING, ids=lambda p: p.stem)
def test_a_notebook_imports_only_from_lower_numbers(path):
    order = {module: p.name.split("_")[0] for p, module in EXPORTING.items()}
    modules = [n.module for n in ast.walk(ast.parse(code(path))) if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("qk_geometry.")]
    modules += [a.name for n in ast.walk(ast.parse(code(path))) if isinstance(n, ast.Import) for a in n.names if a.name.startswith("qk_geometry.")]
    names = [m.split(".")[1] for m in modules]
    assert [m for m in names if order[m] >= order[EXPORTING[path]]] == []


@pytest.mark.parametrize("module", ["data", "columns", "presence", "progress", "grid", "runner", "cluster", "estimate", "stats", "causes", "figures", "tables", "arms", "comovement", "revisions", "systems", "variants", "claims", "relatives", "page", "explore", "cli"])
def test_no_torch_where_none_is_needed(module):
    if module not in EXPORTING.values(): pytest.fail(f"no notebook exports {module}")
    check = f"import sys, qk_geometry.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT).returncode == 0


def test_constraints_are_exact_and_cover_what_settings_ask_for():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lines}
    settings = ConfigParser(delimiters="=")
    settings.read(ROOT / "settings.ini")
    asked = " ".join(settings["DEFAULT"][k] for k in ("requirements", "paper_requirements", "notebooks_requirements", "cluster_requirements", "hub_requirements", "dev_requirements")).split()
    assert {re.split(r"[<>=]", a)[0].lower().replace("_", "-") for a in asked} <= pinned
