"""Write the README's generated parts anew: python -m tests.readme"""

from __future__ import annotations

import re
from pathlib import Path

from megamoe.dispatch.explain import support_table
from megamoe.dispatch.select import KERNELS
from megamoe.suite import page
from megamoe.suite.results import document


def measured(docs: Path) -> str:
    return page.document(docs / "bench" / "h200", docs / "verdicts" / "h200")


def verdicts(folder: Path) -> str:
    kernels = [k.sheet.name for k in KERNELS if k.sheet.name != "reference"]
    return document(folder, kernels)


if __name__ == "__main__":
    readme = Path(__file__).parents[1] / "README.md"
    table = f"<!-- support-table -->\n{support_table()}\n<!-- /support-table -->"
    text = re.sub(
        r"<!-- support-table -->\n(.*\n)?<!-- /support-table -->",
        lambda _: table,
        readme.read_text(),
        flags=re.DOTALL,
    )
    readme.write_text(text)
    docs = readme.parent / "docs"
    (docs / "verdicts-h200.md").write_text(verdicts(docs / "verdicts" / "h200"))
    (docs / "bench-h200.md").write_text(measured(docs))
