"""Guard rails: import direction, no torch where none is needed, line budgets, docstrings and exports.

Each rule is applied to the project, and to a small tree that breaks it, so that no rule is silently blind.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import architecture as arch

ROOT = Path(__file__).resolve().parents[1]

Rule = Callable[[Path], list[str]]
RULES = [
    arch.wrong_imports,
    arch.distributed_in_data,
    arch.hidden_collectives,
    arch.too_long,
    arch.without_docstring,
    arch.wrong_exports,
]


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_project_keeps_the_rule(rule: Rule) -> None:
    violations = rule(ROOT)
    assert not violations, "\n" + "\n".join(violations)


def imports_without_torch(root: Path) -> subprocess.CompletedProcess[str]:
    names = arch.torch_free_modules(root)
    lines = ["import importlib, sys", f"sys.path.insert(0, {str(root)!r})"]
    for name in names:
        lines.append(f"importlib.import_module({name!r})")
        lines.append(f"assert 'torch' not in sys.modules, '{name} imports torch'")
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, cwd=root)


def test_pure_modules_do_not_import_torch() -> None:
    assert {"megalite", "megalite.errors"} <= set(arch.torch_free_modules(ROOT))
    done = imports_without_torch(ROOT)
    assert done.returncode == 0, done.stderr


def test_an_indirect_import_of_torch_is_seen(tmp_path: Path) -> None:
    files = {"tools/preprocess_data.py": "import tools.helper\n", "tools/helper.py": "import torch\n"}
    done = imports_without_torch(write_tree(tmp_path, files))
    assert done.returncode != 0
    assert "tools.preprocess_data imports torch" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "target"),
    [
        ("megalite/config.py", "from megalite.grid import Grid", "megalite.grid"),
        ("megalite/comm.py", "import megalite.model.gpt", "megalite.model.gpt"),
        ("megalite/data/sampler.py", "from megalite.tensor_parallel import layers", "megalite.tensor_parallel"),
        ("megalite/model/gpt.py", "from megalite import optim", "megalite.optim"),
        ("megalite/model/gpt.py", "from ..pipeline.runtime import step", "megalite.pipeline.runtime"),
        ("megalite/model/gpt.py", "def f():\n    import megalite.training.loop", "megalite.training.loop"),
        ("megalite/pipeline/verify.py", "from .runtime import step", "megalite.pipeline.runtime"),
        (
            "megalite/optim/lr.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megalite.data_parallel import shard",
            "megalite.data_parallel",
        ),
        ("megalite/planner/hf.py", "from megalite.checkpoint import store", "megalite.checkpoint"),
        ("megalite/training/loop.py", "import pretrain_gpt", "pretrain_gpt"),
        ("megalite/testing/rank_pool.py", "import tools.parity", "tools.parity"),
        ("tools/parity.py", "import examples.demo", "examples.demo"),
    ],
)
def test_wrong_imports_are_seen(tmp_path: Path, name: str, text: str, target: str) -> None:
    files = {
        "megalite/__init__.py": "",
        "megalite/optim/__init__.py": "",
        "megalite/pipeline/runtime.py": "",
        name: text,
    }
    violations = arch.wrong_imports(write_tree(tmp_path, files))
    assert len(violations) == 1, violations
    assert f" imports {target}" in violations[0]
    assert violations[0].startswith(name.removesuffix(".py").replace("/", "."))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("megalite/cli.py", "from megalite.config import TrainConfig\nfrom megalite import errors, __version__"),
        ("megalite/pipeline/lowering.py", "from megalite.errors import ScheduleError\nfrom .schedules import gpipe"),
        ("megalite/pipeline/runtime.py", "from megalite.pipeline.verify import verify\nimport megalite.comm"),
        ("megalite/grid.py", "from megalite.log import get_logger"),
        (
            "megalite/model/gpt.py",
            "from megalite.model.attention import Attention\nimport megalite.comm",
        ),
        ("megalite/convert/hf/llama.py", "from megalite.convert.hub import Hub\nimport megalite.model"),
        ("megalite/testing/__init__.py", "from megalite.testing.rank_pool import RankPool"),
        ("tools/parity.py", "from megalite.testing import RankPool\nimport tools.table, megalite.training, torch"),
        ("pretrain_gpt.py", "from megalite.training.loop import train"),
    ],
)
def test_right_imports_are_let_through(tmp_path: Path, name: str, text: str) -> None:
    assert arch.wrong_imports(write_tree(tmp_path, {name: text, "megalite/errors.py": ""})) == []


def test_a_module_without_a_level_is_seen(tmp_path: Path) -> None:
    violations = arch.wrong_imports(write_tree(tmp_path, {"megalite/helpers.py": '"""Helpers."""'}))
    assert violations == ["megalite.helpers: has no level; add it to the table in tests/architecture.py"]


@pytest.mark.parametrize(
    ("rule", "name", "text", "words"),
    [
        (arch.distributed_in_data, "megalite/data/a.py", "import torch.distributed as dist", "a:1 uses"),
        (
            arch.distributed_in_data,
            "megalite/data/a.py",
            "import torch\ntorch.distributed.barrier()",
            "a:2 uses",
        ),
        (
            arch.hidden_collectives,
            "megalite/optim/a.py",
            "import torch.distributed as d\nd.all_reduce(x)",
            "a:2",
        ),
        (arch.hidden_collectives, "megalite/optim/a.py", "from torch.distributed import send", "imports send"),
        (
            arch.hidden_collectives,
            "megalite/optim/a.py",
            "from torch import distributed as d\nd.recv(x)",
            "d.recv",
        ),
        (arch.hidden_collectives, "megalite/optim/a.py", "import torch\ntorch.distributed.broadcast(x)", "a:2"),
        (arch.too_long, "megalite/a.py", "\n" * 301, "301 lines, at most 300"),
        (arch.too_long, "megalite/a.py", "class A:\n def f(self):\n" + "  x = 1\n" * 60, "f(): 61 lines"),
        (arch.without_docstring, "tools/a.py", "# only a comment", "tools.a: no module docstring"),
        (arch.wrong_exports, "megalite/a.py", "__all__ = ['f', 'g']\ndef f(): ...", "names g"),
        (arch.wrong_exports, "megalite/a.py", "__all__ = ['f', 'f']\ndef f(): ...", "twice"),
    ],
)
def test_broken_rules_are_seen(tmp_path: Path, rule: Rule, name: str, text: str, words: str) -> None:
    violations = rule(write_tree(tmp_path, {name: text}))
    assert len(violations) == 1, violations
    assert words in violations[0]


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        (arch.hidden_collectives, "megalite/comm.py", "import torch.distributed as d\nd.all_reduce(x)"),
        (arch.hidden_collectives, "megalite/optim/a.py", "from megalite import comm\ncomm.all_reduce(x)"),
        (arch.too_long, "megalite/a.py", "\n" * 300),
        (arch.too_long, "tools/a.py", "\n" * 301),
        (arch.without_docstring, "megalite/pipeline/__init__.py", ""),
        (arch.wrong_exports, "megalite/a.py", "from b import c as d\nE: int = 1\n__all__ = ['E', 'd']"),
    ],
)
def test_kept_rules_are_let_through(tmp_path: Path, rule: Rule, name: str, text: str) -> None:
    assert rule(write_tree(tmp_path, {name: text})) == []
