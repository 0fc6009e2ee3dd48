"""The tables of patches in docs/horovod.md, made from the headers of the patches.

    python -m hvdtrain.horovod_build.patch_table

prints both; a test compares them with the page.
"""

from collections.abc import Sequence

from hvdtrain.horovod_build.patching import Patch, horovod_patches


def patch_table(name: str, patches: Sequence[Patch]) -> str:
    """Return the Markdown table of one set."""
    columns = ["patch", "what", *(["needed"] if name == "build" else []), "files", "why", "upstream"]
    lines = [_row(columns), _row(["---"] * len(columns))]
    for patch in patches:
        if not patch.name.startswith(f"{name}/"):
            continue
        cells = [f"`{patch.name.partition('/')[2]}`", patch.subject]
        cells += [patch.needed] if name == "build" else []
        cells += [", ".join(f"`{diff.file}`" for diff in patch.files), patch.why, patch.upstream]
        lines.append(_row(cells))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(patch_table("build", horovod_patches()), patch_table("launcher", horovod_patches()), sep="\n\n")
