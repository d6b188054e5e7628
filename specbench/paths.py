"""Where the project's own folders lie; the only module that derives them from its own place."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
CONF_DIR = PROJECT / "conf"
ASSETS = PROJECT / "assets"
SURFACES = PROJECT / "surfaces"
