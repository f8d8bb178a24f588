"""The papers' tables and figures beside ours, and their rules as printed: evidence, not part of the product."""
