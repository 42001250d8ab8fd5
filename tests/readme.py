"""Write the README's generated parts anew: python -m tests.readme"""

from __future__ import annotations

import re
from pathlib import Path

from megamoe.dispatch.explain import support_table

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
