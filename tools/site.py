"""Builds the documentation as a site, `out/docs/site`, with a search that needs no network.

    make docs          (python tools/site.py)

The pages are those of the repository. Their links to each other become links of the site; links to
other files lead to the repository that `pyproject.toml` names. A link to what does not exist is an
error. Zensical makes the site from `out/docs/pages`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WORK = ROOT / "out" / "docs"

OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "src/milepost/cache/README.md": "cache.md",
    "src/milepost/tiny/README.md": "tiny-card.md",
}
"""Pages outside docs/, by their path in the repository, with their names in the site."""

SECTIONS: dict[str, tuple[str, ...]] = {
    "Use": (
        *("python.md", "server.md", "flags.md", "metrics.md", "clients.md"),
        *("deployment.md", "security.md"),
    ),
    "Features": (
        *("images.md", "tiers.md", "quantization.md", "speculation.md", "parallel.md"),
        *("disaggregation.md", "determinism.md", "simulator.md"),
    ),
    "Facts": (
        *("benchmarks.md", "policies.md", "determinism.md", "gpus.md", "tiny.md"),
        "tiny-card.md",
    ),
    "Change it": (
        *("contributing.md", "design.md", "cache.md", "adding-a-model.md", "kernels.md"),
        "changelog.md",
    ),
}
"""The navigation. Pages that it does not name are under "More"."""
TITLES = {"tiny-card.md": "Milepost-tiny: model card"}
"""Titles in the navigation, where a page's own is not enough."""

LINK = re.compile(r"(\]\(|(?:src|srcset)=\")((?![a-z]+:|#)[^)\"#\s]+)((?:#[^)\"]*)?[)\"])")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.M | re.S)


def repository() -> str:
    """Returns the address that files outside the site are linked at."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["urls"]["Repository"])


def pages() -> dict[Path, str]:
    """Returns each page's file with its name in the site."""
    inside = {path: path.name for path in sorted((ROOT / "docs").glob("*.md"))}
    return {ROOT / path: name for path, name in OUTSIDE.items()} | inside


def linked(text: str, page: Path, names: dict[Path, str]) -> str:
    """Returns a page's text with its links as the site needs them."""

    def target(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        path = (page.parent / link).resolve()
        if not path.exists():
            raise SystemExit(f"{page.relative_to(ROOT)}: no such file: {link}")
        if path in names:
            return f"{before}{names[path]}{after}"
        if path.is_relative_to(ROOT / "docs") and path.suffix != ".md":
            return f"{before}{path.relative_to(ROOT / 'docs').as_posix()}{after}"
        return f"{before}{repository()}/blob/main/{path.relative_to(ROOT).as_posix()}{after}"

    parts = CODE.split(text)
    return "".join(part if CODE.fullmatch(part) else LINK.sub(target, part) for part in parts)


def prepare() -> Path:
    """Writes pages and settings to where Zensical reads them, and returns the settings' file."""
    shutil.rmtree(WORK / "pages", ignore_errors=True)
    shutil.copytree(ROOT / "docs", WORK / "pages", ignore=shutil.ignore_patterns("*.md"))
    names = pages()
    for path, name in names.items():
        text = linked(path.read_text(encoding="utf-8"), path, names)
        (WORK / "pages" / name).write_text(text, encoding="utf-8")
    settings = WORK / "zensical.toml"
    settings.write_text(toml(navigation(set(names.values()))), encoding="utf-8")
    return settings


def navigation(names: set[str]) -> list[Any]:
    """Returns the sections of the menu, with every page in one of them."""
    named = {"index.md", *(name for section in SECTIONS.values() for name in section)}
    if named - names:
        raise SystemExit(f"the navigation names pages that do not exist: {sorted(named - names)}")
    more = {"More": sorted(names - named)} if names - named else {}
    sections = {title: list(section) for title, section in SECTIONS.items()} | more
    return [{"Milepost": "index.md"}, *({title: section} for title, section in sections.items())]


def toml(menu: list[Any]) -> str:
    """Returns Zensical's settings. All its assets are local: no fonts of others, no plugins."""
    items = [item for row in menu for item in row.items()]
    rows = [f"{{ {json.dumps(title)} = {_entry(what)} }}" for title, what in items]
    features = ["search.highlight", "content.code.copy", "navigation.top", "navigation.footer"]
    schemes = [("default", "Dark", "weather-night"), ("slate", "Light", "weather-sunny")]
    palette = [
        f'[[project.theme.palette]]\nscheme = "{scheme}"\n'
        f'media = "(prefers-color-scheme: {media})"\n'
        f'toggle = {{ icon = "material/{icon}", name = "{other}" }}'
        for (scheme, other, icon), media in zip(schemes, ("light", "dark"), strict=True)
    ]
    lines = [
        "[project]",
        'site_name = "Milepost"',
        'docs_dir = "pages"',
        'site_dir = "site"',
        "use_directory_urls = false",
        f"nav = [{', '.join(rows)}]",
        "[project.theme]",
        "font = false",
        f"features = {json.dumps(features)}",
        *palette,
    ]
    return "\n".join(lines) + "\n"


def _entry(pages: str | list[str]) -> str:
    """Returns a section, or a page under its own title, as Zensical's settings write it."""
    if isinstance(pages, str):
        title = TITLES.get(pages)
        return f"{{ {json.dumps(title)} = {json.dumps(pages)} }}" if title else json.dumps(pages)
    return f"[{', '.join(map(_entry, pages))}]"


def main() -> int:
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file"]
    environment = {**os.environ, "NO_COLOR": "1"}
    return subprocess.run([*command, str(prepare())], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
