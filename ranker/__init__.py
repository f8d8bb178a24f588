"""Orders prompts by expected output length. The decision core sees only the numbers; see docs/ranker.md."""
