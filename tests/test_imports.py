"""ARCHITECTURE.md's rules about who may import whom, checked on the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = ("builder", "runtime", "cli", "fixtures", "tests", "benchmarks", "fuzz")

# What a module may import of ours, beyond modules of its own package. The longest matching prefix speaks.
ALLOWED: dict[str, tuple[str, ...]] = {
    "cli": ("builder", "runtime"),
    "runtime": (
        "builder.audit",
        "builder.checks",
        "builder.contract",
        "builder.errors",
        "builder.progress",
        "builder.reader",
    ),
    "builder.models": (
        "builder.graph",
        "builder.ops",
        "builder.weights",
        "builder.config",
        "builder.contract",
        "builder.quant",
        "builder.checkpoint",  # TensorRef, which quant hands on
    ),
    "builder.quant": ("builder.checkpoint", "builder.errors"),
    "builder.checkpoint": ("builder.errors",),
    "builder.config": ("builder.errors",),
    "builder.contract": (),
    "builder.errors": (),
    "builder.progress": (),
    "builder": (),
}

# Who may import a library that is heavy, optional or another project's. Nobody else does.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("runtime", "tests"),
    "onnxruntime_genai": ("tests", "benchmarks"),
    "torch": ("tests.reference", "fixtures.trained", "fixtures.modelopt", "benchmarks"),
    "compressed_tensors": ("tests.reference", "fixtures.trained"),
    "transformers": ("runtime.text", "tests.reference", "fixtures.trained", "fixtures.modelopt"),
    "modelopt": ("fixtures.modelopt",),
    "click": (
        "cli",
        "builder.display",
        "fuzz",
        "fixtures.lookalike",
        "fixtures.trained",
        "fixtures.modelopt",
        "benchmarks",
        "tests",
    ),
    "rich": ("cli", "builder.display"),
}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name and file of every module of the project."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in OURS:
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere, also inside functions and for type checking."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = str(node.module)
            for alias in node.names:
                submodule = ROOT.joinpath(*module.split("."), alias.name)
                is_module = submodule.with_suffix(".py").is_file() or submodule.is_dir()
                yield f"{module}.{alias.name}" if is_module else module


# Modules that know something nobody else is to know.
SECRETS: dict[str, tuple[str, ...]] = {
    "builder.quant.modelopt": ("builder.quant", "tests"),
    "builder.quant.finegrained_fp8": ("builder.quant", "tests"),
    "builder.quant.compressed_tensors": ("builder.quant", "tests"),
}


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def violations(name: str, imported: str) -> str | None:
    """What is wrong with module `name` importing `imported`, or None."""
    top = imported.partition(".")[0]
    if top in LIBRARIES and not within(name, LIBRARIES[top]):
        return f"{name} imports {imported}"
    for secret, users in SECRETS.items():
        if within(imported, (secret,)) and not within(name, users):
            return f"{name} imports {imported}"
    if top not in OURS or within(name, ("tests", "fixtures", "benchmarks", "fuzz")):
        return None
    rules = [prefix for prefix in ALLOWED if within(name, (prefix,))]
    rule = max(rules, key=len)
    return None if within(imported, (rule, *ALLOWED[rule])) else f"{name} imports {imported}"


def test_every_import_is_allowed() -> None:
    found = list(modules())
    names = {name for name, _ in found}
    assert {"cli", "builder.models.decoder", "builder.quant.linear", "runtime.engine"} <= names
    wrong = [
        text for name, path in found for text in (violations(name, imported) for imported in imports(path)) if text
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("builder.checkpoint", "builder.config"),
        ("builder.config", "builder.checkpoint"),
        ("builder.contract", "builder.config"),
        ("builder.quant.linear", "builder.graph"),
        ("builder.models.layers", "builder.package"),
        ("builder.models.layers", "onnxruntime"),
        ("builder.exporter", "runtime.loading"),
        ("builder.exporter", "builder.quant.modelopt"),
        ("builder.exporter", "cli"),
        ("builder.weights", "torch"),
        ("runtime.engine", "builder.exporter"),
        ("runtime.engine", "builder"),
        ("runtime.session", "cli"),
        ("cli", "onnxruntime"),
        ("tests.builder.test_models", "torch"),
        ("fixtures.writer", "torch.nn"),
    ],
)
def test_a_forbidden_import_would_be_found(name: str, imported: str) -> None:
    assert violations(name, imported)


def test_every_kind_of_import_is_seen(tmp_path: Path) -> None:
    lines = ["import a.b, c", "from d import e", "from builder import contract", "from builder import export"]
    (tmp_path / "x.py").write_text("\n".join([*lines, "def f():", "    import g"]))
    assert list(imports(tmp_path / "x.py")) == ["a.b", "c", "d", "builder.contract", "builder", "g"]


def test_contrib_ops_are_emitted_in_one_file() -> None:
    """Graph.contrib takes any attribute of any op; ops.py alone calls it, against its table."""
    users = {
        name
        for name, path in modules()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if name.startswith("builder") and isinstance(node, ast.Attribute) and node.attr == "contrib"
    }
    assert users == {"builder.ops"}


def test_the_public_packages_load_nothing_heavy() -> None:
    """`build-model --help` must answer at once; each package imports its parts on first use."""
    script = "import sys, builder, runtime, cli, fixtures; print(' '.join(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT, capture_output=True, text=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert not loaded & {"onnx", "onnx_ir", "onnxscript", "onnxruntime", "numpy", "torch", "transformers", "pydantic"}
