"""The rules of the code base as functions from a source tree to a list of violations; `test_architecture` applies them.

Imports go downwards through the levels, or stay inside a folder. Levels belong to files, not folders: the schedules of
the pipeline are pure Python although their neighbours are not. Imports inside functions and under TYPE_CHECKING count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60

PURE_PIPELINE_FILES = (
    *("partition", "balance", "schedules", "check_orders", "lowering", "verify", "simulate", "from_config"),
    *("measured", "picture", "picture_html", "picture_svg"),
)
CONFIGURATION_FILES = (
    "batch_sizes",
    "config",
    "config_data",
    "config_io",
    "config_lora",
    "config_model",
    "config_multipliers",
    "config_numerics",
    "config_optim",
    "config_output",
    "presets",
    "validate",
    "validate_chat",
    "validate_lora",
    "validate_memory",
    "validate_numerics",
    "validate_optim",
    "validate_training",
)
COMMAND_LINE_FILES = ("cli", "cli_help", "aliases")
LEVELS = {
    "megalite.errors": 0,
    **{f"megalite.{name}": 0 for name in (*CONFIGURATION_FILES, *COMMAND_LINE_FILES)},
    **{f"megalite.pipeline.{name}": 0 for name in PURE_PIPELINE_FILES},
    "megalite._index_builder": 0,
    "megalite._word_cache": 0,
    "megalite._decode": 0,
    "megalite.grid": 1,
    "megalite.log": 1,
    "megalite.comm": 2,
    "megalite.comm_check": 2,
    "megalite.tensor_parallel": 4,
    "megalite.data": 4,
    "megalite.model": 5,
    "megalite.pipeline": 5,
    "megalite.data_parallel": 5,
    "megalite.optim": 5,
    "megalite.checkpoint": 6,
    "megalite.convert": 7,
    "megalite.generation": 6,
    "megalite.planner": 6,
    "megalite.evaluation": 7,
    "megalite.training": 7,
    "megalite.testing": 8,
    "tools": 8,
    "examples": 8,
    "pretrain_gpt": 8,
}
EXACT_LEVELS = {"megalite": 0, "megalite.pipeline": 0}  # these two __init__ files, which every import runs through
ALLOWED_SIDEWAYS = {("tools", "megalite.testing"), ("examples", "megalite.testing")}

# programs that prepare data or look at schedules: they start at once because they never import torch
TORCH_FREE_TOOLS = (
    "build_index",
    "provenance",
    "preprocess_data",
    "merge_datasets",
    "inspect_dataset",
    "draw_schedule",
    "verify_schedules",
)

TENSOR_COLLECTIVES = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "send",
}


@dataclass(frozen=True)
class Module:
    """One source file; `name` is what an import statement calls it."""

    name: str
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def modules(root: Path) -> list[Module]:
    """All source files of the project under `root`, without its tests."""
    paths = [*root.glob("megalite/**/*.py"), *root.glob("tools/**/*.py"), *root.glob("examples/**/*.py")]
    paths += [path for path in [root / "pretrain_gpt.py"] if path.exists()]
    return [Module(_name_of(path.relative_to(root)), path) for path in sorted(paths)]


def _name_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def level(name: str) -> int | None:
    """Level of a module, or of a name in one; None if the table does not know it."""
    if name in EXACT_LEVELS:
        return EXACT_LEVELS[name]
    while name:
        if name in LEVELS:
            return LEVELS[name]
        name = name.rpartition(".")[0]
    return None


def folder(name: str) -> str:
    """The part of the project a module belongs to: `megalite.model` for everything below it, `tools`, `megalite`."""
    parts = name.split(".")
    inner = ".".join(parts[:2])
    return inner if LEVELS.get(inner, 0) >= 4 else parts[0]


def imports(module: Module) -> Iterator[tuple[str, int]]:
    """`(imported name, line)` of each import statement; of `from a import b` it is `a.b`, whether a module or not."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = module.package.split(".")
                anchor = anchor[: len(anchor) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def wrong_imports(root: Path) -> list[str]:
    """Imports that go upwards or sideways, and modules without a level."""
    violations = []
    for module in modules(root):
        own = level(module.name)
        if own is None:
            violations.append(f"{module.name}: has no level; add it to the table in tests/architecture.py")
            continue
        for target, line in imports(module):
            if target.split(".")[0] not in ("megalite", "tools", "examples", "pretrain_gpt"):
                continue
            other = level(target) or 0  # 0: a name that megalite/__init__.py defines
            if not _may_import(module.name, own, target, other):
                violations.append(f"{module.name}:{line} (level {own}) imports {target} (level {other})")
    return violations


def _may_import(source: str, own: int, target: str, other: int) -> bool:
    if own == other == 0:
        return True
    if folder(source) == folder(target):
        return other <= own
    return other < own or (folder(source), folder(target)) in ALLOWED_SIDEWAYS


def distributed_in_data(root: Path) -> list[str]:
    """Uses of torch.distributed in data/, which knows ranks as two integers."""
    violations = []
    for module in modules(root):
        if folder(module.name) != "megalite.data":
            continue
        lines = [line for name, line in imports(module) if name.startswith("torch.distributed")]
        lines += [
            node.lineno for node in ast.walk(module.tree) if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        ]
        violations += [f"{module.name}:{line} uses torch.distributed" for line in lines]
    return violations


def hidden_collectives(root: Path) -> list[str]:
    """Collectives on tensors that torch.distributed runs for a module of the package other than comm."""
    violations = []
    for module in modules(root):
        if not module.name.startswith("megalite.") or module.name in ("megalite.comm", "megalite.testing"):
            continue
        names = {"torch.distributed"}
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                names |= {alias.asname for alias in node.names if alias.name == "torch.distributed" and alias.asname}
            elif isinstance(node, ast.ImportFrom) and node.module == "torch":
                names |= {alias.asname or alias.name for alias in node.names if alias.name == "distributed"}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                bad = {alias.name for alias in node.names} & TENSOR_COLLECTIVES
                violations += [f"{module.name}:{node.lineno} imports {name}" for name in sorted(bad)]
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in TENSOR_COLLECTIVES and ast.unparse(node.value) in names:
                violations.append(f"{module.name}:{node.lineno} uses {ast.unparse(node)}; go through megalite.comm")
    return violations


def too_long(root: Path) -> list[str]:
    """Files and functions of the package above the line budget."""
    violations = []
    for module in modules(root):
        if module.name.split(".")[0] != "megalite":
            continue
        num_lines = len(module.source.splitlines())
        if num_lines > MAX_FILE_LINES:
            violations.append(f"{module.name}: {num_lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    violations.append(f"{module.name}:{node.lineno} {node.name}(): {num_lines} lines, at most {MAX_FUNCTION_LINES}")
    return violations


def without_docstring(root: Path) -> list[str]:
    """Modules that do not say what they decide and why; an empty `__init__.py` has nothing to say."""
    return [
        f"{module.name}: no module docstring" for module in modules(root) if not ast.get_docstring(module.tree) and module.source.strip()
    ]


def wrong_exports(root: Path) -> list[str]:
    """Names in `__all__` that the module does not define or import, or that it lists twice."""
    violations = []
    for module in modules(root):
        listed = _listed_names(module.tree)
        if len(set(listed)) != len(listed):
            violations.append(f"{module.name}: __all__ lists a name twice")
        defined = set(_top_level_names(module.tree.body))
        violations += [f"{module.name}: __all__ names {name}, which does not exist" for name in sorted(set(listed) - defined)]
    return violations


def _listed_names(tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return []


def _top_level_names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.If):
            yield from _top_level_names([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            handlers = [statement for handler in node.handlers for statement in handler.body]
            yield from _top_level_names([*node.body, *handlers, *node.orelse, *node.finalbody])
        elif isinstance(node, ast.With):
            yield from _top_level_names(node.body)


def torch_free_modules(root: Path) -> list[str]:
    """Modules that must be importable without torch: level 0, and the tools that have no use for it."""
    found = [module.name for module in modules(root)]
    tools = {f"tools.{name}" for name in TORCH_FREE_TOOLS}
    return [name for name in found if level(name) == 0 or name in tools]
