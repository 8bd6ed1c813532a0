"""Records the order of the calls that make a file durable, while they still happen."""

import os
from pathlib import Path
from typing import Any

import pytest


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The list that fills up with (call, path). Temporary names are shown as `temporary`."""
    calls: list[tuple[str, str]] = []

    def short(path: Any) -> str:
        text = str(path)
        return "temporary" if text.endswith(".tmp") else text

    def watch(name: str, describe: Any) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((name, describe(*arguments)))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    watch("write", lambda descriptor, _: short(Path(f"/proc/self/fd/{descriptor}").readlink()))
    watch("fsync", lambda descriptor: short(Path(f"/proc/self/fd/{descriptor}").readlink()))
    watch("link", lambda source, target, *_: f"{short(source)} -> {short(target)}")
    watch("rename", lambda source, target, *_: f"{short(source)} -> {short(target)}")
    watch("unlink", lambda path, *_: short(path))
    return calls
