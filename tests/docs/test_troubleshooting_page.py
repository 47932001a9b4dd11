"""The page on troubleshooting quotes messages that the code has."""

import re

from tests.docs.pages import ROOT, page


def test_every_message_of_the_page_is_one_of_the_code() -> None:
    files = [path for folder in ("grpo_pl", "serve") for path in sorted((ROOT / folder).rglob("*.py"))]
    # adjacent literals are one text
    code = "\n".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in files)
    rows = [
        row for row in page("troubleshooting").partition("## What was tried")[0].splitlines() if row.startswith("| `")
    ]
    assert len(rows) >= 15
    for row in rows:
        for message in re.findall("`([^`]+)`", row.split("|")[1]):
            for part in re.split(r"\s*…\s*", message):
                assert part.strip(". ") in code, message
